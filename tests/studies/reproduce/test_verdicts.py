"""Held, refuted or open; thresholds that are standard errors, against NumPy; and who sees fitted constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsim.studies.reproduce import report
from fedsim.studies.reproduce.claims import Claim
from fedsim.studies.reproduce.number import Number, Undecided, standard_error

A, B = np.array([3.0, 4.0, 8.0]), np.array([1.0, 2.0, 9.0, 2.0, 1.0])


def number(values: Any, seeds: tuple[int, ...] | None = None, paper: float | None = None, **at: str) -> Number:
    return Number(at or {"algorithm": "A"}, np.array(values, dtype=float), paper, seeds=seeds)


def two(a: Any, b: Any, seeds: tuple[int, ...] | None = None) -> list[Number]:
    return [number(a, seeds, algorithm="A"), number(b, seeds, algorithm="B")]


def claim(**content: Any) -> Claim:
    return Claim.read({"claim": "…", "of": {"algorithm": "A"}, "than": {"algorithm": "B"}, "is": "above"} | content)


def test_independent_means_of_unequal_many_seeds() -> None:
    naive = np.sqrt(np.sum((A - A.mean()) ** 2) / 2 / 3 + np.sum((B - B.mean()) ** 2) / 4 / 5)
    assert standard_error(number(A), number(B)) == pytest.approx(naive, rel=1e-12)
    assert standard_error(number(A), None) == pytest.approx(np.std(A, ddof=1) / np.sqrt(3), rel=1e-12)


def test_paired_means_follow_the_differences_by_seed() -> None:
    shifted = A - np.array([1.0, 1.1, 0.9])
    d = A - shifted
    naive = np.sqrt(np.mean((d - d.mean()) ** 2) / (len(d) - 1))
    assert standard_error(number(A), number(shifted), paired=True) == pytest.approx(naive, rel=1e-12)
    assert standard_error(number(A), number(shifted)) > 20 * naive


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("times", "plus"), [(1.0, 0.0), (2.5, 0.0), (0.5, 3.0), (-1.0, 10.0)])
def test_the_right_sides_error_is_that_of_times_its_values(times: float, plus: float, paired: bool) -> None:
    """Every relation turns at the naive number of standard errors, and no other."""
    left, right = A, np.array([1.0, 5.0, 2.0])
    bound = times * right.mean() + plus
    if paired:
        error = np.std(left - times * right, ddof=1) / np.sqrt(3)
    else:
        error = np.sqrt(np.var(left, ddof=1) / 3 + times**2 * np.var(right, ddof=1) / 3)
    between = abs(left.mean() - bound) / error
    assert between > 1e-3
    numbers = two(left, right, seeds=(0, 1, 2))
    above = left.mean() > bound
    for relation, holds in (("above", above), ("below", not above)):
        for key in ("surely", "errors"):
            for factor in (0.99, 1.01):
                judged = claim(
                    **{"is": relation, "times": times, "plus": plus, "paired": paired, key: between * factor}
                )
                expected = factor < 1 and holds if key == "surely" else holds or factor > 1
                assert judged.judge(numbers).holds is bool(expected)
    for factor in (0.99, 1.01):
        near = {"is": "near", "times": times, "plus": plus, "paired": paired}
        assert claim(**near, errors=between * factor).judge(numbers).holds is (factor > 1)
        room = abs(left.mean() - bound) + error
        assert claim(**near, within=room * factor, surely=1).judge(numbers).holds is (factor > 1)


def test_within_and_errors_add_up() -> None:
    numbers = two([0.0, 2.0], [4.0, 4.0])  # difference 3, standard error 1
    assert claim(**{"is": "near", "within": 1, "errors": 2.01}).judge(numbers).holds is True
    assert claim(**{"is": "near", "within": 1, "errors": 1.99}).judge(numbers).holds is False


def test_a_printed_number_has_no_error() -> None:
    mine = [number([0.0, 2.0], paper=3.0, algorithm="A")]  # 2 standard errors below the print
    near = {"is": "near", "than": "paper"}
    assert claim(**near, errors=2.01).judge(mine).holds is True
    assert claim(**near, errors=1.99).judge(mine).holds is False
    assert claim(**{"is": "below", "than": 3.0, "surely": 1.99}).judge(mine).holds is True
    assert claim(**{"is": "below", "than": 3.0, "surely": 2.01}).judge(mine).holds is False


def test_another_measure_is_paired_by_seed_with_its_own_run() -> None:
    ends, tops = [number(A, (0, 1, 2), algorithm="A")], [number(A + 1, (0, 1, 2), algorithm="A")]
    below = {"is": "below", "than": {}, "than_measure": "largest"}
    assert claim(**below, surely=5).judge(ends, tops).holds is False
    assert claim(**below, surely=5, paired=True).judge(ends, tops).holds is True


@pytest.mark.parametrize("statistic", [{"errors": 1}, {"surely": 1}])
@pytest.mark.parametrize(("a", "b"), [([1.0], [2.0, 3.0]), ([2.0, 3.0], [1.0]), ([1.0], [1.0])])
def test_one_seed_has_no_standard_error(statistic: dict[str, int], a: list[float], b: list[float]) -> None:
    verdict = claim(**statistic, reason="why", shown_by="p/r").judge(two(a, b))
    assert (verdict.holds, verdict.word) == (None, "open")
    assert verdict.detail == f"a standard error needs two seeds or more, and {'A' if len(a) == 1 else 'B'} has one"
    assert claim(**{"is": "below"}).judge(two([1.0], [2.0])).holds is True  # which a plain comparison does not ask for


@pytest.mark.parametrize(
    ("left", "right"),
    [((0, 1, 2), (0, 1, 3)), ((0, 1, 2), (2, 1, 0)), ((0, 1, 2), None), ((0, 1, 2), (0, 1))],
)
def test_other_seeds_are_no_pairs(left: tuple[int, ...], right: tuple[int, ...] | None) -> None:
    one, other = number([1.0, 2.0, 3.0], left), number([1.0, 2.0, 3.0][: len(right or left)], right)
    with pytest.raises(Undecided, match="the same seeds on both sides"):
        standard_error(one, other, paired=True)


REASON = {"reason": "it cannot be", "shown_by": "tests/papers/test_p.py::test_it"}


@pytest.mark.parametrize(
    ("content", "held", "word"),
    [
        ({"is": "above"}, True, "held"),
        ({"is": "above", **REASON}, True, "held"),
        ({"is": "below"}, False, "open"),
        ({"is": "below", **REASON}, False, "refuted"),
        ({"of": {"algorithm": "C"}}, None, "open"),
        ({"of": {"algorithm": "C"}, **REASON}, None, "open"),
    ],
)
def test_a_verdict_is_the_comparison_and_its_reason(content: dict[str, Any], held: bool | None, word: str) -> None:
    verdict = claim(**content).judge(two([2.0], [1.0]))
    assert (verdict.holds, verdict.word) == (held, word)


def fitted_and_literal() -> list[Number]:
    """Of A and B the literal readings 1 and 2, and fitted ones 5 and 4; all print 5."""
    table = {("A", "literal"): 1.0, ("B", "literal"): 2.0, ("A", "fitted"): 5.0, ("B", "fitted"): 4.0}
    return [
        Number({"algorithm": a, "reading": r}, np.array([v]), 5.0, fitted=r == "fitted") for (a, r), v in table.items()
    ]


@pytest.mark.parametrize(
    ("content", "compared"),
    [
        ({}, ["A / literal"]),  # with B's literal reading
        ({"of": {"reading": "fitted"}, "than": {"reading": "literal"}}, []),
        ({"of": {"reading": "literal"}, "than": {"reading": "fitted"}}, []),
        ({"than": "paper"}, ["A / literal"]),
        ({"than": 3}, ["A / literal"]),
        ({"fitted": True}, ["A / fitted"]),
        ({"fitted": True, "than": "paper"}, ["A / fitted"]),
        ({"fitted": True, "of": {"reading": "fitted"}, "than": {"reading": "literal"}}, ["A / fitted", "B / fitted"]),
        ({"fitted": True, "of": {"reading": "literal"}, "than": {"reading": "fitted"}}, ["A / literal", "B / literal"]),
    ],
)
def test_fitted_constants_are_seen_by_claims_about_them_alone(content: dict[str, Any], compared: list[str]) -> None:
    verdict = claim(**{"is": "near", "within": 100, **content}).judge(fitted_and_literal())
    assert (verdict.holds, verdict.detail.count("≈")) == ((True, len(compared)) if compared else (None, 0))
    assert all(f"{name}: " in verdict.detail for name in compared)
    other = claim(
        **{"is": "near", "than": {}, "than_measure": "end", "within": 100, "fitted": bool(content.get("fitted"))}
    )
    assert other.judge(fitted_and_literal(), fitted_and_literal()).detail.count("≈") == 1


def test_the_table_for_a_terminal_says_verdict_reason_and_what_is_fitted() -> None:
    rows = [
        report.Row("A", 5.0, 4.0, 0.1),
        report.Row("A, fitted", 5.0, 5.0, 0.1, fitted=True),
        *(
            report._row(claim(claim=f"claim {n}", **content).judge(two([2.0], [1.0])))
            for n, content in enumerate(({}, {"is": "below", **REASON}, {"is": "below"}, REASON))
        ),
    ]
    lines = report.table(rows).splitlines()
    assert lines[2].endswith("fitted")
    assert not lines[1].endswith("fitted")
    assert [line.split()[0] for line in lines if "claim" in line] == ["held", "refuted", "OPEN", "held"]
    assert lines.count("          reason: it cannot be (shown by tests/papers/test_p.py::test_it)") == 1
    assert lines[-1].strip().startswith("its reason did not show in these runs: it cannot be")
    assert report.count(rows) == {"held": 2, "refuted": 1, "open": 1}
    assert report.summary({"p/a": rows, "p/b": rows[:3], "p/c": []}).splitlines() == [
        "p/a           2 held,   1 refuted,   1 open",
        "p/b           1 held,   0 refuted,   0 open",
        "p/c           0 held,   0 refuted,   0 open",
        "all claims    3 held,   1 refuted,   1 open",
        "OPEN  p/a: claim 2",
    ]
