"""Mutation tests of comparisons: the data are changed to see whether a held comparison could have failed.

Exchanged: the numbers of the two sides. Relabelled: in every seed it is drawn which value belongs to which side (Fisher
1935), so that there is no difference left to show. Replaced: the left side by other numbers, not near the right one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fedsim.studies.reproduce.comparison import HELD_VERDICT, ComparedSides, Comparison
from fedsim.studies.reproduce.intervals import CONFIDENCE_LEVEL
from fedsim.studies.reproduce.number import MeasuredNumber

SIGNIFICANCE_LEVEL = 1 - CONFIDENCE_LEVEL
MAX_RELABELLINGS = 500  # of more seeds than can be enumerated
MAX_ENUMERATED_SEEDS = 8  # seeds: 2⁸ relabellings


def vacuity_reasons(
    comparison: Comparison, numbers: list[MeasuredNumber], than_numbers: list[MeasuredNumber] | None = None
) -> list[str]:
    """Return reasons why the comparison, held on these numbers, could hardly have failed; empty if it could."""
    sides_of_pairs = comparison.compared_sides(numbers, than_numbers)
    if comparison.judge_sides(sides_of_pairs).verdict != HELD_VERDICT:
        return []
    if comparison.relation == "near":
        return (
            [] if any_replacement_fails(comparison, sides_of_pairs, numbers) else ["each replacement is near as well"]
        )
    fault_texts = []
    if comparison.judge_sides([swap_sides(sides) for sides in sides_of_pairs]).verdict == HELD_VERDICT:
        fault_texts.append("it is held with its sides exchanged too")
    share = 0.0 if comparison.exact else chance_of_holding(comparison, sides_of_pairs)
    if share > SIGNIFICANCE_LEVEL + 3 * math.sqrt(SIGNIFICANCE_LEVEL * (1 - SIGNIFICANCE_LEVEL) / MAX_RELABELLINGS):
        fault_texts.append(f"it is held in {share:.0%} of random relabellings")
    return fault_texts


def swap_sides(sides: ComparedSides) -> ComparedSides:
    """Exchange the numbers of the two sides; if the right one is a constant, reflect the left side about it."""
    left_number, right = sides.left_number, sides.right_side
    if isinstance(right, MeasuredNumber):
        return ComparedSides(
            replace(left_number, values=right.values, seeds=right.seeds),
            replace(right, values=left_number.values, seeds=left_number.seeds),
            sides.name,
        )
    return replace(sides, left_number=replace(left_number, values=2 * right - left_number.values))


def chance_of_holding(comparison: Comparison, sides_of_pairs: list[ComparedSides]) -> float:
    """Return the share of relabellings, other than the actual labels, in which the comparison is held."""
    untransformed_comparison = replace(
        comparison, times=1.0, plus=0.0
    )  # relabelled is the right side as it is compared
    sides = [
        replace(side, right_side=side.transformed_right_side(comparison.times, comparison.plus))
        for side in sides_of_pairs
    ]
    outcomes = [
        all(untransformed_comparison.judge_pair(pair)[0] == HELD_VERDICT for pair in relabelled_pairs)
        for relabelled_pairs in relabelled_sides(sides)
    ]
    return float(np.mean(outcomes)) if outcomes else 0.0


def relabelled_sides(sides_of_pairs: list[ComparedSides]) -> Iterator[list[ComparedSides]]:
    """Yield relabellings other than the actual labels: all of them for a few paired seeds, else a sample.

    Sides that share their seeds swap them seed by seed, the same ones in every pair of sides; the values of others
    are pooled and dealt anew.
    """
    draw = np.random.default_rng(0)
    seeds = max(len(sides.left_number.values) for sides in sides_of_pairs)
    if seeds <= MAX_ENUMERATED_SEEDS and all(map(has_matching_seeds, sides_of_pairs)):
        masks = [np.array(bits) for bits in itertools.product((False, True), repeat=seeds)]
    else:
        masks = list(draw.random((MAX_RELABELLINGS, seeds)) < 0.5)
    for mask in masks:
        if mask.any():
            yield [
                _exchange_at_mask(sides, mask) if has_matching_seeds(sides) else _relabelled_sides(sides, draw)
                for sides in sides_of_pairs
            ]


def has_matching_seeds(sides: ComparedSides) -> bool:
    """Return whether the right side has a value for each seed of the left side."""
    left_number, right = sides.left_number, sides.right_side
    if not isinstance(right, MeasuredNumber):
        return True
    return (
        left_number.seeds is not None
        and left_number.seeds == right.seeds
        and len(left_number.values) == len(right.values)
    )


def _exchange_at_mask(sides: ComparedSides, mask: np.ndarray) -> ComparedSides:
    left_number, right = sides.left_number, sides.right_side
    chosen_mask = mask[: len(left_number.values)]
    right_values = right.values if isinstance(right, MeasuredNumber) else 2 * right - left_number.values
    exchanged_left = replace(left_number, values=np.where(chosen_mask, right_values, left_number.values))
    if not isinstance(right, MeasuredNumber):
        return replace(sides, left_number=exchanged_left)
    return replace(
        sides,
        left_number=exchanged_left,
        right_side=replace(right, values=np.where(chosen_mask, left_number.values, right_values)),
    )


def _relabelled_sides(sides: ComparedSides, draw: np.random.Generator) -> ComparedSides:
    left_number, right = sides.left_number, sides.right_side
    assert isinstance(right, MeasuredNumber)
    count, pooled_values = len(left_number.values), np.concatenate([left_number.values, right.values])
    order = np.arange(len(pooled_values))
    while set(order[:count]) == set(range(count)):
        order = draw.permutation(len(pooled_values))
    return replace(
        sides,
        left_number=replace(left_number, values=pooled_values[order[:count]]),
        right_side=replace(right, values=pooled_values[order[count:]]),
    )


def any_replacement_fails(
    comparison: Comparison, sides_of_pairs: list[ComparedSides], numbers: list[MeasuredNumber]
) -> bool:
    """Return whether the comparison fails with zero, twice the number or another number of the measure."""
    for sides in sides_of_pairs:
        for values in (
            0 * sides.left_number.values,
            2 * sides.left_number.values,
            *(number.values for number in numbers),
        ):
            number = replace(sides.left_number, values=values, seeds=None)
            if comparison.judge_pair(replace(sides, left_number=number))[0] != HELD_VERDICT:
                return True
    return False
