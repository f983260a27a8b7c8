"""A board's README.md: who is ahead, by how much, and of what it was made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedsim.core.speaking import code_span, escape_markdown
from fedsim.studies.board.board import Board
from fedsim.studies.board.findings import ALL_CELLS_PATTERN, Comparison
from fedsim.studies.board.measured import BoardMeasure
from fedsim.studies.board.rows import DONE, REFUSED
from fedsim.studies.board.standings import Standings
from fedsim.studies.results.paired import PairedDifference

PICTURE_CAPTIONS = {
    "critical_differences": "Mean ranks over the cells, the best on the left; a bar joins those that Nemenyi's test "
    "does not tell apart at 5 %. Cells of one data set are no independent problems: this describes these cells only.",
    "wins": "In how many cells the algorithm of a line is better than that of a column, by the cell's paired interval.",
    "cells": "Cell by cell; × where seeds were given up.",
}


def markdown(standings: Standings, picture_names: Sequence[str]) -> str:
    """The page; `picture_names` are names of its pictures."""
    board = standings.board
    command = code_span(f"fedsim-leaderboard {board.name} --page")
    num_planned_cells = len(board.cells())
    row_counts = Counter(row.status for cells in standings.cells for row in cells.rows.values())
    lines = [
        f"# {escape_markdown(board.title)}: {escape_markdown(board.about)}",
        "",
        f"Written by {command} from the results in this folder; do not edit.",
        f"{len(standings.cells)} of {num_planned_cells} cells, {row_counts[DONE]} rows with "
        f"numbers, {len(board.seeds)} seeds "
        "each; "
        "`index.html` beside this page has the same with filters; it opens from disk. "
        "[What a cell is, how to cite, and how to submit an algorithm](../../../../docs/leaderboard.md).",
        "",
        *_tuning_sentence(board),
        "",
    ]
    if len(standings.cells) < num_planned_cells:
        missing = [t for t in board.tracks if t not in standings.tracks]
        lines += [f"**Not complete**: {num_planned_cells - len(standings.cells)} cells are not computed yet"]
        lines[-1] += f", none of {', '.join(map(escape_markdown, missing))}." if missing else "."
        lines.append("")
    lines += findings_text(standings)
    lines += _standings_table(standings)
    if standings.test is not None:
        halfway_order, test = standings.halfway_orders(), standings.test
        lines += [
            f"Friedman's test of equal ranks: χ² = {test.chi_square:.1f}, p = {test.p:.2g}. Order after half of the "
            f"rounds against that at the end, Kendall's τ: {halfway_order.tau:.2f} in the mean over cells, "
            f"{halfway_order.min_tau:.2f} at least.",
        ]
        if halfway_order.separated_pairs:
            lines[-1] += (
                f" Of the {halfway_order.separated_pairs} pairs that a cell's paired intervals tell apart at the end, "
                f"{halfway_order.kept_pairs / halfway_order.separated_pairs:.1%} stood in that order by then."
            )
        lines.append("")
    for name in picture_names:
        lines += [f"![{name}]({name})", "", PICTURE_CAPTIONS[name.removesuffix(".png")], ""]
    if unranked := standings.unranked_reasons:
        reasons = dict.fromkeys(unranked.values())
        bullets = [
            f"- {escape_markdown(', '.join(n for n, cause in unranked.items() if cause == reason))}: "
            f"{escape_markdown(' '.join(reason.split()))}"
            for reason in reasons
        ]
        lines += ["Not ranked:", "", *bullets, ""]
    for track in standings.tracks if len(standings.tracks) > 1 else ():
        lines += [
            f"## {escape_markdown(track)}",
            "",
            f"{escape_markdown(board.tracks[track].about)}.",
            "",
            *_standings_table(standings.at(track)),
        ]
    return "\n".join([*lines, *_provenance_text(standings)]).rstrip() + "\n"


def _tuning_sentence(board: Board) -> list[str]:
    """How rates were found, in a sentence."""
    t, against = board.tuning, escape_markdown(board.against)
    metric = escape_markdown(t.metric.replace("_", " "))
    return [
        f"Rates: {t.trials} trials of each algorithm in a track, {t.rounds} rounds on seeds {t.seeds}, which no row "
        f"has; the best {metric} is kept ([rates.json](rates.json) has all trials). Differences "
        f"are those by seed to {against}, of the means over the cells, with Student's 95 % interval. "
        f"Milliseconds: processor time of a round of {len(board.seeds)} seeds, each algorithm alone on one thread."
    ]


def _standings_table(standings: Standings) -> list[str]:
    """A line for every ranked entry: rank, the main measure, its difference, wins and losses, the others, memory,
    processor time."""
    board, names = standings.board, standings.ranked
    against = board.against if board.against in names else None
    other_measures = [m for m in board.measures if m != board.main_measure]
    column_headings = [
        "",
        "rank",
        board.main_measure,
        f"to {board.against}",
        "won/lost",
        *other_measures,
        "memory",
        "ms a round",
    ]
    lines = [
        "| " + " | ".join(map(escape_markdown, column_headings)) + " |",
        "|---" + "|--:" * (len(column_headings) - 1) + "|",
    ]
    ranks = standings.test.ranks if standings.test is not None else np.arange(1.0, len(names) + 1)
    for index, name in enumerate(names):
        comparison = ["", ""]
        if against is not None and name != against:
            row, column = index, names.index(against)
            comparison = [
                _difference_text(standings.paired(name, against), board.measures[board.main_measure]),
                f"{standings.wins[row, column]}/{standings.wins[column, row]}",
            ]
        cells = [
            escape_markdown(name),
            f"{ranks[index]:.1f}",
            _mean_text(standings, name, board.main_measure),
            *comparison,
        ]
        cells += [_mean_text(standings, name, measure) for measure in other_measures]
        ms = standings.milliseconds(name)
        cells += [_memory_text(standings, name), "–" if ms is None else f"{ms:.3g}"]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def findings_text(standings: Standings) -> list[str]:
    """The board's sentences, and under each what shows it, or that its numbers do not."""
    lines = []
    for number, finding in enumerate(standings.board.findings, 1):
        lines += [f"{number}. **{escape_markdown(finding.says)}**", ""]
        lines += [f"   - {comparison_text(standings, comparison, escape_markdown)}" for comparison in finding.shown_by]
        lines.append("")
    return ["## What the numbers say", "", *lines] if lines else []


