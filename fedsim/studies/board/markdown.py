"""The README.md of a board: standings, differences with intervals, and provenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.core.speaking import code_span, escape_markdown
from fedsim.studies.board.board import Leaderboard
from fedsim.studies.board.rows import DONE_STATUS, REFUSED_STATUS
from fedsim.studies.board.sentences import SIGNIFICANCE_LEVEL, difference_text, finding_outcomes, outcome_sentence
from fedsim.studies.board.standings import Standings

GRID_EDGE_MARK = "‡"
PICTURE_CAPTIONS = {
    "critical_differences": "Mean ranks over the cells, the best on the left; a bar joins those that Nemenyi's test "
    "does not distinguish at 5 %. Cells of one data set are not independent problems: the test "
    "describes these cells only.",
    "wins": "In how many cells the algorithm of a line is better than that of a column, by the cell's paired interval.",
    "cells": "Cell by cell; × where seeds were given up.",
}


def standings_markdown(standings: Standings, picture_names: Sequence[str]) -> str:
    """Return the page as Markdown; `picture_names` are the file names of its pictures."""
    board = standings.board
    command = code_span(f"fedsim-leaderboard {board.name} --page")
    num_planned_cells = len(board.cells())
    row_counts = Counter(row.status for cells in standings.cell_rows for row in cells.rows.values())
    text_lines = [
        f"# {escape_markdown(board.title)}: {escape_markdown(board.about)}",
        "",
        f"Written by {command} from the results in this folder; do not edit.",
        f"{len(standings.cell_rows)} of {num_planned_cells} cells, {row_counts[DONE_STATUS]} rows with "
        f"numbers, {len(board.seeds)} seeds each; "
        "`index.html` beside this page has the same with filters; it opens from disk. "
        "[What a cell is, how to cite, and how to submit an algorithm](../../../../docs/leaderboard.md).",
        "",
        *_tuning_sentence(board),
        "",
    ]
    if len(standings.cell_rows) < num_planned_cells:
        missing_tracks = [t for t in board.tracks if t not in standings.tracks]
        text_lines += [f"**Not complete**: {num_planned_cells - len(standings.cell_rows)} cells are not computed yet"]
        text_lines[-1] += f", none of {', '.join(map(escape_markdown, missing_tracks))}." if missing_tracks else "."
        text_lines.append("")
    text_lines += findings_lines(standings)
    text_lines += _standings_table(standings)
    if standings.friedman_test is not None:
        halfway_order, test = standings.halfway_rank_correlation(), standings.friedman_test
        text_lines += [
            f"Friedman's test of equal ranks: χ² = {test.chi_square:.1f}, p = {test.p_value:.2g}. Order after half "
            "of the "
            f"rounds against that at the end, Kendall's τ: {halfway_order.mean_kendall_tau:.2f} in the mean over "
            "cells, "
            f"{halfway_order.min_kendall_tau:.2f} at least.",
        ]
        if halfway_order.num_separated_pairs:
            text_lines[-1] += (
                f" Of the {halfway_order.num_separated_pairs} pairs that a cell's paired intervals distinguish at "
                "the end, "
                f"{halfway_order.num_kept_pairs / halfway_order.num_separated_pairs:.1%} stood in that order by then."
            )
        text_lines.append("")
    for name in picture_names:
        text_lines += [f"![{name}]({name})", "", PICTURE_CAPTIONS[name.removesuffix(".png")], ""]
    if unranked_reasons := standings.unranked_reasons:
        distinct_reasons = dict.fromkeys(unranked_reasons.values())
        bullet_lines = [
            f"- {escape_markdown(', '.join(n for n, cause in unranked_reasons.items() if cause == reason))}: "
            f"{escape_markdown(' '.join(reason.split()))}"
            for reason in distinct_reasons
        ]
        text_lines += ["Not ranked:", "", *bullet_lines, ""]
    for track in standings.tracks if len(standings.tracks) > 1 else ():
        text_lines += [
            f"## {escape_markdown(track)}",
            "",
            f"{escape_markdown(board.tracks[track].about)}.",
            "",
            *_standings_table(standings.restricted_to_track(track)),
        ]
    return "\n".join([*text_lines, *_provenance_text(standings)]).rstrip() + "\n"


def _tuning_sentence(board: Leaderboard) -> list[str]:
    """Return the paragraph that says how rates were tuned and differences computed."""
    t, reference_name = board.tuning, escape_markdown(board.against)
    metric = escape_markdown(t.metric.replace("_", " "))
    return [
        f"Rates: {t.trials} trials of each algorithm in a track, {t.rounds} rounds on seeds {t.seeds}, which no row "
        f"has; the best {metric} is kept ([rates.json](rates.json) has all trials). Differences "
        f"are those by seed to {reference_name}, of the means over the cells, with Student's 95 % interval. "
        f"Milliseconds: processor time of a round of {len(board.seeds)} seeds, each algorithm alone on one thread."
    ]


def _standings_table(standings: Standings) -> list[str]:
    """Return the table of standings, one line per entry.

    Columns: rank, main measure, its difference to the reference, wins and losses, other measures, memory, processor
    time. Entries that have numbers in some cells only come last, without a rank.
    """
    board, ranked_names = standings.board, standings.ranked_entries
    reference_name = board.against if board.against in ranked_names else None
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
    text_lines = [
        "| " + " | ".join(map(escape_markdown, column_headings)) + " |",
        "|---" + "|--:" * (len(column_headings) - 1) + "|",
    ]
    ranks = (
        standings.friedman_test.mean_ranks
        if standings.friedman_test is not None
        else np.arange(1.0, len(ranked_names) + 1)
    )
    for entry_index, entry_name in enumerate(ranked_names):
        comparison_columns = ["", ""]
        if reference_name is not None and entry_name != reference_name:
            row, column = entry_index, ranked_names.index(reference_name)
            comparison_columns = [
                difference_text(
                    standings.paired_differences(entry_name, reference_name), board.measures[board.main_measure]
                ),
                f"{standings.pairwise_win_counts[row, column]}/{standings.pairwise_win_counts[column, row]}",
            ]
        text_lines.append(
            _standings_line(
                standings,
                entry_name,
                _edge_marked_name(standings, entry_name),
                f"{ranks[entry_index]:.1f}",
                comparison_columns,
            )
        )
    for entry_name in [entry_name for entry_name in board.entries if entry_name not in ranked_names]:
        is_partial = standings.restricted_to_cells_of(entry_name)
        if is_partial.cell_rows:
            label = f"*{escape_markdown(entry_name)}*, {len(is_partial.cell_rows)} of {len(standings.cell_rows)} cells"
            difference = difference_text(
                is_partial.paired_differences(entry_name, board.against), board.measures[board.main_measure]
            )
            text_lines.append(_standings_line(is_partial, entry_name, label, "–", [difference, ""]))
    return [*text_lines, "", *_edge_note(standings, ranked_names)]


def _edge_note(standings: Standings, names: Sequence[str]) -> list[str]:
    """Return the note that explains the edge mark and names its tracks; empty if no entry has the mark."""
    at_edges = [name for name in names if _tracks_tuned_at_edge(standings, name)]
    if not at_edges:
        return []
    text = f"The tuned rate is the lowest or highest of its grid ({_grid_edge_names_text(standings, at_edges)})"
    return [f"{GRID_EDGE_MARK} {text}: a rate beyond it may be better.", ""]


def _standings_line(standings: Standings, name: str, label: str, rank: str, comparison: Sequence[str]) -> str:
    """Return a line of the table; `comparison` holds the difference, and the wins and losses."""
    board = standings.board
    other_measures = [m for m in board.measures if m != board.main_measure]
    ms = standings.milliseconds_per_round(name)
    cells = [label, rank, _summary_text(standings, name, board.main_measure), *comparison]
    cells += [_summary_text(standings, name, measure) for measure in other_measures]
    cells += [_memory_text(standings, name), "–" if ms is None else f"{ms:.3g}"]
    return "| " + " | ".join(cells) + " |"


def _tracks_tuned_at_edge(standings: Standings, name: str) -> list[str]:
    """Return the tracks in which tuning chose an edge of the entry's grid."""
    return [track for track in standings.tracks if standings.tuned_rates.is_at_edge(track, name)]


