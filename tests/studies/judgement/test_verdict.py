"""Verdicts on made-up differences, the count of tries, and contests that are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fedsim.core.errors import ConfigError
from fedsim.studies.judgement.judge import Contest, contender
from fedsim.studies.judgement.judge_cli import seconds_of
from fedsim.studies.judgement.tries import record, tries
from fedsim.studies.judgement.verdict import Evidence, confidence_of, lower_bound, verdict
from fedsim.studies.results.paired import student_quantile

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
    assert verdict([advantage(*names)], 0.005) == expected


def test_an_advantage_must_be_shown_over_each_reference() -> None:
    assert verdict([advantage(*NAMES), advantage(*NAMES)], 0.005) == "mechanism"
    assert verdict([advantage(*NAMES), advantage("held_out_default")], 0.005) == "tuning"
    assert verdict([advantage(*NAMES), NOTHING], 0.005) == "not shown"


def test_margin_and_tries_widen_what_is_needed() -> None:
    error = NOISE.std(ddof=1) / np.sqrt(10)
    assert lower_bound(NOISE + 0.05, 0.95) == pytest.approx(0.05 - student_quantile(0.975, 9) * error)
    at_limit = NOISE + 0.005 + 1.01 * student_quantile(0.975, 9) * error  # shown in the first try, by 1 %
    evidence = dataclasses.replace(NOTHING, held_out_best=at_limit)
    assert verdict([evidence], 0.005) == "mechanism"
    assert verdict([evidence], 0.006) == "not shown"
    assert verdict([evidence], 0.005, number=2) == "not shown"
    assert confidence_of(50) == pytest.approx(0.999)
    assert verdict([dataclasses.replace(NOTHING, held_out_best=np.full(10, np.nan))], 0.0) == "not shown"
    equal = dataclasses.replace(NOTHING, **dict.fromkeys(NAMES, np.zeros(10)))
    assert verdict([equal], 0.0) == "not shown"  # the same numbers, without spread


def test_the_ledger_counts_each_strategy_once(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "ledger.jsonl"
    assert tries(path, "a") == 1
    record(path, {"key": "a"})
    assert (tries(path, "a"), tries(path, "b")) == (1, 2)
    record(path, {"key": "b"})
    record(path, {"key": "a"})
    assert [tries(path, key) for key in ("a", "b", "c")] == [1, 2, 3]
    path.write_text("[1]\n")
    with pytest.raises(ConfigError, match="is no ledger of judgements"):
        tries(path, "a")


def test_contests_and_strategies_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="tuning and held-out seeds must differ"):
        Contest(held_out_seeds=(2, 3))
    with pytest.raises(ConfigError, match="is a cell of tuning and a held-out one"):
        Contest(held_out_cells=(("availability=sine",),))
    with pytest.raises(ConfigError, match="3 knobs beside the rates; give at most 2"):
        Contest(knobs=("a=1,2", "b=1,2", "c=1,2"))
    with pytest.raises(ConfigError, match="strategy='fedavgg' is unknown"):
        contender("fedavgg")
    with pytest.raises(ConfigError, match="cannot be imported"):
        contender("nowhere.Strategy")
    with pytest.raises(ConfigError, match="must be a time such as"):
        seconds_of("soon")
    assert [seconds_of(text) for text in ("90s", "5m", "1.5h")] == [90, 300, 5400]


def test_references_and_challenger_have_equally_many_trials() -> None:
    def trials(knobs: tuple[str, ...]) -> int:
        from fedsim.studies.tuning.space import Grid, parse, product

        return len(product([knob for knob in parse(knobs)[1] if isinstance(knob, Grid)]))

    with_rate, without = contender("fedavg"), contender("fedsim.strategies.LocalOnly")
    assert trials(with_rate.knobs) == trials(without.knobs) == 15
    own = contender("fedsim.strategies.FedAvgM", ("strategy.momentum=0.5,0.9,0.95",))
    assert "++strategy.momentum=0.5" in own.overrides
    assert trials(own.knobs) == trials(contender("fedavg", ("local.clip=null,1.0,3.0",)).knobs) == 45
