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
from fedsim.studies.board.findings import ALL_CELLS_PATTERN, ASKS_EQUIVALENT, Comparison
from fedsim.studies.board.measured import LeaderboardMeasure
from fedsim.studies.board.standings import Standings
from fedsim.studies.results.paired import PairedDifference

SIGNIFICANCE_LEVEL = 0.05


@dataclass(frozen=True)
class ComparisonOutcome:
    """The outcome of a comparison.

    Attributes:
        comparison: the comparison.
        paired_differences: differences by seed, one − other, of the means over the cells.
        num_cells: number of cells that have both entries.
        p_value: probability of such differences if the answer were no, after Holm's correction over the whole board.
        num_better_cells, num_worse_cells: numbers of cells in which `one` is better, or worse, by the cell's own
            interval.
        direction_by_other_track: track → 1 where `one` is better there, -1 where it is worse, 0 where the interval
            contains 0.
    """

    comparison: Comparison
    paired_differences: PairedDifference
    num_cells: int
    p_value: float
    num_better_cells: int
    num_worse_cells: int
    direction_by_other_track: dict[str, int]


def finding_outcomes(standings: Standings) -> list[list[ComparisonOutcome]]:
    """Return the outcomes of the comparisons of each finding of the board."""
    board = standings.board
    comparisons = [comparison for finding in board.findings for comparison in finding.comparisons]
    single_tests = [_test_comparison(standings, comparison) for comparison in comparisons]
    p_values = holm_adjusted([outcome.p_value for outcome in single_tests])
    by_comparison = iter([replace(outcome, p_value=p) for outcome, p in zip(single_tests, p_values, strict=True)])
    return [[next(by_comparison) for _ in finding.comparisons] for finding in board.findings]


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's correction (Holm 1979), comparable with the level of a single test."""
    adjusted_p_values = [1.0] * len(p_values)
    running_maximum = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        running_maximum = max(running_maximum, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted_p_values[index] = running_maximum
    return adjusted_p_values


def p_value(paired_difference: PairedDifference, equivalence_margin: float | None = None) -> float:
    """Return the p-value of Student's paired test: two-sided for a difference, or of equivalence within
    ± `equivalence_margin`.

    Equivalence takes two one-sided tests at half the level, so that 5 % corresponds to a 95 % interval inside the
    margin.
    """
    if paired_difference.num_pairs < 2:
        return 1.0
    if equivalence_margin is None:
        return 2 * _upper_tail(abs(paired_difference.mean), paired_difference)
    return min(1.0, 2 * _upper_tail(equivalence_margin - abs(paired_difference.mean), paired_difference))


def _upper_tail(distance: float, differences: PairedDifference) -> float:
    if differences.standard_error == 0:
        return 0.0 if distance > 0 else 0.5
    return float(stats.t.sf(distance / differences.standard_error, differences.num_pairs - 1))


def _equivalence_margin(standings: Standings, comparison: Comparison) -> float | None:
    measure = comparison.measure or standings.board.main_measure
    return standings.board.equivalence_margins[measure] if comparison.asks == ASKS_EQUIVALENT else None


def _test_comparison(standings: Standings, comparison: Comparison) -> ComparisonOutcome:
    """Return the outcome of a comparison, with the p-value of this test alone."""
    measure_name = comparison.measure or standings.board.main_measure
    compared_cells = standings.restricted_to_cells(comparison.includes)
    single_cells = [Standings(standings.board, [cells]) for cells in compared_cells.cell_rows]
    cell_signs = [_significant_difference_sign(single_cell, comparison, measure_name) for single_cell in single_cells]
    other_cells = standings.restricted_to_cells(lambda name: not comparison.includes(name))
    differences = compared_cells.paired_differences(comparison.one, comparison.other, measure_name)
    return ComparisonOutcome(
        comparison,
        differences,
        compared_cells.num_shared_cells(comparison.one, comparison.other, measure_name),
        p_value(differences, _equivalence_margin(standings, comparison)),
        cell_signs.count(1),
        cell_signs.count(-1),
        {
            track: _significant_difference_sign(other_cells.restricted_to_track(track), comparison, measure_name)
            for track in other_cells.tracks
        },
    )


def _significant_difference_sign(standings: Standings, comparison: Comparison, measure: str) -> int:
    """Return 1 if the first entry is better by the 95 % interval, -1 if it is worse, else 0."""
    low, high = standings.paired_differences(comparison.one, comparison.other, measure).confidence_interval
    direction = 1 if standings.board.measures[measure].higher_is_better else -1
    return direction if low > 0 else -direction if high < 0 else 0


def outcome_sentence(
    standings: Standings, outcome: ComparisonOutcome, text_formatter: Callable[[str], str] = str
) -> str:
    """Return the answer to a comparison as a sentence; `text_formatter` escapes names."""
    comparison = outcome.comparison
    name = comparison.measure or standings.board.main_measure
    measure = standings.board.measures[name]
    first_name, second_name, in_measure = (
        text_formatter(comparison.one),
        text_formatter(comparison.other),
        text_formatter(name),
    )
    if name != standings.board.main_measure or not name.isalpha():
        in_measure = f'"{in_measure}"'
    scope_text = f"in {outcome.num_cells} cell{'s' * (outcome.num_cells != 1)}{_scope_text(comparison)}"
    if outcome.paired_differences.num_pairs < 2:
        return (
            f"**Not shown**: {first_name} and {second_name} have too few numbers in common in {in_measure} "
            f"{scope_text}."
        )
    difference_numbers = f"{difference_text(outcome.paired_differences, measure)}, p = {outcome.p_value:.2g}"
    is_shown = outcome.p_value < SIGNIFICANCE_LEVEL
    if comparison.asks == ASKS_EQUIVALENT:
        margin = _equivalence_margin(standings, comparison)
        assert margin is not None
        margin_text = f"{100 * margin:g} points" if measure.is_percent else f"{margin:g}"
        claim_text = f"{first_name} and {second_name} differ by at most {margin_text} in {in_measure} {scope_text}"
    else:
        first_is_better = (outcome.paired_differences.mean > 0) == measure.higher_is_better
        claim_text = (
            f"{first_name} is {'better' if first_is_better else 'worse'} than {second_name} in "
            f"{in_measure} {scope_text}"
        )
    text = (
        f"{claim_text}: {difference_numbers}" if is_shown else f"**Not shown**: that {claim_text}: {difference_numbers}"
    )
    if outcome.num_cells > 1:
        text += f"; by single cells better in {outcome.num_better_cells}, worse in {outcome.num_worse_cells}"
    return text + "." + _other_cells_sentence(outcome, text_formatter)


def _scope_text(comparison: Comparison) -> str:
    """Return the patterns of the compared cells in brackets; '' for all cells."""
    scope = [", ".join(map(code_span, comparison.cells))] if comparison.cells != [ALL_CELLS_PATTERN] else []
    scope += [f"but {', '.join(map(code_span, comparison.but))}"] if comparison.but else []
    return f" ({' '.join(scope)})" if scope else ""


def _other_cells_sentence(outcome: ComparisonOutcome, formatter: Callable[[str], str]) -> str:
    """Return a sentence about the same comparison in the cells that it leaves out, by track."""
    labels = {1: "better in", -1: "worse in", 0: "not distinguishable in"}
    groups = []
    for sign, label in labels.items():
        tracks = [formatter(track) for track, of_track in outcome.direction_by_other_track.items() if of_track == sign]
        if tracks:
            groups.append(f"{label} {', '.join(tracks)}")
    return f" In the other cells: {'; '.join(groups)}." if groups else ""


def difference_text(paired_differences: PairedDifference, measure: LeaderboardMeasure) -> str:
    """Format a mean difference with its 95 % interval, bold if the interval excludes zero."""
    if not paired_differences.num_pairs:
        return "–"
    factor = 100 if measure.is_percent else 1
    low, high = (factor * bound for bound in paired_differences.confidence_interval)
    excludes_zero = not (low <= 0 <= high) and not math.isnan(low)
    digits = max(2, min(6, 1 - math.floor(math.log10(high - low)))) if high > low else 2
    text = f"{factor * paired_differences.mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"**{text}**" if excludes_zero else text