def _edge_marked_name(standings: Standings, name: str) -> str:
    return escape_markdown(name) + (GRID_EDGE_MARK if _tracks_tuned_at_edge(standings, name) else "")


def _grid_edge_names_text(standings: Standings, names: Sequence[str]) -> str:
    """Return the names of the entries, with their edge tracks if the board has several tracks."""
    if len(standings.tracks) == 1:
        return ", ".join(map(escape_markdown, names))
    return "; ".join(f"{escape_markdown(name)}: {', '.join(_tracks_tuned_at_edge(standings, name))}" for name in names)


def findings_lines(standings: Standings) -> list[str]:
    """Return the board's questions, each followed by the sentences that answer it from the numbers."""
    board = standings.board
    if not board.findings:
        return []
    comparisons = sum(len(finding.comparisons) for finding in board.findings)
    text_lines = [
        "## What the numbers say",
        "",
        f"Each sentence is written from the rows of the cells that it names. Its p-value is corrected for the "
        f"{comparisons} comparisons of this page (Holm), and it is shown if that is below {SIGNIFICANCE_LEVEL:g}. "
        "Intervals "
        "are single 95 % intervals over seeds; they do not include what other tuning seeds would have changed. Single "
        "cells and other tracks are counted by their own intervals.",
        "",
    ]
    for number, (finding, results) in enumerate(zip(board.findings, finding_outcomes(standings), strict=True), 1):
        text_lines += [f"{number}. **{escape_markdown(finding.question)}**", ""]
        text_lines += [f"    - {outcome_sentence(standings, outcome, escape_markdown)}" for outcome in results]
        text_lines.append("")
    return text_lines


