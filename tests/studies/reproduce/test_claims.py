"""Claims are comparisons that numbers pass or fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsim.core import ConfigError
from fedsim.studies.reproduce.claims import Claim
from fedsim.studies.reproduce.number import Number


def numbers(table: dict[tuple[str, str], list[float]], paper: float | None = None) -> list[Number]:
    return [Number({"algorithm": a, "place": p}, np.array(v), paper) for (a, p), v in table.items()]


TABLE = {("A", "x"): [2.0, 4.0], ("A", "y"): [5.0, 5.0], ("B", "x"): [2.0], ("B", "y"): [6.0], ("C", "x"): [0.0]}


def claim(**content: Any) -> Claim:
    return Claim.read({"claim": "…", "of": {"algorithm": "A"}, "than": {"algorithm": "B"}, "is": "above"} | content)


@pytest.mark.parametrize(
    ("content", "held"),
    [
        ({}, False),  # 3 > 2 at x, but 5 < 6 at y: every place counts
        ({"where": {"place": "x"}}, True),
        ({"where": {"place": ["x", "y"]}}, False),
        ({"plus": -1.5}, True),  # 5 > 6 − 1.5
        ({"is": "below", "times": 2}, True),  # 3 < 4 and 5 < 12
        ({"is": "below", "times": 1.5}, False),  # 3 is not below 3
        ({"than": {"algorithm": ["B", "C"]}, "where": {"place": "x"}}, True),
        ({"of": {"algorithm": "C"}, "is": "below"}, True),
        ({"than": 2.5}, True),
        ({"than": 3.5}, False),
        ({"is": "near", "than": 4, "within": 1}, True),
        ({"is": "near", "than": 4, "within": 0.9}, False),
        ({"is": "near", "than": 4, "where": {"place": "x"}, "errors": 1.0}, True),  # standard error of [2, 4] is 1
        ({"is": "near", "than": 4, "where": {"place": "x"}, "errors": 0.9}, False),
        ({"of": {"place": "y"}, "than": {"place": "x"}}, True),  # A: 5 > 3, B: 6 > 2; C has no y
        ({"of": {"place": "y", "algorithm": "A"}, "than": {"place": "x", "algorithm": "B"}}, True),
    ],
)
def test_a_claim_holds_only_if_every_comparison_does(content: dict[str, Any], held: bool) -> None:
    assert claim(**content).judge(numbers(TABLE)).holds is held


def test_the_papers_number_can_be_the_right_side() -> None:
    assert claim(**{"is": "near", "than": "paper", "within": 1}).judge(numbers(TABLE, paper=4.0)).holds is True
    assert claim(**{"is": "near", "than": "paper", "within": 0.5}).judge(numbers(TABLE, paper=4.0)).holds is False
    assert claim(**{"is": "near", "than": "paper", "within": 1}).judge(numbers(TABLE)).holds is None


def test_another_measure_of_the_same_runs_can_be_the_right_side() -> None:
    twice = numbers({place: [2 * v for v in values] for place, values in TABLE.items()})
    half = claim(**{"is": "below", "than_measure": "largest", "times": 0.6, "than": {}})
    assert half.judge(numbers(TABLE), twice).holds is True  # v < 0.6 · 2v
    assert claim(**{"is": "below", "than_measure": "largest", "times": 0.5}).judge(numbers(TABLE), twice).holds is False


def test_what_failed_is_told_and_nan_decides_nothing() -> None:
    verdict = claim().judge(numbers(TABLE))
    assert verdict.detail == "1 of 2; ✗ A / y: 5 > 6 (B)"
    for relation in ("above", "below", "near"):
        lost = numbers({("A", "x"): [np.nan], ("B", "x"): [1.0]})
        lost_for_a_reason = claim(**{"is": relation, "within": 10.0, "reason": "…"}).judge(lost)
        assert (lost_for_a_reason.holds, lost_for_a_reason.word) == (None, "open")


def test_nothing_to_compare_is_neither_held_nor_not() -> None:
    assert claim().judge(numbers({("A", "x"): [1.0], ("B", "y"): [2.0]})).holds is None
    assert claim().judge([]).holds is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"is": "beside"}, "beside"),
        ({"of": {"algoritm": "A"}}, "did you mean 'algorithm'"),
        ({"than": "rival"}, "rival"),
        ({"measure": "speed"}, "speed"),
        ({"errors": -1}, "errors=-1 must not be negative"),
        ({"errors": 1, "surely": 1}, "choose one"),
        ({"paired": True}, "paired: true needs a number of standard errors"),
        ({"paired": True, "errors": 1, "than": "paper"}, "paired: true needs runs on both sides, not than=paper"),
        ({"fitted": True}, "the recipe names no fitted labels"),
        ({"reason": "it is not so"}, "reason needs shown_by"),
        ({"shown_by": "paper/recipe"}, "shown_by needs reason"),
        ({"reason": "it is not so", "shown_by": "a test"}, "shown_by='a test' must be tests/FILE.py::TEST"),
    ],
)
def test_a_claim_about_nothing_is_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        claim(**content).check("paper/recipe", ["algorithm", "place"], ["accuracy"])
