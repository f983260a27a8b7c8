"""What a comparison compares with what, and which ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsim.core import ConfigError
from fedsim.studies.reproduce.comparison import Comparison
from fedsim.studies.reproduce.number import MeasuredNumber
from fedsim.studies.reproduce.recipe import list_recipe_names, load_recipe
from fedsim.studies.reproduce.report import judge_comparisons
from fedsim.studies.reproduce.stored import labels_in_report


def numbers(table: dict[tuple[str, str], list[float]], paper: float | None = None) -> list[MeasuredNumber]:
    return [MeasuredNumber({"algorithm": a, "place": p}, np.array(v), paper) for (a, p), v in table.items()]


MEANS = {("A", "x"): [3.0], ("A", "y"): [5.0], ("B", "x"): [2.0], ("B", "y"): [6.0], ("C", "x"): [0.0]}


def comparison(**content: Any) -> Comparison:
    given = {"we_test": "…", "ours": True, "of": {"algorithm": "A"}, "than": {"algorithm": "B"}, "is": "above"}
    return Comparison.read(given | content)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ({}, "contradicted"),  # 3 > 2 at x, but 5 < 6 at y: every place counts
        ({"where": {"place": "x"}}, "held"),
        ({"where": {"place": ["x", "y"]}}, "contradicted"),
        ({"plus": -1.5}, "held"),  # 5 > 6 − 1.5
        ({"is": "below", "times": 2}, "held"),  # 3 < 4 and 5 < 12
        ({"is": "below", "times": 1.5}, "level"),  # 3 is exactly 3, and 5 < 9
        ({"than": {"algorithm": ["B", "C"]}, "where": {"place": "x"}}, "held"),
        ({"of": {"algorithm": "C"}, "is": "below"}, "held"),
        ({"than": 2.5}, "held"),
        ({"than": 3.5}, "contradicted"),
        ({"is": "near", "than": 4, "within": 1}, "held"),
        ({"is": "near", "than": 4, "within": 0.9}, "contradicted"),
        ({"of": {"place": "y"}, "than": {"place": "x"}}, "held"),  # A: 5 > 3, B: 6 > 2; C has no y
        ({"of": {"place": "y", "algorithm": "A"}, "than": {"place": "x", "algorithm": "B"}}, "held"),
        ({"of": {"algorithm": "A", "place": "y"}, "where": {"place": "y"}, "is": "below"}, "held"),  # and B's y alone
    ],
)
def test_exact_numbers_are_compared_at_every_place(content: dict[str, Any], word: str) -> None:
    assert comparison(exact=True, **content).judge(numbers(MEANS)).verdict == word


def test_the_papers_number_can_be_the_right_side() -> None:
    near = {"is": "near", "than": "paper", "exact": True}
    assert comparison(**near, within=1).judge(numbers(MEANS, paper=4.0)).verdict == "held"
    assert comparison(**near, within=0.5).judge(numbers(MEANS, paper=4.0)).verdict == "contradicted"
    assert comparison(**near, within=1).judge(numbers(MEANS)).verdict == "not run"


def test_another_measure_of_the_same_runs_can_be_the_right_side() -> None:
    twice = numbers({place: [2 * v for v in values] for place, values in MEANS.items()})
    below = {"is": "below", "than_measure": "largest", "exact": True, "than": {}}
    assert comparison(**below, times=0.6).judge(numbers(MEANS), twice).verdict == "held"  # v < 0.6 · 2v
    assert comparison(**below, times=0.4).judge(numbers(MEANS), twice).verdict == "contradicted"


def test_the_worst_pairs_are_told_and_nan_decides_nothing() -> None:
    judgement = comparison(exact=True).judge(numbers(MEANS))
    assert (
        judgement.evidence_text == "1 of 2 contradicted; A / y: 5 against 6 (B), difference -1, the same in every seed"
    )
    for relation in ("above", "below", "near"):
        lost = numbers({("A", "x"): [np.nan], ("B", "x"): [1.0]})
        judgement = comparison(**{"is": relation, "within": 10.0, "exact": True}).judge(lost)
        assert (judgement.verdict, judgement.evidence_text) == ("not shown", "1 of 1 not shown; A / x is not a number")


def test_nothing_to_compare_is_not_run() -> None:
    assert comparison().judge(numbers({("A", "x"): [1.0], ("B", "y"): [2.0]})).verdict == "not run"
    assert comparison().judge([]).verdict == "not run"


@pytest.mark.parametrize(
    ("named", "word"),
    [
        (["x", "small x"], "held"),  # each scale has one of the two
        (["x", "y", "small x"], "not run"),  # nothing stands for one of them
        (["x", "z"], "not run"),  # both scales have z, and no run
        (["x"], "not run"),
    ],
)
def test_a_label_of_this_scale_stands_for_one_of_another(named: list[str], word: str) -> None:
    substitutes = {"place": (frozenset({"small x"}), frozenset({"x", "y"}))}
    small = numbers({("A", "small x"): [3.0], ("B", "small x"): [2.0]})
    judgement = comparison(exact=True, where={"place": named}).judge(small, None, substitutes)
    assert judgement.verdict == word


@pytest.mark.slow
@pytest.mark.parametrize("name", list_recipe_names())
def test_results_of_some_scale_decide_each_comparison(name: str) -> None:
    """With a number at every place of a scale none is 'not run' at all of its scales."""
    recipe = load_recipe(name)
    undecided = {comparison.we_test for comparison in recipe.comparisons}
    for scale in ("cpu", "paper"):
        places = [labels_in_report(recipe, setting) for setting in recipe.settings(scale)]
        made_up = {
            measure: [
                MeasuredNumber(
                    at, np.array([1.0, 2.0, 4.0]), recipe.paper_value(measure, at), recipe.has_fitted_label(at)
                )
                for at in places
            ]
            for measure in recipe.measures
        }  # fmt: skip
        judged = judge_comparisons(recipe, made_up, scale)
        undecided -= {judgement.comparison.we_test for judgement in judged if judgement.verdict != "not run"}
    assert not undecided


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"is": "beside"}, "beside"),
        ({"of": {"algoritm": "A"}}, "did you mean 'algorithm'"),
        ({"than": "rival"}, "rival"),
        ({"measure": "speed"}, "speed"),
        ({"errors": -1}, "errors=-1 must not be negative"),
        ({"matters": 0}, "matters=0 must be positive"),
        ({"errors": 1, "surely": 1}, "choose one"),
        ({"paired": True, "than": "paper"}, "paired: true needs runs on both sides, not than=paper"),
        ({"fitted": True}, "the recipe names no fitted labels"),
        ({"reason": "it is not so"}, "reason needs shown_by"),
        ({"shown_by": "paper/recipe"}, "shown_by needs reason"),
        ({"reason": "it is not so", "shown_by": "a test"}, "shown_by='a test' must be tests/FILE.py::TEST"),
        ({"ours": False}, "give either statement: ID or ours: true"),
        ({"statement": "fig-1"}, "give either statement: ID or ours: true"),
        ({"statement": "fig-1", "ours": False, "fitted": True}, "fitted constants decide no statement"),
        ({"of": {"algorithm": "A", "place": "x"}}, "of names the axis 'place', and neither than nor where does"),
    ],
)
def test_a_comparison_of_nothing_is_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        comparison(**content).check("paper/recipe", ["algorithm", "place"], ["accuracy"])


@pytest.mark.parametrize(
    "content",
    [
        {"of": {"algorithm": "A", "place": "x"}, "than": {"algorithm": "B", "place": "y"}},
        {"of": {"algorithm": "A", "place": "x"}, "than": {"algorithm": "B"}, "where": {"place": "x"}},
        {"of": {"algorithm": "A", "place": "x"}, "than": 3},
        {"of": {"algorithm": "A", "place": "x"}, "than": "paper"},
        {"of": {"algorithm": "A", "place": "x"}, "than": {}, "than_measure": "accuracy"},
    ],
)
def test_an_axis_whose_other_side_is_told_is_accepted(content: dict[str, Any]) -> None:
    comparison(**content).check("paper/recipe", ["algorithm", "place"], ["accuracy"])
