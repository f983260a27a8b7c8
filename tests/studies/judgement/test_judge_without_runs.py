"""What a judgement makes of the numbers of runs, which are made up here, and how many rounds a budget affords."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsim.core import ConfigError
from fedsim.studies.judgement import judge as judging
from fedsim.studies.judgement import judge_cli
from fedsim.studies.judgement.environments import BenchmarkEnvironments
from fedsim.studies.judgement.judge import (
    CANDIDATE_ROUNDS,
    GRID_REFINEMENTS,
    NUM_FINALISTS,
    Contest,
    judge,
    rounds_within_budget,
)
from fedsim.studies.judgement.verdict import TOTAL_ERROR_LEVEL, confidence_of_attempt
from fedsim.studies.results.paired import PairedDifference
from fedsim.studies.tuning.space import GridKnob

DIGITS = BenchmarkEnvironments(
    "digits", ("clients=8",), (("availability=markov",),), (("availability=stationary",), ("availability=sine",)),
    ("validation_accuracy", "test_accuracy"), 0.005,
)  # fmt: skip
QUADRATICS = BenchmarkEnvironments(
    "quadratics", ("clients=6",), (("availability=sine",),), (("availability=markov",), ("availability=stationary",)),
    ("distance_to_optimum", "distance_to_optimum"), 0.05, of_ratios=True,
)  # fmt: skip
CONTEST = Contest((DIGITS, QUADRATICS), tuning_seeds=(0, 1, 2), held_out_seeds=(10, 11, 12, 13), rounds=4)
FAST, SLOW, DEFAULT = (
    (("lr", lr), ("strategy.server_lr", server_lr)) for lr, server_lr in ((0.3, 1.5), (0.01, 1.0), (0.1, 1.0))
)
KNOBS = (GridKnob("lr", (0.01, 0.1, 1.0)), GridKnob("strategy.server_lr", (1.0, 1.5)))  # the numbers depend on lr alone
REFINED = (("lr", 0.949), ("strategy.server_lr", 1.5))  # half a step of lr above FAST
TWICE_REFINED = (("lr", 1.69), ("strategy.server_lr", 1.5))  # a quarter of a step above REFINED


def number(kind: str, strategy: str, trial: Any, cell: Sequence[str], seed: int) -> float:
    """The accuracy, or the distance to the optimum, of one run; of lr beyond 0.3, more is a little better."""
    of_strategy = {"mifa": 0.9, "fedavg": 0.5, "fedau": 0.6}[strategy]
    rate = dict(trial)["lr"]
    of_trial = {FAST: 0.03, SLOW: -0.05, DEFAULT: -0.2}.get(trial, 0.03 + 0.01 * math.log(rate / 0.3))
    accuracy = of_strategy + of_trial + 0.01 * len(cell[0]) + 0.001 * seed * (3 if strategy == "mifa" else 1)
    return accuracy if kind == "digits" else 2.0**-accuracy


def kind_of(overrides: Sequence[str]) -> BenchmarkEnvironments:
    return DIGITS if "clients=8" in overrides else QUADRATICS


@pytest.fixture(autouse=True)
def no_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning chooses SLOW of the references; the best finalist is FAST, and the best trial is TWICE_REFINED."""

    def tune(overrides: Any, seeds: Any, metric: str, halving: Any, **options: Any) -> Any:
        strategy = next(text.partition("=")[2] for text in overrides if text.startswith("strategy="))
        kind = kind_of(overrides)
        assert (metric, seeds, options["cells"]) == (kind.metrics[0], CONTEST.tuning_seeds, kind.tuning_cells)
        trial = FAST if strategy == "mifa" else SLOW
        values = np.array(
            [number(kind.name, strategy, trial, cell, seed) for cell in kind.tuning_cells for seed in seeds]
        )
        return SimpleNamespace(
            choice=SimpleNamespace(trial=trial, values=values),
            tuning=SimpleNamespace(finalists=[SLOW, FAST], knobs=list(KNOBS)),
        )

    def federations_of(trials: Any, overrides: Any, seeds: Any, folder: Path) -> Any:
        assert kind_of(overrides).name in folder.parts
        assert {"rounds=4", "eval_every=4"} <= set(overrides)
        strategy = next(text.partition("=")[2] for text in overrides if text.startswith("strategy="))
        config = SimpleNamespace(rounds=4)
        kind, cell = kind_of(overrides), [overrides[-1]]
        return [SimpleNamespace(config=config, strategy=strategy, trials=trials, cell=cell, seeds=seeds, kind=kind)]

    def measured_by_trial(federations: Any, metric: str, rounds: int) -> Any:
        (of,) = federations
        assert (metric, rounds) == (of.kind.metrics[of.seeds == CONTEST.held_out_seeds], 4)
        return {
            t: np.array([number(of.kind.name, of.strategy, t, of.cell, seed) for seed in of.seeds]) for t in of.trials
        }

    monkeypatch.setattr(judging, "tune", tune)
    monkeypatch.setattr(judging, "group_into_federations", federations_of)
    monkeypatch.setattr(judging, "read_values_by_trial", measured_by_trial)
    monkeypatch.setattr(judging, "run_to_rung", lambda federations, rounds, *given: None)


