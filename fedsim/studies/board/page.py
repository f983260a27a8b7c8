"""The pages of a board: README.md with its pictures, and a self-contained index.html with filters."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from scipy import stats

from fedsim.core.errors import ConfigError
from fedsim.core.files import nan_to_none, replacement_file
from fedsim.studies.board.board import Leaderboard
from fedsim.studies.board.markdown import standings_markdown
from fedsim.studies.board.rows import DONE_STATUS, CellRows
from fedsim.studies.board.sentences import finding_outcomes, outcome_sentence
from fedsim.studies.board.standings import Standings
from fedsim.studies.board.submission import add_submitted_entries
from fedsim.studies.plots import standings as plots
from fedsim.studies.plots.style import save_small_png
from fedsim.studies.results.friedman import rank_scores

PAGE_TEMPLATE = Path(__file__).with_name("page.html.jinja")

log = logging.getLogger(__name__)


def write_pages(board: Leaderboard, folder: Path) -> list[Path]:
    """Write README.md, index.html and the pictures into the results folder, and return their paths.

    Raises:
        ConfigError: there are no results, or a row cannot be compared with the other rows of its cell.
    """
    standings = Standings.read_folder(add_submitted_entries(folder, board), folder)
    if not standings.cell_rows:
        raise ConfigError(f"board {board.name} has no rows yet in {folder}; run fedsim-leaderboard {board.name}")
    if not any(board.against in cells.rows for cells in standings.cell_rows):
        log.warning(
            "%s has no rows of %s, with which the board compares the others; copy the committed results there first",
            *(folder, board.against),
        )
    picture_names = save_figures(standings, folder)
    page_texts = {
        "README.md": standings_markdown(standings, [path.name for path in picture_names]),
        "index.html": page_html(standings),
    }
    for name, text in page_texts.items():
        with replacement_file(folder / name) as file:
            file.write(text)
    return [*(folder / name for name in page_texts), *picture_names]


def save_figures(standings: Standings, folder: Path) -> list[Path]:
    """Draw critical differences, wins and a heat map over the cells, and return the paths of the pictures.

    The heat map shows differences to the reference entry in percentage points if the board's main measure is a
    fraction, else ranks.
    """
    if standings.friedman_test is None:
        return []
    board, ranked_names = standings.board, standings.ranked_entries
    drawn_figures = {
        "critical_differences": plots.critical_difference_diagram(
            ranked_names,
            standings.friedman_test.mean_ranks,
            standings.critical_difference,
            standings.indistinguishable_groups(),
        ),
        "wins": plots.wins_heatmap(ranked_names, standings.pairwise_win_counts, len(standings.cell_rows)),
    }
    column_labels = [" ".join(label for _, label in cells.cell.axis_labels) for cells in standings.cell_rows]
    track_blocks = [
        (track, len(list(group))) for track, group in itertools.groupby(c.cell.track for c in standings.cell_rows)
    ]
    entry_scores = standings.scores()
    if not board.measures[board.main_measure].is_percent:  # of another size in every track
        drawn_figures["cells"] = plots.rank_heatmap(
            ranked_names,
            column_labels,
            np.where(np.isfinite(entry_scores), rank_scores(entry_scores), np.nan).T,
            track_blocks,
        )
    elif board.against in ranked_names:
        reference_scores = entry_scores[:, [ranked_names.index(board.against)]]
        finite_mask = np.isfinite(entry_scores) & np.isfinite(reference_scores)
        with np.errstate(invalid="ignore"):
            score_differences = np.where(finite_mask, entry_scores - reference_scores, np.nan).T
        bar_label = f"{board.main_measure} beyond that of {board.against}, percentage points"
        drawn_figures["cells"] = plots.difference_heatmap(
            ranked_names, column_labels, 100 * score_differences, bar_label, track_blocks
        )
    paths = []
    for name, figure in drawn_figures.items():
        with replacement_file(folder / f"{name}.png", "wb") as file:
            save_small_png(figure, file, dpi=120)
        paths.append(folder / f"{name}.png")
    return paths


def page_html(standings: Standings) -> str:
    """Return the HTML page with filters."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(PAGE_TEMPLATE.read_text(encoding="utf-8"))
    json_payload = json.dumps(nan_to_none(page_data(standings)), separators=(",", ":"), ensure_ascii=False)
    return template.render(
        title=standings.board.title,
        about=standings.board.about,
        findings=[
            (finding.question, [outcome_sentence(standings, outcome) for outcome in results])
            for finding, results in zip(standings.board.findings, finding_outcomes(standings), strict=True)
        ],
        data=Markup(json_payload.replace("<", "\\u003c")),
    )


def page_data(standings: Standings) -> dict[str, Any]:
    """Return all numbers of the board, for the page's JavaScript."""
    board = standings.board
    return {
        "title": board.title,
        "seeds": len(board.seeds),
        "t": float(stats.t.ppf(0.975, len(board.seeds) - 1)) if len(board.seeds) > 1 else 0.0,
        "measures": [
            {"name": name, "about": m.about or m.metric, "more": m.higher_is_better, "percent": m.is_percent}
            for name, m in board.measures.items()
        ],
        "against": board.against,
        "tracks": {name: board.tracks[name].about for name in standings.tracks},
        "times": {
            track: {name: standings.round_times.milliseconds_per_round(track, name) for name in board.entries}
            for track in standings.tracks
        },
        "axes": {
            axis: [
                label for label in labels if any(dict(c.cell.axis_labels)[axis] == label for c in standings.cell_rows)
            ]
            for axis, labels in board.axes.items()
        },
        "entries": {name: {"about": e.about, "remembers": e.remembers} for name, e in board.entries.items()},
        "cells": [_cell_data(cells) for cells in standings.cell_rows],
        "versions": [" ".join(text) for text in dict.fromkeys(_package_versions_per_row(standings))],
    }


def _cell_data(cells: CellRows) -> dict[str, Any]:
    return {
        "track": cells.cell.track,
        "at": dict(cells.cell.axis_labels),
        "rows": {
            name: {
                "status": row.status,
                "message": row.message,
                "remembered": row.remembered,
                "overrides": row.overrides,
                "numbers": row.numbers,
            }
            for name, row in cells.rows.items()
        },
    }


def _package_versions_per_row(standings: Standings) -> list[tuple[str, ...]]:
    """Return the package versions that made each finished row."""
    rows = [row for cells in standings.cell_rows for row in cells.rows.values() if row.status == DONE_STATUS]
    return [tuple(f"{k} {v}" for k, v in (row.made.get("versions") or {}).items()) for row in rows]
