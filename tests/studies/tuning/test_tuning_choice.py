"""Knobs, the schedule, and the choice, on numbers that are made up."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from fedsim.core.errors import ConfigError, DivergenceError
from fedsim.studies.tuning import tune_cli
from fedsim.studies.tuning.choice import SelectionRule, choose_trial
from fedsim.studies.tuning.federations import TrialFederation, run_to_rung
from fedsim.studies.tuning.outcome_report import curves_of_trials, outcome_sentence, trial_records
from fedsim.studies.tuning.proposals import TrialProposals
from fedsim.studies.tuning.schedule import SuccessiveHalving, continuing_candidates
from fedsim.studies.tuning.space import (
    GridKnob,
    IntervalKnob,
    format_override,
    grid_trials,
    learning_rate_products,
    parse_knobs,
)
from fedsim.studies.tuning.tune import TuningOutcome, TuningState, _resolve_metric

NOISE = np.array([-0.02, 0.01, 0.0, 0.02, -0.01])


def lr(value: float):
    return (("lr", value),)


def test_knobs_are_written_as_hydra_writes_sweeps() -> None:
    fixed, knobs = parse_knobs([
        "clients=10", "lr=log(0.001,1,4)", "strategy=fedavg,mifa", "batch_size=range(8,33,8)",
        "strategy.server_lr=log(0.1,10)", "local.clip=interval(1,5)", "partition.alpha=0.1,null",
    ])  # fmt: skip
    assert fixed == ("clients=10",)
    assert knobs == [
        GridKnob("lr", (0.001, 0.01, 0.1, 1.0)), GridKnob("strategy", ("fedavg", "mifa")),
        GridKnob("batch_size", (8, 16, 24, 32)),
        IntervalKnob("strategy.server_lr", 0.1, 10.0, True), IntervalKnob("local.clip", 1.0, 5.0, False),
        GridKnob("partition.alpha", (0.1, "null")),
    ]  # fmt: skip
    assert [format_override("lr", 1e-05), format_override("strategy", "mifa")] == ["lr=1e-05", "strategy=mifa"]
    assert grid_trials(knobs[:2])[1] == (("lr", 0.001), ("strategy", "mifa"))


def test_an_interval_may_begin_or_end_at_0() -> None:
    for words, low, high in (("model.dropout=interval(0,0.5)", 0.0, 0.5), ("a=interval(-2,0)", -2.0, 0.0)):
        _, (knob,) = parse_knobs([words])
        assert (knob.lower_bound, knob.upper_bound) == (low, high)


def test_optuna_proposes_half_of_the_trials_after_it_has_seen_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    proposals = TrialProposals([IntervalKnob("lr", 0.1, 1.0, True)], 7, higher_is_better=True)
    assert proposals.generation_sizes == [7]  # drawn at random
    proposals.optuna_study = object()
    assert proposals.generation_sizes == [4, 3]
    proposals.num_trials = 1
    assert proposals.generation_sizes == [1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr=0.1"], "nothing is tuned"),
        (["lr=0.1,0.2", "lr=0.3,0.4"], "lr is given twice"),
        (["seeds=0,1"], "seeds cannot be tuned"),
        (["lr=log(1,0.1,3)"], "needs 0 < low < high"),
        (["lr=0.1,0.1"], "a value is listed twice"),
        (["lr=interval(2,1)"], "a lower bound below the upper one"),
        (["lr="], "nothing is tuned"),
    ],
)
def test_what_cannot_be_tuned_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_knobs(words)


@pytest.mark.parametrize(
    ("values", "at", "following"),
    [
        ((0.1, 0.3, 1.0), 1.0, 3.2),
        ((0.1, 0.3, 1.0), 0.1, 0.032),
        ((0.1, 0.3, 1.0), 0.3, None),
        ((0.1, 0.2, 0.3), 0.3, None),  # not geometric
        ((5, 10, 20), 20, 40),
        ((5, 10, 20), 5, None),  # 2.5 is not a whole number
        ((0.0, 1.0), 1.0, None),
    ],
)
def test_a_geometric_grid_goes_on_beyond_its_edges(values: tuple, at: float, following: float | None) -> None:
    assert GridKnob("lr", values).next_value_beyond_edge(at) == following


@pytest.mark.parametrize(
    ("values", "chosen", "at_edge"),
    [
        ((0.1, 0.3, 1.0), 1.0, ["lr=1.0"]),
        ((0.1, 0.3, 1.0), 0.1, ["lr=0.1"]),
        ((0.1, 0.3, 1.0), 0.3, []),
        ((0.1, 0.2, 0.3), 0.3, []),  # not geometric: it does not go on
    ],
)
def test_a_choice_at_the_edge_of_a_geometric_grid_is_named(values: tuple, chosen: float, at_edge: list[str]) -> None:
    tuning = TuningState([GridKnob("lr", values)], [0, 1], "train_loss", False, [2])
    finalists = {lr(value): np.full(2, float(value != chosen)) + NOISE[:2] for value in values}
    assert TuningOutcome(tuning, choose_trial(finalists, False, SelectionRule("best"))).edge_knobs == at_edge


def test_the_metric_that_is_asked_for_is_compared_if_the_run_measures_it() -> None:
    columns = {name: f"of a test: {name}" for name in ("round", "seed", "train_loss", "test_loss", "test_accuracy")}
    assert _resolve_metric("train_loss", columns) == "train_loss"
    with pytest.raises(ConfigError, match=r"metric='weather' is not among those of the run: .*train_loss"):
        _resolve_metric("weather", columns)


def test_rungs_are_multiples_of_evaluations_and_reach_the_finalists() -> None:
    halving = SuccessiveHalving(eta=3, rungs=4, finalists=3)
    assert halving.rung_rounds(600, 1, 64) == [22, 66, 198, 600]
    assert halving.rung_rounds(600, 10, 64) == [20, 60, 180, 600]
    assert halving.rung_rounds(600, 10, 8) == [200, 600]  # one reduction: 8 → 3
    assert halving.rung_rounds(600, 10, 3) == [600]
    assert halving.rung_rounds(5, 10, 64) == [5]
    assert SuccessiveHalving(eta=1).rung_rounds(600, 10, 64) == [600]
    assert [halving.num_continuing(count) for count in (64, 22, 8, 2)] == [22, 8, 3, 3]


def test_the_best_of_all_that_were_compared_continue_and_failures_do_not() -> None:
    halving = SuccessiveHalving(eta=2, finalists=1)
    assert continuing_candidates([0.1, 0.4, 0.2, 0.3], [0, 1, 2, 3], halving) == [1, 3]
    assert (
        continuing_candidates([0.1, 0.4, 0.2, 0.3], [0, 2], halving) == []
    )  # these came later, and two earlier ones are better
    assert continuing_candidates([-math.inf, 0.4, -math.inf, -math.inf], [0, 1, 2, 3], halving) == [1]
    assert continuing_candidates([1.0, 1.0, 1.0, 1.0], [0, 1, 2, 3], halving) == [0, 1]


def test_finalists_are_behind_the_best_by_what_they_measured_in_the_end() -> None:
    tuning = TuningState(
        [GridKnob("lr", (0.1, 1, 9))], [0, 1], "test_loss", higher_is_better=False, rung_rounds=[1, 3, 9]
    )
    tuning.values_by_trial = {
        lr(0.1): [np.array([9.0, 9.0]), np.array([5.0, 5.0]), np.array([1.0, 2.0])],
        lr(1): [np.array([8.0, 8.0]), np.array([4.0, 4.0]), np.array([1.5, 3.5])],
        lr(9): [np.array([90.0, 90.0])],
    }
    choice = choose_trial(tuning.finalists, higher_is_better=False)
    best, second, dropped = trial_records(TuningOutcome(tuning, choice))
    assert (best["lr"], second["lr"], dropped["lr"]) == (0.1, 1, 9)
    assert (second["behind_best"], second["its_error"]) == pytest.approx((1.0, 0.5))
    assert math.isnan(best["behind_best"])
    assert math.isnan(dropped["behind_best"])
    assert (dropped["status"], dropped["rounds"], dropped["mean"]) == ("dropped", 1, 90.0)


def expected_error(rate: float, rounds: int) -> float:
    """Of gradient descent on a quadratic with curvature 1 from distance 10, with gradient noise of variance 1."""
    decay = (1 - rate) ** 2
    return 100 * decay**rounds + rate**2 * (1 - decay**rounds) / (1 - decay)


@pytest.mark.parametrize("rounds", [54, 540, 5400])
def test_smaller_rates_that_are_best_in_the_end_continue(rounds: int) -> None:
    rates = np.geomspace(0.001, 0.9, 64).tolist()
    chosen = {}
    for share in (0.0, 0.5):
        halving, active = SuccessiveHalving(smaller_rates=share), list(range(64))
        *rungs, _ = halving.rung_rounds(rounds, 1, 64)
        for completed in rungs:
            scores = [-expected_error(rates[position], completed) for position in active]
            of_active = [rates[position] for position in active]
            continuing = continuing_candidates(scores, list(range(len(active))), halving, of_active, completed / rounds)
            assert len(continuing) == halving.num_continuing(len(active))
            active = [active[position] for position in continuing]
        chosen[share] = min(expected_error(rates[position], rounds) for position in active)
    best = min(expected_error(rate, rounds) for rate in rates)
    assert chosen[0.0] > 1.5 * best
    assert chosen[0.5] < 1.25 * best


def test_places_for_smaller_rates_go_to_the_best_others_if_there_are_none() -> None:
    halving = SuccessiveHalving(eta=2, finalists=1)
    scores, rates = [0.4, 0.3, 0.2, 0.1], [0.1, 1.0, 2.0, 3.0]
    assert continuing_candidates(scores, [0, 1, 2, 3], halving, rates, 0.25) == [0, 1]  # the best has the smallest rate
    assert continuing_candidates(scores, [0, 1, 2, 3], halving, rates[::-1], 0.25) == [0, 2]  # nearest to 3 / 4
    assert continuing_candidates([math.nan, 0.3, -math.inf, 0.1], [0, 1, 2, 3], halving, rates[::-1], 0.25) == [1, 3]
    assert learning_rate_products([(("lr", 0.1), ("strategy.server_lr", 3), ("batch_size", 8))]) == [pytest.approx(0.3)]
    assert learning_rate_products([(("batch_size", 8),)]) is None
    assert learning_rate_products([]) is None


def test_of_trials_not_distinguishable_from_the_best_the_smallest_is_chosen() -> None:
    values = {
        lr(0.01): 0.70 + NOISE,  # worse by 0.2 on each seed
        lr(0.1): 0.895 + NOISE[::-1],  # differences scatter around 0.005
        lr(0.3): 0.90 + NOISE,
        lr(1.0): 0.899 + NOISE,  # worse by 0.001 on each seed: distinguishable, although the means are close
    }
    choice = choose_trial(values, True)
    assert (choice.trial, choice.best_trial, choice.indistinguishable_trials) == (lr(0.1), lr(0.3), [lr(0.1), lr(0.3)])
    assert choice.mean == pytest.approx(0.895)
    assert choice.error == pytest.approx(NOISE.std(ddof=1) / math.sqrt(5))
    assert choice.loss_against_best.mean == pytest.approx(0.005)
    assert choose_trial(values, True, SelectionRule("best")).trial == lr(0.3)
    assert choose_trial(values, True, SelectionRule("largest")).trial == lr(0.3)
    losses = {trial: 1 - numbers for trial, numbers in values.items()}
    assert choose_trial(losses, False).trial == lr(0.1)
    difference = 0.005 + NOISE - NOISE[::-1]
    errors = difference.mean() / (difference.std(ddof=1) / math.sqrt(5))
    assert errors == pytest.approx(math.sqrt(1.25))  # Student's t with 4 degrees: 1.13 bounds 68 %, 0.13 bounds 10 %
    assert choose_trial(values, True, SelectionRule(confidence=0.1)).trial == lr(
        0.3
    )  # a narrower interval tells them apart


def test_what_is_not_a_number_stays_that_of_the_best_trial_and_divergence_is_never_chosen() -> None:
    one, other = (("strategy", "fedavg"), ("lr", 0.1)), (("strategy", "mifa"), ("lr", 0.01))
    values = {
        one: 0.9 + NOISE,
        other: 0.899 + NOISE[::-1],
        (("strategy", "fedavg"), ("lr", 0.03)): 0.95 + NOISE * np.nan,
    }
    choice = choose_trial(values, True)
    assert (choice.trial, set(choice.indistinguishable_trials)) == (one, {one, other})
    with pytest.raises(ConfigError, match="prefer='fastest' is unknown"):
        SelectionRule("fastest")
    with pytest.raises(ConfigError, match="no trial ended with finite values"):
        choose_trial({one: NOISE * np.nan}, True)


@pytest.mark.parametrize(
    ("prefer", "others"),
    [("smallest", "; 1 more finalist is"), ("largest", "; 1 more finalist is"), ("best", "; 2 more")],
)
def test_the_sentence_counts_neither_the_choice_nor_the_best_among_the_others(prefer: str, others: str) -> None:
    means = {lr(0.1): 1.001, lr(0.2): 1.0, lr(0.3): 1.001, lr(0.4): 2.0}
    values = {trial: mean + (NOISE if number % 2 else -NOISE) for number, (trial, mean) in enumerate(means.items())}
    tuning = TuningState([GridKnob("lr", (0.1, 0.2, 0.3, 0.4))], [0, 1, 2, 3, 4], "train_loss", False, [10])
    tuning.values_by_trial = {trial: [numbers] for trial, numbers in values.items()}
    outcome = TuningOutcome(tuning, choose_trial(tuning.finalists, False, SelectionRule(prefer)))
    assert outcome.choice.best_trial == lr(0.2)
    assert len(outcome.choice.indistinguishable_trials) == 3
    assert others in outcome_sentence(outcome)


@pytest.mark.parametrize("option", ["eta", "rungs", "finalists", "together", "smaller-rates"])
def test_the_command_refuses_a_schedule_that_makes_no_sense_by_the_name_of_its_option(
    option: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"--{option}=-1"):
        tune_cli.main(["lr=0.1,1", f"--{option}", "-1", "--out", str(tmp_path / "tune")])
    assert not list(tmp_path.iterdir())


class Study:
    """What optuna is asked and told; its own import takes two seconds."""

    def __init__(self, rates: Sequence[float]) -> None:
        self.waiting, self.reports, self.told = list(rates), {}, {}

    def ask(self) -> Any:
        rate = self.waiting.pop(0)
        reports = self.reports.setdefault(rate, [])
        return SimpleNamespace(
            rate=rate,
            suggest_float=lambda key, low, high, log: rate,
            report=lambda value, step: reports.append((step, value)),
        )

    def tell(self, trial: Any, value: float | None = None, state: str = "COMPLETE") -> None:
        assert trial.rate not in self.told
        self.told[trial.rate] = (value, state)


def test_optuna_is_told_what_a_trial_measured_in_the_end_or_why_it_has_no_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = SimpleNamespace(TrialState=SimpleNamespace(FAIL="FAIL", PRUNED="PRUNED"))
    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(trial=states))
    monkeypatch.setitem(sys.modules, "optuna.trial", states)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    proposals = TrialProposals([IntervalKnob("lr", 0.1, 1.0, True)], 6, higher_is_better=True)
    proposals.optuna_study = study = Study([0.1, 0.3, 1.0])
    assert proposals.propose_generation(3) == [lr(0.1), lr(0.3), lr(1.0)]
    measured = {lr(0.1): [(2, 0.4), (4, 0.6)], lr(0.3): [(2, 0.3)], lr(1.0): [(2, 0.2), (4, math.nan)]}
    for _ in range(2):  # the second time nothing is new
        proposals.report_to_study(measured, 4)
    assert study.reports == {0.1: [(2, 0.4), (4, 0.6)], 0.3: [(2, 0.3)], 1.0: [(2, 0.2)]}
    assert study.told == {0.1: (0.6, "COMPLETE"), 0.3: (None, "PRUNED"), 1.0: (None, "FAIL")}


def federation_of(folder: Path) -> TrialFederation:
    """Two trials of two seeds after two evaluations; the first one was dropped after round 2."""
    lines = ["round,seed,train_loss", "2,0,8.0", "2,1,7.0", "2,0,6.0", "2,1,5.0"]
    lines += ["4,0,4.0", "4,1,3.0", "4,0,2.0", "4,1,1.0"]
    (folder / "metrics.csv").write_text("\n".join(["# train_loss: of a test", *lines]) + "\n")
    return TrialFederation([lr(0.1), lr(0.3)], [0, 1], OmegaConf.create(), {}, folder)


def test_the_numbers_of_a_federation_are_those_of_its_trials_in_turn(tmp_path: Path) -> None:
    federation = federation_of(tmp_path)
    assert federation.values("train_loss", 2).tolist() == [[8, 7], [6, 5]]
    assert federation.values("train_loss", 4).tolist() == [[4, 3], [2, 1]]
    assert np.isnan(federation.values("train_loss", 6)).all()
    assert {
        trial: (rounds.tolist(), values.tolist()) for trial, (rounds, values) in federation.curves("train_loss").items()
    } == {
        lr(0.1): ([2, 4], [[8, 7], [4, 3]]),
        lr(0.3): ([2, 4], [[6, 5], [2, 1]]),
    }


def test_the_curve_of_a_trial_ends_where_it_was_dropped(tmp_path: Path) -> None:
    tuning = TuningState([GridKnob("lr", (0.1, 0.3))], [0, 1], "train_loss", False, [2, 4])
    tuning.federations = [federation_of(tmp_path)]
    tuning.values_by_trial = {
        lr(0.1): [np.array([8.0, 7.0])],
        lr(0.3): [np.array([6.0, 5.0]), np.array([2.0, 1.0])],
    }
    outcome = TuningOutcome(tuning, choose_trial(tuning.finalists, False))
    (dropped, chosen), key, labels = curves_of_trials(outcome)
    assert (key, labels) == ("lr", None)
    assert (dropped.rounds, dropped.values.tolist()) == ([2], [[8, 7]])
    assert (chosen.rounds, chosen.values.tolist()) == ([2, 4], [[6, 5], [2, 1]])
    assert [(c.colour_position, c.is_finalist, c.is_chosen) for c in (dropped, chosen)] == [
        (0.1, False, False),
        (0.3, True, True),
    ]


class Ending:
    """A federation whose run ends at once, with an error or without."""

    config, completed_rounds, failure_message = OmegaConf.create({"deterministic": False}), 0, None

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, []

    def replicates_of(self, trials: list) -> list[int]:
        return list(range(len(trials)))

    def run_as_generator(self, *arguments: Any) -> Any:
        self.asked.append(arguments[:2])
        if self.error is not None:
            raise self.error
        return "a result"
        yield


def test_divergence_ends_a_federation_and_any_other_error_ends_tuning() -> None:
    finished, diverged = Ending(), Ending(DivergenceError("round 3 diverged"))
    run_to_rung([finished, diverged], 4, [lr(0.1)], False)
    assert (finished.failure_message, diverged.failure_message) == (None, "round 3 diverged")
    run_to_rung([finished, diverged], 8, [], True)  # what has failed is left alone
    assert finished.asked == [(4, [0]), (None, [])]
    assert diverged.asked == [(4, [0])]
    with pytest.raises(ConfigError, match="lr=0 trains nothing"):
        run_to_rung([Ending(ConfigError("lr=0 trains nothing"))], 4, [], False)


def test_the_commands_mistakes_are_named_as_its_options() -> None:
    with pytest.raises(ConfigError, match=r"^--eta=0 must be a whole number of at least 1"):
        tune_cli.main(["lr=0.1,1", "--eta", "0"])
    with pytest.raises(ConfigError, match=r"^nothing is tuned; give several values to a key"):
        tune_cli.main(["lr=0.1"])
