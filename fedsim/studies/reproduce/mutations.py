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

from fedsim.studies.reproduce.comparison import HELD, ComparedSides, Comparison
from fedsim.studies.reproduce.intervals import CONFIDENCE
from fedsim.studies.reproduce.number import Number

SIGNIFICANCE_LEVEL = 1 - CONFIDENCE
MAX_RELABELLINGS = 500  # of more seeds than can be enumerated
MAX_ENUMERATED_SEEDS = 8  # seeds: 2⁸ relabellings


def faults(comparison: Comparison, numbers: list[Number], than_numbers: list[Number] | None = None) -> list[str]:
    """Return reasons why the comparison, held on these numbers, could hardly have failed; empty if it could."""
    compared = comparison.sides(numbers, than_numbers)
    if comparison.judge_sides(compared).word != HELD:
        return []
    if comparison.relation == "near":
        return [] if some_replacement_fails(comparison, compared, numbers) else ["whatever is in its place is near too"]
    reasons = []
    if comparison.judge_sides([exchanged(sides) for sides in compared]).word == HELD:
        reasons.append("it is held with its sides exchanged too")
    share = 0.0 if comparison.exact else held_by_chance(comparison, compared)
    if share > SIGNIFICANCE_LEVEL + 3 * math.sqrt(SIGNIFICANCE_LEVEL * (1 - SIGNIFICANCE_LEVEL) / MAX_RELABELLINGS):
        reasons.append(f"it is held in {share:.0%} of random relabellings")
    return reasons


def exchanged(sides: ComparedSides) -> ComparedSides:
    """Exchange the numbers of the two sides; if the right one is a constant, reflect the left side about it."""
    left, right = sides.left, sides.right
    if isinstance(right, Number):
        return ComparedSides(
            replace(left, values=right.values, seeds=right.seeds),
            replace(right, values=left.values, seeds=left.seeds),
            sides.name,
        )
    return replace(sides, left=replace(left, values=2 * right - left.values))


def held_by_chance(comparison: Comparison, compared: list[ComparedSides]) -> float:
    """Return the share of relabellings, other than the actual labels, in which the comparison is held."""
    plain = replace(comparison, times=1.0, plus=0.0)  # relabelled is the right side as it is compared
    sides = [replace(side, right=side.transformed(comparison.times, comparison.plus)) for side in compared]
    outcomes = [all(plain.judge_pair(pair)[0] == HELD for pair in changed) for changed in relabelled(sides)]
    return float(np.mean(outcomes)) if outcomes else 0.0


def relabelled(compared: list[ComparedSides]) -> Iterator[list[ComparedSides]]:
    """Yield relabellings other than the actual labels: all of them for a few paired seeds, else a sample.

    Sides that share their seeds exchange them seed by seed, the same ones in every pair of sides; the values of others
    are pooled and dealt anew.
    """
    draw = np.random.default_rng(0)
    seeds = max(len(sides.left.values) for sides in compared)
    if seeds <= MAX_ENUMERATED_SEEDS and all(map(by_seed, compared)):
        masks = [np.array(bits) for bits in itertools.product((False, True), repeat=seeds)]
    else:
        masks = list(draw.random((MAX_RELABELLINGS, seeds)) < 0.5)
    for mask in masks:
        if mask.any():
            yield [
                _exchange_at_mask(sides, mask) if by_seed(sides) else _relabelled_sides(sides, draw)
                for sides in compared
            ]


def by_seed(sides: ComparedSides) -> bool:
    """Return whether the right side has a value for each seed of the left side."""
    left, right = sides.left, sides.right
    if not isinstance(right, Number):
        return True
    return left.seeds is not None and left.seeds == right.seeds and len(left.values) == len(right.values)


def _exchange_at_mask(sides: ComparedSides, mask: np.ndarray) -> ComparedSides:
    left, right = sides.left, sides.right
    chosen_mask = mask[: len(left.values)]
    right_values = right.values if isinstance(right, Number) else 2 * right - left.values
    changed = replace(left, values=np.where(chosen_mask, right_values, left.values))
    if not isinstance(right, Number):
        return replace(sides, left=changed)
    return replace(sides, left=changed, right=replace(right, values=np.where(chosen_mask, left.values, right_values)))


def _relabelled_sides(sides: ComparedSides, draw: np.random.Generator) -> ComparedSides:
    left, right = sides.left, sides.right
    assert isinstance(right, Number)
    count, pooled_values = len(left.values), np.concatenate([left.values, right.values])
    order = np.arange(len(pooled_values))
    while set(order[:count]) == set(range(count)):
        order = draw.permutation(len(pooled_values))
    return replace(
        sides,
        left=replace(left, values=pooled_values[order[:count]]),
        right=replace(right, values=pooled_values[order[count:]]),
    )


def some_replacement_fails(comparison: Comparison, compared: list[ComparedSides], numbers: list[Number]) -> bool:
    """Return whether the comparison fails with zero, twice the number or another number of the measure."""
    for sides in compared:
        for values in (0 * sides.left.values, 2 * sides.left.values, *(number.values for number in numbers)):
            number = replace(sides.left, values=values, seeds=None)
            if comparison.judge_pair(replace(sides, left=number))[0] != HELD:
                return True
    return False
