"""`fedsim-leaderboard BOARD`: compute the missing rows of a board, recompute a cell, write the pages."""

from __future__ import annotations

import argparse
import fnmatch
import logging
import random
import shlex
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.core.speaking import tolerate_broken_pipes
from fedsim.run.tracking.environment import environment_facts
from fedsim.studies.board import submission
from fedsim.studies.board.board import BoardCell, Leaderboard, leaderboard_names, load_leaderboard, results_folder
from fedsim.studies.board.costs import AlgorithmRoundTimes
from fedsim.studies.board.page import write_pages
from fedsim.studies.board.recheck import RECHECK_TOLERANCE, max_difference_from_rerun
from fedsim.studies.board.rows import TunedRates, read_cell_rows, write_cell_rows
from fedsim.studies.board.runner import compute_missing_rows
from fedsim.studies.reproduce.runner import job_command_context, num_concurrent_jobs

VERSIONED_PACKAGES = ("fedsim-torch", "torch", "numpy")


@tolerate_broken_pipes()
def main(arguments: list[str] | None = None) -> None:
    """Entry point of `fedsim-leaderboard`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    with job_command_context("fedsim-leaderboard", logging.WARNING):
        logging.getLogger("fedsim.app.job_progress").setLevel(logging.INFO)
        if options.list:
            print(leaderboards_text(options.boards))
            return
        if not options.board:
            parser.error("name a board; --list shows them")
        for name in options.board:
            _run_board(load_leaderboard(name, options.boards), options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fedsim-leaderboard",
        description="Compare algorithms in many environments, with the same traces, partitions, models and batches.",
        epilog="Tuned rates and existing rows are not computed again; repeating a killed command continues it.",
    )
    parser.add_argument("board", nargs="*", metavar="BOARD", help="one or several boards")
    parser.add_argument("--list", action="store_true", help="list all boards, their tracks and entries")
    parser.add_argument(
        "--cell",
        action="append",
        default=[],
        metavar="GLOB",
        help="only these cells, such as 'digits-*/sine/*'; may be repeated",
    )
    parser.add_argument("--only", action="append", default=[], metavar="ENTRY", help="only this entry; may be repeated")
    parser.add_argument(
        "--entry", type=Path, metavar="FILE", help="compute the rows of your own algorithm (.py, .yaml)"
    )
    parser.add_argument(
        "--forget",
        action="append",
        default=[],
        metavar="ENTRY",
        help="first delete the rates and rows of this entry; may be repeated",
    )
    parser.add_argument("--check", action="store_true", help="recompute one random cell and compare")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=RECHECK_TOLERANCE,
        help="relative tolerance of --check (default: %(default)g)",
    )
    parser.add_argument(
        "--page", action="store_true", help="write the pages from existing rows, without computing new ones"
    )
    parser.add_argument("--jobs", default="auto", help="number of processes (default: one per core)")
    parser.add_argument(
        "--results", type=Path, default=None, help="folder of the results (default: that of the committed results)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("leaderboard"), help="folder for unfinished runs (default: leaderboard)"
    )
    parser.add_argument("--boards", type=Path, default=None, help="folder with your own boards")
    return parser


def leaderboards_text(folder: Path | None = None) -> str:
    """List the boards with their tracks, numbers of cells and entries."""
    report_lines = []
    for name in leaderboard_names(folder):
        board = load_leaderboard(name, folder)
        report_lines.append(f"{name}: {board.about}")
        report_lines += [
            f"  {track}: {len(board.cells(track))} cells; {track_description.about}"
            for track, track_description in board.tracks.items()
        ]
        report_lines.append(f"  {len(board.entries)} entries: {'; '.join(board.entries)}")
    return "\n".join(report_lines)


def _run_board(board: Leaderboard, options: argparse.Namespace) -> None:
    """Carry out the command's options for one board."""
    folder = (options.results or results_folder()) / board.name
    for entry_name in options.forget:
        delete_board_entry(board, folder, entry_name)
    submitted_names: list[str] = []
    if options.entry is not None:
        entries, digest = submission.read_submission(options.entry)
        submission.add_board_entries(folder, board, entries, digest)
        submitted_names = list(entries)
    submission.add_submitted_entries(folder, board)
    for entry_name in options.only:
        checks.check_choice("--only", entry_name, board.entries)
    entries_wanted = options.only or submitted_names or list(board.entries)
    cells = chosen_cells(board, options.cell)
    if options.check:
        _recheck_random_cell(board, cells, entries_wanted, folder, options.tolerance)
    elif options.page:
        print(f"written: {', '.join(str(path) for path in write_pages(board, folder))}")
    else:
        torch.set_num_threads(1)
        jobs = num_concurrent_jobs(options.jobs, "cpu", len(cells))
        compute_missing_rows(board, cells, entries_wanted, folder, options.out / board.name, jobs, _provenance_of_run())


def chosen_cells(board: Leaderboard, cell_globs: list[str]) -> list[BoardCell]:
    """Return the cells whose names match one of the patterns; all cells if there are no patterns.

    Raises:
        ConfigError: a pattern matches no cell.
    """
    cells = board.cells()
    for pattern in cell_globs:
        if not any(fnmatch.fnmatch(cell.name, pattern) for cell in cells):
            examples = ", ".join(cell.name for cell in cells[:3])
            raise ConfigError(f"--cell {pattern} matches none of the {len(cells)} cells; they are called {examples}, …")
    return [c for c in cells if not cell_globs or any(fnmatch.fnmatch(c.name, pattern) for pattern in cell_globs)]


def delete_board_entry(board: Leaderboard, folder: Path, entry_name: str) -> None:
    """Delete the rates, times, rows and submission of an entry."""
    for store in (TunedRates.read(folder), AlgorithmRoundTimes.read(folder)):
        store.remove_entry(entry_name)
        store.write(folder)
    for cell in board.cells():
        cells = read_cell_rows(folder, cell, board)
        if cells.rows.pop(entry_name, None) is not None:
            write_cell_rows(folder, cells, board)
    submission.delete_submission(folder, entry_name)


def _recheck_random_cell(
    board: Leaderboard, cells: list[BoardCell], entry_names: list[str], folder: Path, tolerance: float
) -> None:
    """Recompute a random one of the cells that have rows, and compare."""
    candidates = [cell for cell in cells if set(read_cell_rows(folder, cell, board).rows) & set(entry_names)]
    if not candidates:
        raise ConfigError("no cell has a row yet that could be computed again")
    cell = random.choice(candidates)
    print(f"{cell.name}: computing its rows again")
    with tempfile.TemporaryDirectory() as scratch:
        max_difference = max_difference_from_rerun(board, cell, entry_names, folder, Path(scratch))
    message = f"{cell.name}: numbers differ by at most {max_difference:.2g} of themselves"
    if max_difference > tolerance:
        raise ConfigError(f"{message}, more than --tolerance {tolerance:g}")
    print(f"{message}; data, splits, traces, initial models and batches are the same")


def _provenance_of_run() -> dict[str, Any]:
    """Return the provenance that rows record: command, commit, date and versions."""
    provenance = environment_facts(torch.device("cpu"))
    versions = {name: provenance["versions"][name] for name in VERSIONED_PACKAGES}
    date = datetime.now(timezone.utc).date().isoformat()
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"command": command, "commit": provenance["commit"], "date": date, "versions": versions}
