"""Verdicts on made-up differences, the count of tries, and contests that are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fedsim.core.errors import ConfigError
from fedsim.studies.judgement.contender import make_contender
from fedsim.studies.judgement.environments import DIGITS_ENVIRONMENTS, ENVIRONMENTS_BY_NAME
from fedsim.studies.judgement.judge import Contest, best_trial, trials_around
from fedsim.studies.judgement.judge_cli import budget_seconds
from fedsim.studies.judgement.tries import attempt_number, record_attempt
from fedsim.studies.judgement.verdict import (
    Evidence,
    confidence_of_attempt,
    judge_evidence,
    lower_bound,
    strongest_verdict,
)
from fedsim.studies.results.paired import student_quantile
from fedsim.studies.tuning.space import GridKnob, IntervalKnob

NOISE = np.linspace(-0.01, 0.01, 10)  # mean 0
NOTHING = Evidence(*[NOISE] * 5)
NAMES = [field.name for field in dataclasses.fields(Evidence)]


def advantage(*names: str) -> Evidence:
    """Differences of 0.05, of these kinds alone."""
    return dataclasses.replace(NOTHING, **dict.fromkeys(names, NOISE + 0.05))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (NAMES, "mechanism"),
        (["held_out_best"], "mechanism"),
        (["held_out_chosen", "held_out_default", "tuned", "tuned_default"], "tuning"),
        (["held_out_default"], "tuning"),
        (["tuned"], "seed"),
        (["tuned_default"], "seed"),
        ([], "not shown"),
    ],
)
def test_a_verdict_follows_from_the_strongest_advantage_that_is_shown(names: list[str], expected: str) -> None:
    assert judge_evidence([advantage(*names)], 0.005, 0.95) == expected


def test_an_advantage_must_be_shown_over_each_reference() -> None:
    assert judge_evidence([advantage(*NAMES), advantage(*NAMES)], 0.005, 0.95) == "mechanism"
    assert judge_evidence([advantage(*NAMES), advantage("held_out_default")], 0.005, 0.95) == "tuning"
    assert judge_evidence([advantage(*NAMES), NOTHING], 0.005, 0.95) == "not shown"


def test_margin_and_tries_widen_what_is_needed() -> None:
    error = NOISE.std(ddof=1) / np.sqrt(10)
    assert lower_bound(NOISE + 0.05, 0.95) == pytest.approx(0.05 - student_quantile(0.975, 9) * error)
    at_limit = NOISE + 0.005 + 1.01 * student_quantile(0.975, 9) * error  # shown in the first try, by 1 %
    evidence = dataclasses.replace(NOTHING, held_out_best=at_limit)
    assert judge_evidence([evidence], 0.005, 0.95) == "mechanism"
    assert judge_evidence([evidence], 0.006, 0.95) == "not shown"
    assert judge_evidence([evidence], 0.005, confidence_of_attempt(1)) == "not shown"  # 1 − 0.05 / 2
    unknown = dataclasses.replace(NOTHING, held_out_best=np.full(10, np.nan))
    assert judge_evidence([unknown], 0.0, 0.95) == "not shown"
    equal = dataclasses.replace(NOTHING, **dict.fromkeys(NAMES, np.zeros(10)))
    assert judge_evidence([equal], 0.0, 0.95) == "not shown"  # the same numbers, without spread


def test_errors_of_all_tries_and_kinds_add_up_to_one_in_twenty() -> None:
    errors = [kinds * (1 - confidence_of_attempt(number, kinds)) for number in range(1, 10_000) for kinds in (2,)]
    assert sum(errors) == pytest.approx(0.05, rel=1e-3)
    assert sum(errors) < 0.05
    assert confidence_of_attempt(1) == pytest.approx(0.975)
    assert confidence_of_attempt(3, num_kinds=2) == pytest.approx(1 - 0.05 / 24)
    with pytest.raises(ConfigError, match="try 0 must be at least 1"):
        confidence_of_attempt(0)


def test_the_strongest_verdict_of_the_kinds_is_the_verdict() -> None:
    assert strongest_verdict(["not shown", "mechanism", "tuning"]) == "mechanism"
    assert strongest_verdict(["seed", "not shown"]) == "seed"
    assert strongest_verdict(["seed", "tuning"]) == "tuning"


def test_neighbours_are_a_fraction_of_a_step_away() -> None:
    knobs = [GridKnob("lr", (0.1, 1.0, 10.0)), GridKnob("local.clip", (None, 1.0)), IntervalKnob("a", 0.0, 1.0, False)]
    trial = (("lr", 1.0), ("local.clip", None), ("a", 0.5))
    assert trials_around(trial, knobs, 2) == [(("lr", value), *trial[1:]) for value in (3.16, 0.316)]
    assert [dict(near)["lr"] for near in trials_around(trial, knobs, 4)] == [1.78, 0.562]


def test_the_best_trial_is_of_finite_values() -> None:
    values = {(("lr", 1.0),): np.array([1.0, np.nan]), (("lr", 2.0),): np.array([0.5, 0.5]), (): np.zeros(2)}
    assert best_trial(values, 1.0) == (("lr", 2.0),)
    assert best_trial(values, -1.0) == ()
    with pytest.raises(ConfigError, match="diverges on a held-out seed"):
        best_trial({(): np.array([np.inf])}, 1.0)


def test_differences_of_distances_are_those_of_logarithms() -> None:
    near, far = (
        ENVIRONMENTS_BY_NAME["quadratics"].comparison_scale_values(np.array([0.1, 0.0])),
        ENVIRONMENTS_BY_NAME["quadratics"].comparison_scale_values(np.array([0.2, 0.0])),
    )
    np.testing.assert_allclose(far - near, [np.log(2), 0.0])
    assert ENVIRONMENTS_BY_NAME["digits"].comparison_scale_values(near) is near


def test_the_ledger_counts_each_strategy_once(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "ledger.jsonl"
    assert attempt_number(path, "a") == 1
    record_attempt(path, {"key": "a"})
    assert (attempt_number(path, "a"), attempt_number(path, "b")) == (1, 2)
    record_attempt(path, {"key": "b"})
    record_attempt(path, {"key": "a"})
    assert [attempt_number(path, key) for key in ("a", "b", "c")] == [1, 2, 3]
    path.write_text("[1]\n")
    with pytest.raises(ConfigError, match="is not a ledger of judgements"):
        attempt_number(path, "a")


def test_contests_and_strategies_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="tuning and held-out seeds must differ"):
        Contest(held_out_seeds=(2, 3))
    with pytest.raises(ConfigError, match="is a cell of tuning and a held-out one"):
        dataclasses.replace(DIGITS_ENVIRONMENTS, held_out_cells=(("availability=sine",),))
    with pytest.raises(ConfigError, match="a judgement needs environments"):
        Contest(())
    with pytest.raises(ConfigError, match="3 knobs beside the rates; give at most 2"):
        Contest(knobs=("a=1,2", "b=1,2", "c=1,2"))
    with pytest.raises(ConfigError, match="strategy='fedavgg' is unknown"):
        make_contender("fedavgg", DIGITS_ENVIRONMENTS)
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_contender("nowhere.Strategy", DIGITS_ENVIRONMENTS)
    with pytest.raises(ConfigError, match="must be a time such as"):
        budget_seconds("soon")
    assert [budget_seconds(text) for text in ("90s", "5m", "1.5h")] == [90, 300, 5400]


def test_references_and_challenger_have_equally_many_trials() -> None:
    def trials(knobs: tuple[str, ...]) -> int:
        from fedsim.studies.tuning.space import GridKnob, grid_trials, parse_knobs

        return len(grid_trials([knob for knob in parse_knobs(knobs)[1] if isinstance(knob, GridKnob)]))

    for kind in ENVIRONMENTS_BY_NAME.values():
        with_rate, without = make_contender("fedavg", kind), make_contender("fedsim.strategies.LocalOnly", kind)
        assert trials(with_rate.knob_overrides) == trials(without.knob_overrides) == 15
    challenger = make_contender("fedsim.strategies.FedAvgM", DIGITS_ENVIRONMENTS, ("strategy.momentum=0.5,0.9,0.95",))
    assert "++strategy.momentum=0.5" in challenger.overrides
    assert (
        trials(challenger.knob_overrides)
        == trials(make_contender("fedavg", DIGITS_ENVIRONMENTS, ("local.clip=null,1.0,3.0",)).knob_overrides)
        == 45
    )