def means(kind: BenchmarkEnvironments, strategy: str, trial: Any) -> np.ndarray:
    """[R] advantages over the held-out cells: accuracies, or logarithms of inverse distances."""
    cells, seeds = kind.held_out_cells, CONTEST.held_out_seeds
    values = np.array([[number(kind.name, strategy, trial, cell, seed) for cell in cells] for seed in seeds])
    return (values if kind is DIGITS else -np.log(values)).mean(1)


@pytest.mark.parametrize("kind", [DIGITS, QUADRATICS], ids=["digits", "quadratics"])
def test_the_evidence_are_differences_by_seed(kind: BenchmarkEnvironments, tmp_path: Path) -> None:
    judgement = judge("mifa", ("fedavg", "fedau"), CONTEST, tmp_path)
    own = means(kind, "mifa", FAST)
    for name in ("fedavg", "fedau"):
        evidence = judgement.evidence_by_environment[kind.name][name]
        np.testing.assert_allclose(evidence.held_out_best, own - means(kind, name, TWICE_REFINED))
        np.testing.assert_allclose(evidence.held_out_chosen, own - means(kind, name, SLOW))
        np.testing.assert_allclose(evidence.held_out_default, own - means(kind, name, DEFAULT))
        (cell,) = kind.tuning_cells
        tuned, chosen, default = (
            np.array([number(kind.name, strategy, trial, cell, seed) for seed in CONTEST.tuning_seeds])
            for strategy, trial in (("mifa", FAST), (name, SLOW), (name, DEFAULT))
        )
        if kind is QUADRATICS:
            tuned, chosen, default = -np.log(tuned), -np.log(chosen), -np.log(default)
        np.testing.assert_allclose(evidence.tuned, tuned - chosen)
        np.testing.assert_allclose(evidence.tuned_default, tuned - default)
    assert judgement.verdict == judgement.verdict_by_environment[kind.name] == "mechanism"
    assert judgement.chosen_overrides[kind.name]["mifa"] == "lr=0.3 strategy.server_lr=1.5"
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [(line["challenger"], line["verdict"], line["try"]) for line in lines] == [("mifa", "mechanism", 1)]


