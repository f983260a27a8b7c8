"""Held comparisons whose data are changed: those that could not have failed are told apart from those that could."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsim.studies.reproduce import stored
from fedsim.studies.reproduce.comparison import Comparison
from fedsim.studies.reproduce.mutations import chance_of_holding, relabelled_sides, swap_sides, vacuity_reasons
from fedsim.studies.reproduce.number import MeasuredNumber
from fedsim.studies.reproduce.recipe import load_recipe, recipe_folder

RESULTS = stored.load_stored_results(recipe_folder())
DRAW = np.random.default_rng(1)
SEEDS = tuple(range(6))


def two(a: Any, b: Any, seeds: tuple[int, ...] | None = SEEDS) -> list[MeasuredNumber]:
    return [
        MeasuredNumber({"algorithm": name}, np.array(v, dtype=float), seeds=seeds) for name, v in (("A", a), ("B", b))
    ]


def comparison(**content: Any) -> Comparison:
    given = {"we_test": "…", "ours": True, "of": {"algorithm": "A"}, "than": {"algorithm": "B"}, "is": "below"}
    return Comparison.read(given | content)


def test_a_difference_in_every_seed_passes_all_mutations() -> None:
    for seeds in (SEEDS, None):
        numbers = two(1 + 0.1 * DRAW.standard_normal(6), 2 + 0.1 * DRAW.standard_normal(6), seeds)
        assert comparison().judge(numbers).verdict == "held"
        assert vacuity_reasons(comparison(), numbers) == []
        assert vacuity_reasons(comparison(than=1.5), numbers) == []


def test_a_bound_so_loose_that_either_side_keeps_it_is_found() -> None:
    numbers = two(1 + 0.01 * DRAW.standard_normal(6), 1 + 0.01 * DRAW.standard_normal(6))
    loose = comparison(times=2)
    assert loose.judge(numbers).verdict == "held"
    assert vacuity_reasons(loose, numbers) == ["it is held with its sides exchanged too"]
    assert vacuity_reasons(comparison(exact=True, times=2), two([1.0], [1.1], (0,))) == [
        "it is held with its sides exchanged too"
    ]


def test_a_rule_that_asks_for_no_interval_is_held_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the means alone compared, half of all relabellings would be held: the mutation sees it."""
    numbers = two(1 + 0.1 * DRAW.standard_normal(6), 1.2 + 0.1 * DRAW.standard_normal(6))
    sides = comparison().compared_sides(numbers)
    assert chance_of_holding(comparison(), sides) <= 0.05
    monkeypatch.setattr(
        "fedsim.studies.reproduce.intervals.MeanDifference.interval_half_width", lambda self, least=0.0: 0.0
    )
    assert chance_of_holding(comparison(), sides) > 0.4
    assert vacuity_reasons(comparison(), numbers)[0].startswith("it is held in ")


@pytest.mark.parametrize(("within", "wrong"), [(0.1, 0), (3.0, 1)])
def test_near_needs_a_margin_that_something_exceeds(within: float, wrong: int) -> None:
    numbers = two(1 + 0.01 * DRAW.standard_normal(6), 1 + 0.01 * DRAW.standard_normal(6))
    assert len(vacuity_reasons(comparison(**{"is": "near"}, within=within), numbers)) == wrong


def test_exchanging_the_sides_changes_the_sign_of_the_difference() -> None:
    a, b = DRAW.standard_normal((2, 6))
    (sides,) = comparison().compared_sides(two(a, b))
    assert swap_sides(sides).left_number.values.tolist() == b.tolist()
    assert swap_sides(sides).right_side.values.tolist() == a.tolist()
    (about,) = comparison(than=0.5).compared_sides(two(a, b))
    assert swap_sides(about).left_number.values == pytest.approx(1 - a)


@pytest.mark.parametrize(("seeds", "count"), [(2, 3), (3, 7), (8, 255), (9, 500)])
def test_relabelling_leaves_the_labels_as_they_are_out_and_keeps_every_value(seeds: int, count: int) -> None:
    a, b = DRAW.standard_normal((2, seeds))
    (sides,) = comparison().compared_sides(two(a, b, tuple(range(seeds))))
    changed = list(relabelled_sides([sides]))
    assert abs(len(changed) - count) <= (seeds > 8)
    for (each,) in changed:
        values = np.concatenate([each.left_number.values, each.right_side.values])
        assert sorted(values) == pytest.approx(sorted([*a, *b]))
        assert each.left_number.values.tolist() != a.tolist()


def test_sides_without_common_seeds_are_pooled_and_dealt_anew() -> None:
    a, b = DRAW.standard_normal((2, 4))
    (sides,) = comparison().compared_sides(two(a, b, None))
    dealt = [each for (each,) in relabelled_sides([sides])]
    lefts = {tuple(sorted(each.left_number.values)) for each in dealt}
    assert tuple(sorted(a)) not in lefts
    assert len(lefts) > 50  # of the 69 others


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: f"{result.recipe}-{result.scale}")
def test_every_held_comparison_of_the_committed_results_could_have_failed(result: stored.StoredRecipeResult) -> None:
    recipe = load_recipe(result.recipe)
    for each, numbers, others in stored.comparisons_with_numbers(result, recipe):
        assert vacuity_reasons(each, numbers, others) == [], each.we_test
