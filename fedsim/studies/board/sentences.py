"""Sentences of a board's page, generated from its numbers, each with its cells, interval and limits.

All comparisons of a board are tested together: Holm's correction keeps the probability of one wrong sentence at 5 %. A
sentence also counts the cells, and names the other tracks, in which the order is the reverse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from fedsim.core.speaking import code_span
from fedsim.studies.board.findings import ALL_CELLS_PATTERN, EQUIVALENT, Comparison
from fedsim.studies.board.measured import BoardMeasure
from fedsim.studies.board.standings import Standings
from fedsim.studies.results.paired import PairedDifference

SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Outcome:
    """The outcome of a comparison.

    Attributes:
        comparison: the comparison.
        differences: differences by seed, one − other, of the means over the cells.
        cells: number of cells that have both entries.
        p: probability of such differences if the answer were no, after Holm's correction over the whole board.
        better_cells, worse_cells: numbers of cells in which `one` is better, or worse, by the cell's own interval.
        other_tracks: track → 1 where `one` is better there, -1 where it is worse, 0 where the interval contains 0.
    """

    comparison: Comparison
    differences: PairedDifference
    cells: int
    p: float
    better_cells: int
    worse_cells: int
    other_tracks: dict[str, int]


def outcomes(standings: Standings) -> list[list[Outcome]]:
    """Return the outcomes of the comparisons of each finding of the board."""
    board = standings.board
    comparisons = [comparison for finding in board.findings for comparison in finding.comparisons]
    single_tests = [_single_test(standings, comparison) for comparison in comparisons]
    p_values = holm([outcome.p for outcome in single_tests])
    by_comparison = iter([replace(outcome, p=p) for outcome, p in zip(single_tests, p_values, strict=True)])
    return [[next(by_comparison) for _ in finding.comparisons] for finding in board.findings]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's correction (Holm 1979), comparable with the level of a single test."""
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def p_value(differences: PairedDifference, margin: float | None = None) -> float:
    """Return the p-value of Student's paired test: two-sided for a difference, or of equivalence within ± `margin`.

    Equivalence takes two one-sided tests at half the level, so that 5 % corresponds to a 95 % interval inside the
    margin.
    """
    if differences.pairs < 2:
        return 1.0
    if margin is None:
        return 2 * _upper_tail(abs(differences.mean), differences)
    return min(1.0, 2 * _upper_tail(margin - abs(differences.mean), differences))


def _upper_tail(distance: float, differences: PairedDifference) -> float:
    if differences.error == 0:
        return 0.0 if distance > 0 else 0.5
    return float(stats.t.sf(distance / differences.error, differences.pairs - 1))


def _margin(standings: Standings, comparison: Comparison) -> float | None:
    measure = comparison.measure or standings.board.main_measure
    return standings.board.equivalence_margins[measure] if comparison.asks == EQUIVALENT else None


def _single_test(standings: Standings, comparison: Comparison) -> Outcome:
    """Return the outcome of a comparison, with the p-value of this test alone."""
    measure = comparison.measure or standings.board.main_measure
    compared = standings.within(comparison.includes)
    single_cells = [Standings(standings.board, [cells]) for cells in compared.cells]
    signs = [_sign(single_cell, comparison, measure) for single_cell in single_cells]
    others = standings.within(lambda name: not comparison.includes(name))
    differences = compared.paired(comparison.one, comparison.other, measure)
    return Outcome(
        comparison,
        differences,
        compared.shared_cells(comparison.one, comparison.other, measure),
        p_value(differences, _margin(standings, comparison)),
        signs.count(1),
        signs.count(-1),
        {track: _sign(others.at(track), comparison, measure) for track in others.tracks},
    )


def _sign(standings: Standings, comparison: Comparison, measure: str) -> int:
    """Return 1 if the first entry is better by the 95 % interval, -1 if it is worse, else 0."""
    low, high = standings.paired(comparison.one, comparison.other, measure).interval
    direction = 1 if standings.board.measures[measure].higher_is_better else -1
    return direction if low > 0 else -direction if high < 0 else 0


def sentence(standings: Standings, outcome: Outcome, formatter: Callable[[str], str] = str) -> str:
    """Return the answer to a comparison as a sentence; `formatter` escapes names."""
    comparison = outcome.comparison
    name = comparison.measure or standings.board.main_measure
    measure = standings.board.measures[name]
    one, other, in_measure = formatter(comparison.one), formatter(comparison.other), formatter(name)
    if name != standings.board.main_measure or not name.isalpha():
        in_measure = f'"{in_measure}"'
    where = f"in {outcome.cells} cell{'s' * (outcome.cells != 1)}{_scope(comparison)}"
    if outcome.differences.pairs < 2:
        return f"**Not shown**: {one} and {other} have too few numbers in common in {in_measure} {where}."
    numbers = f"{difference_text(outcome.differences, measure)}, p = {outcome.p:.2g}"
    is_shown = outcome.p < SIGNIFICANCE
    if comparison.asks == EQUIVALENT:
        margin = _margin(standings, comparison)
        assert margin is not None
        reach = f"{100 * margin:g} points" if measure.percent else f"{margin:g}"
        claim = f"{one} and {other} differ by at most {reach} in {in_measure} {where}"
    else:
        rises = (outcome.differences.mean > 0) == measure.higher_is_better
        claim = f"{one} is {'better' if rises else 'worse'} than {other} in {in_measure} {where}"
    text = f"{claim}: {numbers}" if is_shown else f"**Not shown**: that {claim}: {numbers}"
    if outcome.cells > 1:
        text += f"; by single cells better in {outcome.better_cells}, worse in {outcome.worse_cells}"
    return text + "." + _elsewhere(outcome, formatter)


def _scope(comparison: Comparison) -> str:
    """Return the patterns of the compared cells in brackets; '' for all cells."""
    scope = [", ".join(map(code_span, comparison.cells))] if comparison.cells != [ALL_CELLS_PATTERN] else []
    scope += [f"but {', '.join(map(code_span, comparison.but))}"] if comparison.but else []
    return f" ({' '.join(scope)})" if scope else ""


def _elsewhere(outcome: Outcome, formatter: Callable[[str], str]) -> str:
    """Return a sentence about the same comparison in the cells that it leaves out, by track."""
    labels = {1: "better in", -1: "worse in", 0: "not told apart in"}
    groups = []
    for sign, label in labels.items():
        tracks = [formatter(track) for track, of_track in outcome.other_tracks.items() if of_track == sign]
        if tracks:
            groups.append(f"{label} {', '.join(tracks)}")
    return f" In the other cells: {'; '.join(groups)}." if groups else ""


def difference_text(by: PairedDifference, measure: BoardMeasure) -> str:
    """Format a mean difference with its 95 % interval, bold if the interval excludes zero."""
    if not by.pairs:
        return "–"
    factor = 100 if measure.percent else 1
    low, high = (factor * bound for bound in by.interval)
    excludes_zero = not (low <= 0 <= high) and not math.isnan(low)
    digits = max(2, min(6, 1 - math.floor(math.log10(high - low)))) if high > low else 2
    text = f"{factor * by.mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"**{text}**" if excludes_zero else text
