"""The README.md of a board: standings, differences with intervals, and provenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.core.speaking import code_span, escape_markdown
from fedsim.studies.board.board import Board
from fedsim.studies.board.rows import DONE, REFUSED
from fedsim.studies.board.sentences import SIGNIFICANCE, difference_text, outcomes, sentence
from fedsim.studies.board.standings import Standings

EDGE = "‡"
PICTURE_CAPTIONS = {
    "critical_differences": "Mean ranks over the cells, the best on the left; a bar joins those that Nemenyi's test "
    "does not tell apart at 5 %. Cells of one data set are no independent problems: this describes these cells only.",
    "wins": "In how many cells the algorithm of a line is better than that of a column, by the cell's paired interval.",
    "cells": "Cell by cell; × where seeds were given up.",
}


def markdown(standings: Standings, picture_names: Sequence[str]) -> str:
    """Return the page as Markdown; `picture_names` are the file names of its pictures."""
    board = standings.board
    command = code_span(f"fedsim-leaderboard {board.name} --page")
    num_planned_cells = len(board.cells())
    row_counts = Counter(row.status for cells in standings.cells for row in cells.rows.values())
    lines = [
        f"# {escape_markdown(board.title)}: {escape_markdown(board.about)}",
        "",
        f"Written by {command} from the results in this folder; do not edit.",
        f"{len(standings.cells)} of {num_planned_cells} cells, {row_counts[DONE]} rows with "
        f"numbers, {len(board.seeds)} seeds each; "
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
    """Return the paragraph that says how rates were tuned and differences computed."""
    t, against = board.tuning, escape_markdown(board.against)
    metric = escape_markdown(t.metric.replace("_", " "))
    return [
        f"Rates: {t.trials} trials of each algorithm in a track, {t.rounds} rounds on seeds {t.seeds}, which no row "
        f"has; the best {metric} is kept ([rates.json](rates.json) has all trials). Differences "
        f"are those by seed to {against}, of the means over the cells, with Student's 95 % interval. "
        f"Milliseconds: processor time of a round of {len(board.seeds)} seeds, each algorithm alone on one thread."
    ]


def _standings_table(standings: Standings) -> list[str]:
    """Return the table of standings, one line per entry.

    Columns: rank, main measure, its difference to the reference, wins and losses, other measures, memory, processor
    time. Entries that have numbers in some cells only come last, without a rank.
    """
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
                difference_text(standings.paired(name, against), board.measures[board.main_measure]),
                f"{standings.wins[row, column]}/{standings.wins[column, row]}",
            ]
        lines.append(_line(standings, name, _marked(standings, name), f"{ranks[index]:.1f}", comparison))
    for name in [name for name in board.entries if name not in names]:
        partial = standings.with_numbers_of(name)
        if partial.cells:
            label = f"*{escape_markdown(name)}*, {len(partial.cells)} of {len(standings.cells)} cells"
            difference = difference_text(partial.paired(name, board.against), board.measures[board.main_measure])
            lines.append(_line(partial, name, label, "–", [difference, ""]))
    return [*lines, "", *_edge_note(standings, names)]


def _edge_note(standings: Standings, names: Sequence[str]) -> list[str]:
    """Return the note that explains the edge mark and names its tracks; empty if no entry has the mark."""
    at_edges = [name for name in names if _edge_tracks(standings, name)]
    if not at_edges:
        return []
    text = f"The tuned rate is the lowest or highest of its grid ({_edge_list(standings, at_edges)})"
    return [f"{EDGE} {text}: a rate beyond it may be better.", ""]


def _line(standings: Standings, name: str, label: str, rank: str, comparison: Sequence[str]) -> str:
    """Return a line of the table; `comparison` holds the difference, and the wins and losses."""
    board = standings.board
    other_measures = [m for m in board.measures if m != board.main_measure]
    ms = standings.milliseconds(name)
    cells = [label, rank, _mean_text(standings, name, board.main_measure), *comparison]
    cells += [_mean_text(standings, name, measure) for measure in other_measures]
    cells += [_memory_text(standings, name), "–" if ms is None else f"{ms:.3g}"]
    return "| " + " | ".join(cells) + " |"


def _edge_tracks(standings: Standings, name: str) -> list[str]:
    """Return the tracks in which tuning chose an edge of the entry's grid."""
    return [track for track in standings.tracks if standings.rates.is_at_edge(track, name)]


