"""Verdicts of comparisons rest on 95 % intervals over seeds, checked against SciPy; who sees fitted constants."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedsim.studies.reproduce import report, stored
from fedsim.studies.reproduce.comparison import Comparison
from fedsim.studies.reproduce.intervals import NoIntervalError, mean_difference
from fedsim.studies.reproduce.ledger import load_statement_ledger
from fedsim.studies.reproduce.measures import make_measure
from fedsim.studies.reproduce.number import MeasuredNumber
from fedsim.studies.reproduce.recipe import load_recipe, recipe_folder
from fedsim.studies.reproduce.statements import statements_text

A, B = np.array([3.0, 4.0, 8.0]), np.array([1.0, 2.0, 9.0, 2.0, 1.0])
SEEDS = (0, 1, 2)
REASON = {"reason": "it cannot be", "shown_by": "tests/papers/test_p.py::test_it"}


def number(values: Any, seeds: tuple[int, ...] | None = None, paper: float | None = None, **at: str) -> MeasuredNumber:
    return MeasuredNumber(at or {"algorithm": "A"}, np.array(values, dtype=float), paper, seeds=seeds)


def two(a: Any, b: Any, seeds: tuple[int, ...] | None = None) -> list[MeasuredNumber]:
    return [number(a, seeds, algorithm="A"), number(b, seeds, algorithm="B")]


def comparison(**content: Any) -> Comparison:
    given_content = {"we_test": "…", "ours": True, "of": {"algorithm": "A"}, "than": {"algorithm": "B"}, "is": "above"}
    return Comparison.read(given_content | content)


def test_independent_samples_have_welchs_interval() -> None:
    between = mean_difference(number(A), number(B))
    expected = stats.ttest_ind(A, B, equal_var=False).confidence_interval(0.95)
    assert (
        between.value - between.interval_half_width(),
        between.value + between.interval_half_width(),
    ) == pytest.approx(tuple(expected))
    assert not between.is_paired


def test_sides_of_the_same_seeds_have_the_interval_of_their_differences() -> None:
    shifted = A - np.array([1.0, 1.1, 0.9])
    between = mean_difference(number(A, SEEDS), number(shifted, SEEDS))
    expected = stats.ttest_rel(A, shifted).confidence_interval(0.95)
    assert (
        between.value - between.interval_half_width(),
        between.value + between.interval_half_width(),
    ) == pytest.approx(tuple(expected))
    assert between.is_paired
    assert (
        mean_difference(number(A, SEEDS), number(shifted, (2, 1, 0))).interval_half_width()
        > 20 * between.interval_half_width()
    )


def test_a_constant_has_no_error() -> None:
    between = mean_difference(number(A), 1.0)
    expected = stats.ttest_1samp(A, 1.0).confidence_interval(0.95)
    assert (
        between.value - between.interval_half_width(),
        between.value + between.interval_half_width(),
    ) == pytest.approx((expected.low - 1, expected.high - 1))


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("times", "plus"), [(1.0, 0.0), (2.5, 0.0), (0.5, 3.0), (-1.0, 10.0)])
def test_a_directional_verdict_turns_where_the_interval_leaves_zero(times: float, plus: float, paired: bool) -> None:
    """Moved by just more than the half-width from the bound it is held or contradicted, by just less not shown."""
    right = np.array([1.0, 5.0, 2.0])
    seeds = SEEDS if paired else None
    bound = times * right + plus
    reach = mean_difference(number(A, seeds), number(bound, seeds)).interval_half_width()
    for factor, word in ((1.01, "held"), (0.99, "not shown"), (-0.99, "not shown"), (-1.01, "contradicted")):
        left = A - A.mean() + bound.mean() + factor * reach
        numbers = two(left, right, seeds)
        assert comparison(times=times, plus=plus).judge(numbers).verdict == word
        opposite = {"held": "contradicted", "contradicted": "held"}.get(word, word)
        assert comparison(**{"is": "below"}, times=times, plus=plus).judge(numbers).verdict == opposite


def test_level_needs_zero_inside_and_what_matters_outside() -> None:
    numbers = two(A, A + 0.1, SEEDS)  # every seed differs by 0.1: an interval of no width
    assert comparison(matters=1).judge(numbers).verdict == "contradicted"
    left = A + np.array([0.1, -0.1, 0.0])
    reach = mean_difference(number(left, SEEDS), number(A, SEEDS)).interval_half_width()
    assert comparison(matters=1.01 * reach).judge(two(left, A, SEEDS)).verdict == "level"
    assert comparison(matters=0.99 * reach).judge(two(left, A, SEEDS)).verdict == "not shown"
    assert comparison().judge(two(left, A, SEEDS)).verdict == "not shown"


def test_near_is_an_equivalence_of_means() -> None:
    numbers = two([0.0, 2.0, 1.0], [4.0, 4.0, 4.0])
    reach = mean_difference(*numbers).interval_half_width()
    near = {"is": "near"}
    assert comparison(**near, within=1.01 * (3 + reach)).judge(numbers).verdict == "held"
    assert comparison(**near, within=0.99 * (3 + reach)).judge(numbers).verdict == "not shown"
    assert comparison(**near, within=1.01 * (3 - reach)).judge(numbers).verdict == "not shown"
    assert comparison(**near, within=0.99 * (3 - reach)).judge(numbers).verdict == "contradicted"


def test_surely_widens_the_interval_against_and_errors_the_one_for_a_contradiction() -> None:
    numbers = two(A + 30, A + np.array([0.0, 1.0, 2.0]), SEEDS)
    apart = mean_difference(*numbers)
    many = apart.value / apart.standard_error
    assert comparison(surely=0.99 * many).judge(numbers).verdict == "held"
    assert comparison(surely=1.01 * many).judge(numbers).verdict == "not shown"
    below = {"is": "below"}
    assert comparison(**below, errors=0.99 * many).judge(numbers).verdict == "contradicted"
    assert comparison(**below, errors=1.01 * many).judge(numbers).verdict == "not shown"
    assert comparison(errors=100).judge(two(A, A + 1, None)).verdict == "not shown"  # slack alone never holds


@pytest.mark.parametrize(("a", "b"), [([1.0], [2.0, 3.0]), ([2.0, 3.0], [1.0]), ([1.0], [1.0])])
def test_one_seed_has_no_interval_unless_it_is_exact(a: list[float], b: list[float]) -> None:
    judgement = comparison(**REASON).judge(two(a, b))
    name = "A" if len(a) == 1 else "B"
    assert judgement.verdict == "not shown"
    assert judgement.evidence_text == f"1 of 1 not shown; {name} is one value, which has no interval"
    assert comparison(**{"is": "below"}, exact=True).judge(two([1.0], [2.0])).verdict == "held"
    assert comparison(exact=True).judge(two([1.0], [2.0])).verdict == "contradicted"


def test_exact_numbers_whose_seeds_differ_are_not_exact() -> None:
    judgement = comparison(exact=True).judge(two([5.0, 6.0], [1.0, 1.0]))
    assert (judgement.verdict, "A is called exact" in judgement.evidence_text) == ("not shown", True)
    assert comparison(exact=True).judge(two([5.0, 5.0 + 1e-9], [1.0, 1.0])).verdict == "held"


def test_pairing_is_demanded_of_known_seeds() -> None:
    mixed = [number(A, (0, 1, 2), algorithm="A"), number(A - 1, (0, 1, 3), algorithm="B")]
    judgement = comparison(paired=True).judge(mixed)
    assert judgement.evidence_text == "1 of 1 not shown; A and B do not share their seeds"
    assert comparison(paired=True).judge(two(A, A - 100)).verdict == "held"


def test_infinitely_many_rounds_are_compared_where_they_are_exact() -> None:
    assert comparison(exact=True).judge(two([np.inf], [3.0])).verdict == "held"
    assert comparison(exact=True).judge(two([np.inf], [np.inf])).verdict == "level"
    with pytest.raises(NoIntervalError, match="is not finite in every seed"):
        mean_difference(number([np.inf, 1.0]), number([1.0, 2.0]))


def test_the_smallest_difference_shown_is_found_in_four_fifths_of_repetitions() -> None:
    """Of normal seeds whose true difference is what the true spread asks for."""
    rng, seeds, repetitions = np.random.default_rng(0), 10, 4000
    error = 1 / np.sqrt(seeds)
    true = (stats.t.ppf(0.975, seeds - 1) + stats.t.ppf(0.8, seeds - 1)) * error
    draws = true + rng.standard_normal((repetitions, seeds))
    shown = [mean_difference(number(values), 0.0) for values in draws]
    share = np.mean([between.value - between.interval_half_width() > 0 for between in shown])
    assert 0.8 - 5 * 0.0064 < share < 0.8 + 0.02 + 5 * 0.0064  # the sum of quantiles is exact to about 0.02
    assert np.median([between.smallest_detectable_difference for between in shown]) == pytest.approx(true, rel=0.1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-100, 100), min_size=2, max_size=6),
    st.lists(st.floats(-100, 100), min_size=2, max_size=6),
    st.sampled_from(["above", "below"]),
)
def test_the_printed_interval_agrees_with_the_verdict(a: list[float], b: list[float], relation: str) -> None:
    judgement = comparison(**{"is": relation}).judge(two(a, b))
    intervals = re.findall(r"\(95 %: (\S+) to (\S+)\)", judgement.evidence_text)
    low, high = map(float, intervals[0] if intervals else 2 * re.findall(r"difference (\S+),", judgement.evidence_text))
    assert not re.search("[<>≈]", judgement.evidence_text)
    stated = low > 0 if relation == "above" else high < 0
    opposite = high < 0 if relation == "above" else low > 0
    assert {"held": stated, "contradicted": opposite}.get(judgement.verdict, low <= 0 <= high)


def fitted_and_literal() -> list[MeasuredNumber]:
    """Of A and B the literal readings 1 and 2, and fitted ones 5 and 4; all print 5."""
    table = {("A", "literal"): 1.0, ("B", "literal"): 2.0, ("A", "fitted"): 5.0, ("B", "fitted"): 4.0}
    return [
        MeasuredNumber({"algorithm": a, "reading": r}, np.array([v]), 5.0, is_fitted=r == "fitted")
        for (a, r), v in table.items()
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
    judgement = comparison(**{"is": "near", "within": 100, "exact": True, **content}).judge(fitted_and_literal())
    assert judgement.verdict == ("held" if compared else "not run")
    assert judgement.evidence_text.count("against") == len(compared)
    assert all(f"{name}: " in judgement.evidence_text for name in compared)
    fitted = bool(content.get("fitted"))
    near = {"is": "near", "than": {}, "than_measure": "end", "within": 100, "exact": True, "fitted": fitted}
    assert comparison(**near).judge(fitted_and_literal(), fitted_and_literal()).evidence_text.count("against") == 1


def test_the_table_for_a_terminal_says_verdict_reason_and_what_is_fitted() -> None:
    judged = [
        comparison(we_test=f"test {n}", exact=True, **content).judge(two([2.0], [1.0]))
        for n, content in enumerate(({}, {"is": "below", **REASON}, {"is": "below"}, REASON))
    ]
    rows = [
        report.ReportRow("A", paper=5.0, ours=4.0, std=0.1),
        report.ReportRow("A, fitted", paper=5.0, ours=5.0, std=0.1, fitted=True),
        *map(report.comparison_row, judged),
    ]
    lines = report.format_report_rows(rows).splitlines()
    assert lines[2].endswith("fitted")
    assert not lines[1].endswith("fitted")
    words = [line.split()[0] for line in lines if "test " in line and "shown by" not in line]
    assert words == ["held", "contradicted", "contradicted", "held"]
    assert lines.count("              reason: it cannot be (shown by tests/papers/test_p.py::test_it)") == 1
    assert lines[-1].strip().startswith("its reason did not show in these runs: it cannot be")
    counted = {"held": 2, "level": 0, "not shown": 0, "not run": 0, "contradicted": 2}
    assert report.count_verdicts(rows) == counted
    assert report.summary_table({"p/a": rows, "p/b": rows[:3]}).splitlines() == [
        "p/a    2 held,   0 level,   0 not shown,   0 not run,   2 contradicted",
        "p/b    1 held,   0 level,   0 not shown,   0 not run,   0 contradicted",
    ]


def test_numbers_without_a_paper_and_targets_not_reached() -> None:
    rows = [report.ReportRow("A", ours=110.0, std=0.0), report.ReportRow("B", ours=4.0)]
    lines = report.format_report_rows(rows, {"A": "> 100"}).splitlines()
    assert [line.split() for line in lines] == [["ours"], ["A", ">", "100"], ["B", "4"]]
    assert report.format_report_rows([*rows, report.ReportRow("C", paper=1.0, ours=2.0)]).splitlines()[0].split() == [
        "paper", "ours", "difference",
    ]  # fmt: skip


def test_evidence_shows_the_measured_number_beside_what_is_added_to_it() -> None:
    numbers = two([73.0, 74.0, 73.0], [75.0, 75.5, 75.0], (0, 1, 2))

    def evidence_text(**content: Any) -> str:
        return comparison(**{"is": "below"}, **content).judge(numbers).evidence_text

    assert "73.33 against 75.17 (B)" in evidence_text()
    assert "73.33 against 65.17 (75.17 of B, minus 10)" in evidence_text(plus=-10)
    assert "73.33 against 37.58 (0.5 × 75.17 of B)" in evidence_text(times=0.5)
    assert "73.33 against 38.58 (0.5 × 75.17 of B, plus 1)" in evidence_text(times=0.5, plus=1)
    assert "73.33 against 42" in comparison(than=42.0, **{"is": "above"}).judge(numbers).evidence_text


def test_notes_say_what_the_spread_is_and_over_which_rounds() -> None:
    measures = {
        "end": make_measure(metric="a"),
        "late": make_measure(metric="a", last=50, unit="%"),
        "between": make_measure(metric="a", window=(3, 7), spread=True),
        "peak": make_measure(metric="a", largest=True),
        "reached": make_measure(metric="a", until="above", target=1.0),
    }
    recipe = SimpleNamespace(measures=measures)
    notes = report.number_notes(recipe, [report.ReportRow("A", ours=1.0, std=0.5)])  # type: ignore[arg-type]
    assert notes == [
        "± is the standard deviation over seeds",
        "late: in %, mean over the evaluations in the last 50 rounds",
        "between: standard deviation over the evaluations in rounds 3 to 7",
        "peak: the largest value of all evaluations",
    ]
    assert report.number_notes(recipe, [report.ReportRow("A", ours=1.0)])[0].startswith("late")  # type: ignore[arg-type]
    assert report.format_report_rows([report.ReportRow("A", ours=1.0)], None, ["late: …"]).splitlines()[-1] == "late: …"


def test_a_label_without_results_leaves_the_comparison_not_run() -> None:
    """Else "A below B and C" would be held by A and B alone."""
    numbers = two([1.0, 1.1, 0.9], [2.0, 2.2, 2.1], (0, 1, 2))
    both = {"is": "below", "of": {"algorithm": "A"}, "than": {"algorithm": ["B", "C"]}}
    judgement = comparison(**both).judge(numbers)
    assert (judgement.verdict, judgement.evidence_text) == ("not run", "no results for C")
    assert comparison(**{**both, "than": {"algorithm": "B"}}).judge(numbers).verdict == "held"


def test_a_reproduction_says_what_its_runs_say_about_the_papers_statements() -> None:
    """Each statement that the recipe tests once, with its place and the verdict that the paper's page has."""
    (result,) = [
        result
        for result in stored.load_stored_results(recipe_folder())
        if (result.recipe, result.scale) == ("fedpbc/fig2a", "paper")
    ]
    recipe = load_recipe("fedpbc/fig2a")
    ledger = load_statement_ledger("fedpbc", recipe_folder())
    text = statements_text(recipe, "paper", stored.judge(result, recipe), ledger)
    tested = {comparison.statement for comparison in recipe.comparisons if comparison.statement}
    assert sorted(re.findall(r"\[([\w-]+)\], ", text)) == sorted(tested)
    (line,) = [line for line in text.splitlines() if "[fig2a-unbiased]" in line]
    statement = next(statement for statement in ledger.statements if statement.id == "fig2a-unbiased")
    assert line == f"  refuted [fig2a-unbiased], {statement.place}: {statement.states}"
    assert statements_text(recipe, "smoke", [], ledger) == ""