def _summary_text(standings: Standings, name: str, measure: str) -> str:
    """Return the mean over cells and seeds; for costs the median over runs that reached the target, and their share."""
    board_measure = standings.board.measures[measure]
    measure_values = np.concatenate([cells.rows[name].values_of(measure) for cells in standings.cell_rows])
    finite_values = measure_values[np.isfinite(measure_values)]
    if not len(finite_values):
        return "–"
    if board_measure.until is not None:
        share = len(finite_values) / (len(standings.board.seeds) * len(standings.cell_rows))
        return f"{_abbreviated_number_text(float(np.median(finite_values)))} ({100 * share:.0f} %)"
    text = f"{100 * finite_values.mean():.1f} %" if board_measure.is_percent else f"{finite_values.mean():.4g}"
    return (
        text if len(finite_values) == len(measure_values) else f"{text} ({len(finite_values)} of {len(measure_values)})"
    )


def _memory_text(standings: Standings, name: str) -> str:
    sizes = sorted(
        {cells.rows[name].remembered for cells in standings.cell_rows if cells.rows[name].status == DONE_STATUS}
    )
    return (
        "–"
        if not sizes or sizes[-1] == 0
        else " – ".join(_abbreviated_number_text(s) for s in dict.fromkeys((sizes[0], sizes[-1]))) + " B"
    )


def _abbreviated_number_text(value: float) -> str:
    """Format a number with a unit prefix: 950, 12 k, 3.4 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if value >= size:
            return f"{value / (1e3 if unit == ' k' else size):.3g}{unit}"
    return f"{value:.4g}"


def _provenance_text(standings: Standings) -> list[str]:
    """Return the section that lists the commands, commits and versions that made the rows."""
    rows = [row for cells in standings.cell_rows for row in cells.rows.values() if row.status != REFUSED_STATUS]
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