def _marked(standings: Standings, name: str) -> str:
    return escape_markdown(name) + (EDGE if _edge_tracks(standings, name) else "")


def _edge_list(standings: Standings, names: Sequence[str]) -> str:
    """Return the names of the entries, with their edge tracks if the board has several tracks."""
    if len(standings.tracks) == 1:
        return ", ".join(map(escape_markdown, names))
    return "; ".join(f"{escape_markdown(name)}: {', '.join(_edge_tracks(standings, name))}" for name in names)


def findings_text(standings: Standings) -> list[str]:
    """Return the board's questions, each followed by the sentences that answer it from the numbers."""
    board = standings.board
    if not board.findings:
        return []
    comparisons = sum(len(finding.comparisons) for finding in board.findings)
    lines = [
        "## What the numbers say",
        "",
        f"Each sentence is written from the rows of the cells that it names. Its p-value is corrected for the "
        f"{comparisons} comparisons of this page (Holm), and it is shown if that is below {SIGNIFICANCE:g}. Intervals "
        "are single 95 % intervals over seeds; they do not include what other tuning seeds would have changed. Single "
        "cells and other tracks are counted by their own intervals.",
        "",
    ]
    for number, (finding, results) in enumerate(zip(board.findings, outcomes(standings), strict=True), 1):
        lines += [f"{number}. **{escape_markdown(finding.question)}**", ""]
        lines += [f"    - {sentence(standings, outcome, escape_markdown)}" for outcome in results]
        lines.append("")
    return lines


def _mean_text(standings: Standings, name: str, measure: str) -> str:
    """Return the mean over cells and seeds; for costs the median over runs that reached the target, and their share."""
    by = standings.board.measures[measure]
    values = np.concatenate([cells.rows[name].of(measure) for cells in standings.cells])
    finite_values = values[np.isfinite(values)]
    if not len(finite_values):
        return "–"
    if by.until is not None:
        share = len(finite_values) / (len(standings.board.seeds) * len(standings.cells))
        return f"{_count_text(float(np.median(finite_values)))} ({100 * share:.0f} %)"
    text = f"{100 * finite_values.mean():.1f} %" if by.percent else f"{finite_values.mean():.4g}"
    return text if len(finite_values) == len(values) else f"{text} ({len(finite_values)} of {len(values)})"


def _memory_text(standings: Standings, name: str) -> str:
    sizes = sorted({cells.rows[name].remembered for cells in standings.cells if cells.rows[name].status == DONE})
    return (
        "–"
        if not sizes or sizes[-1] == 0
        else " – ".join(_count_text(s) for s in dict.fromkeys((sizes[0], sizes[-1]))) + " B"
    )


def _count_text(value: float) -> str:
    """Format a number with a unit prefix: 950, 12 k, 3.4 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if value >= size:
            return f"{value / (1e3 if unit == ' k' else size):.3g}{unit}"
    return f"{value:.4g}"


def _provenance_text(standings: Standings) -> list[str]:
    """Return the section that lists the commands, commits and versions that made the rows."""
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
    """Return the first seven characters of the commit, and whether there were uncommitted changes."""
    commit = str(provenance.get("commit") or "unknown")
    return commit[:7] + (" with changes" if commit.endswith("+") else "")


def _versions_text(provenance: dict[str, dict[str, str]]) -> str:
    return ", ".join(f"{name} {version}" for name, version in (provenance.get("versions") or {}).items())