def test_the_second_try_has_wider_intervals_and_the_sentence_names_them(tmp_path: Path) -> None:
    first = judge("mifa", ("fedavg", "fedau"), CONTEST, tmp_path)
    second = judge("mifa", ("fedavg", "fedau"), dataclasses.replace(CONTEST, knobs=("batch_size=8,16",)), tmp_path)
    assert (first.attempt_number, second.attempt_number) == (1, 2)
    for judgement in (first, second):
        k = judgement.attempt_number
        confidence = confidence_of_attempt(k, 2)
        assert confidence == pytest.approx(1 - TOTAL_ERROR_LEVEL / (k * (k + 1)) / 2)
        for name in ("fedavg", "fedau"):
            for kind in ("digits", "quadratics"):
                best = judgement.evidence_by_environment[kind][name].held_out_best
                interval = PairedDifference(best, confidence).confidence_interval
                assert judgement.intervals[kind][name]["held_out_best"] == [best.mean(), *interval]
                low, high = interval
                if kind == "digits":
                    words = f"{name} {100 * best.mean():+.2f} [{100 * low:.2f}, {100 * high:.2f}]"
                else:
                    words = f"{name} {np.exp(-best.mean()):.3g} [{np.exp(-high):.3g}, {np.exp(-low):.3g}]"
                assert words in judgement.sentence
        assert judgement.sentence.endswith(f"({100 * confidence:.5g} % intervals, strategy {k} of the ledger).")
    for kind in ("digits", "quadratics"):
        assert (
            second.intervals[kind]["fedavg"]["held_out_best"][1] < first.intervals[kind]["fedavg"]["held_out_best"][1]
        )


def test_a_metric_that_is_no_fraction_has_no_percentage_points(tmp_path: Path) -> None:
    judgement = judge("mifa", ("fedavg",), dataclasses.replace(CONTEST, environments=(DIGITS,)), tmp_path)
    assert "percentage points (97.5 % intervals" in judgement.sentence
    losses = dataclasses.replace(DIGITS, metrics=("validation_loss", "test_loss"))
    judgement.contest = dataclasses.replace(CONTEST, environments=(losses,))
    mean, low, high = judgement.intervals["digits"]["fedavg"]["held_out_best"]
    assert f"fedavg {mean:+.2f} [{low:.2f}, {high:.2f}] (97.5 % intervals" in judging.judgement_sentence(judgement)


def test_a_budget_affords_the_rounds_that_short_runs_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs take 5 s and 0.2 s for each round of each of 60 replicates."""
    clock = [100.0]

    def final_values(trials: Any, overrides: Any, cells: Any, seeds: Any, metric: str, folder: Path) -> None:
        assert (len(trials), len(cells), metric) == (1, 1, kind_of(overrides).metrics[0])
        clock[0] += 5 + 0.2 * len(seeds) * next(int(t[7:]) for t in overrides if t.startswith("rounds="))

    monkeypatch.setattr(judging, "final_values", final_values)
    monkeypatch.setattr(judging, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    tuned = 15 * 1 * 3 * 0.5  # 15 trials, one cell, three seeds, of which halving leaves half the rounds
    refined = len(GRID_REFINEMENTS) * 2 * 2  # two neighbours for each of two rates, at each refinement
    compared = (NUM_FINALISTS + 1 + refined) * 2 * 4  # of each reference, on two cells with four seeds
    replicates = 2 * (3 * tuned + 2 * compared + 2 * 4)  # two kinds of environments
    for rounds in CANDIDATE_ROUNDS:
        seconds = 2 * 4 * 3 * 3 + rounds * replicates * 0.2
        assert rounds_within_budget(seconds * 1.0001, "mifa", ("fedavg", "fedau"), CONTEST) == rounds
        fewer = max((other for other in CANDIDATE_ROUNDS if other < rounds), default=rounds)
        assert rounds_within_budget(seconds * 0.9999, "mifa", ("fedavg", "fedau"), CONTEST) == fewer


@pytest.mark.parametrize(
    ("word", "message"),
    [("rounds", "rounds is not an override KEY=VALUE"), ("rounds=3", "--environments='nowhere' is unknown")],
)
def test_a_word_without_a_value_is_refused_before_anything_else(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        judge_cli.main(["mifa", word, "--environments", "nowhere"])


def test_rounds_that_take_the_budget_to_the_second_are_affordable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_startup_and_round_seconds", lambda *arguments: (2.0, 0.5))  # of two environments
    for rounds in CANDIDATE_ROUNDS:
        assert rounds_within_budget(4.0 + rounds, "mifa", ("fedavg",), CONTEST) == rounds