def comparison_text(standings: Standings, comparison: Comparison, formatter: Callable[[str], str] = str) -> str:
    """A comparison with its numbers, and whether they show it; `formatter` makes text of names."""
    paired, cells, holds = standings.compared_difference(comparison)
    name = comparison.measure or standings.board.main_measure
    measure = standings.board.measures[name]
    cells_text = [_patterns_text(comparison.cells)] if comparison.cells != [ALL_CELLS_PATTERN] else []
    cells_text += [f"but {_patterns_text(comparison.but)}"] if comparison.but else []
    scope = f" ({' '.join(cells_text)})" if cells_text else ""
    names = f"{formatter(comparison.one)} less {formatter(comparison.other)}, {formatter(name)}"
    statement = f"{names}, {cells} cell{'s' * (cells != 1)}{scope}: {_difference_text(paired, measure)}"
    margin = (
        f", within ±{100 * comparison.within if measure.percent else comparison.within:g}" if comparison.within else ""
    )
    return statement + margin + ("" if holds else "; **not shown**")


def _patterns_text(patterns: list[str]) -> str:
    return ", ".join(map(code_span, patterns))


def _mean_text(standings: Standings, name: str, measure: str) -> str:
    """Mean over cells and seeds; of costs the median over those that got there, and how many did."""
    paired = standings.board.measures[measure]
    values = np.concatenate([cells.rows[name].of(measure) for cells in standings.cells])
    finite_values = values[np.isfinite(values)]
    if not len(finite_values):
        return "–"
    if paired.until is not None:
        share = len(finite_values) / (len(standings.board.seeds) * len(standings.cells))
        return f"{_count_text(float(np.median(finite_values)))} ({100 * share:.0f} %)"
    text = f"{100 * finite_values.mean():.1f} %" if paired.percent else f"{finite_values.mean():.4g}"
    return text if len(finite_values) == len(values) else f"{text} ({len(finite_values)} of {len(values)})"


def _difference_text(paired: PairedDifference, measure: BoardMeasure) -> str:
    if not paired.pairs:
        return "–"
    factor = 100 if measure.percent else 1
    low, high = (factor * bound for bound in paired.interval)
    is_significant = not (low <= 0 <= high) and not math.isnan(low)
    digits = max(2, min(6, 1 - math.floor(math.log10(high - low)))) if high > low else 2
    text = f"{factor * paired.mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"**{text}**" if is_significant else text


def _memory_text(standings: Standings, name: str) -> str:
    sizes = sorted({cells.rows[name].remembered for cells in standings.cells if cells.rows[name].status == DONE})
    return (
        "–"
        if not sizes or sizes[-1] == 0
        else " – ".join(_count_text(s) for s in dict.fromkeys((sizes[0], sizes[-1]))) + " B"
    )


def _count_text(value: float) -> str:
    """A number as people read it: 950, 12 k, 3.4 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if value >= size:
            return f"{value / (1e3 if unit == ' k' else size):.3g}{unit}"
    return f"{value:.4g}"


def _provenance_text(standings: Standings) -> list[str]:
    """Which commands and versions made the rows."""
    rows = [row for cells in standings.cells for row in cells.rows.values() if row.status != REFUSED]
    origins = Counter(
        (str(row.made.get("command")), _commit_text(row.made), _versions_text(row.made)) for row in rows if row.made
    )
    lines = [
        f"- {n} rows: {code_span(command)}, commit {escape_markdown(commit)}, {escape_markdown(versions)}"
        for (command, commit, versions), n in origins.items()
    ]
    return ["## Made by", "", *lines] if lines else []


def _commit_text(provenance: dict[str, Any]) -> str:
    """Its first letters, and whether there were changes."""
    commit = str(provenance.get("commit") or "unknown")
    return commit[:7] + (" with changes" if commit.endswith("+") else "")


def _versions_text(provenance: dict[str, dict[str, str]]) -> str:
    return ", ".join(f"{name} {version}" for name, version in (provenance.get("versions") or {}).items())
