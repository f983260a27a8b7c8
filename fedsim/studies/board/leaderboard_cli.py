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
from fedsim.run.tracking.environment import environment
from fedsim.studies.board import submission
from fedsim.studies.board.board import Board, Cell, board_names, load_board, results_folder
from fedsim.studies.board.costs import RoundTimes
from fedsim.studies.board.page import write_pages
from fedsim.studies.board.recheck import RECHECK_TOLERANCE, recheck
from fedsim.studies.board.rows import Rates, read, write
from fedsim.studies.board.runner import compute_rows
from fedsim.studies.reproduce.runner import jobs_at_once, resumable_command

VERSIONED_PACKAGES = ("fedsim-torch", "torch", "numpy")


@tolerate_broken_pipes()
def main(arguments: list[str] | None = None) -> None:
    """Entry point of `fedsim-leaderboard`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    with resumable_command("fedsim-leaderboard", logging.WARNING):
        logging.getLogger("fedsim.app.job_progress").setLevel(logging.INFO)
        if options.list:
            print(boards_text(options.boards))
            return
        if not options.board:
            parser.error("name a board; --list shows them")
        for name in options.board:
            _board(load_board(name, options.boards), options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fedsim-leaderboard",
        description="Many algorithms under many settings, on the same traces, splits, initial models and batches.",
        epilog="Rates that are tuned and rows that are there are not computed again; a killed command goes on.",
    )
    parser.add_argument("board", nargs="*", metavar="BOARD", help="one or several boards")
    parser.add_argument("--list", action="store_true", help="name all boards, their tracks and entries")
    parser.add_argument(
        "--cell", action="append", default=[], metavar="GLOB", help="only these, such as 'digits-*/sine/*'"
    )
    parser.add_argument("--only", action="append", default=[], metavar="ENTRY", help="only this entry; may be repeated")
    parser.add_argument("--entry", type=Path, metavar="FILE", help="an algorithm of your own (.py, .yaml): its rows")
    parser.add_argument(
        "--forget", action="append", default=[], metavar="ENTRY", help="delete its rates and rows first"
    )
    parser.add_argument("--check", action="store_true", help="make one cell again, a random one, and compare")
    parser.add_argument(
        "--tolerance", type=float, default=RECHECK_TOLERANCE, help="of --check, relative (default: %(default)g)"
    )
    parser.add_argument("--page", action="store_true", help="write the pages of what is there; computes nothing")
    parser.add_argument("--jobs", default="auto", help="processes (default: one per core)")
    parser.add_argument("--results", type=Path, default=None, help="folder (default: that of the committed results)")
    parser.add_argument("--out", type=Path, default=Path("leaderboard"), help="runs under way (default: leaderboard)")
    parser.add_argument("--boards", type=Path, default=None, help="folder of boards of your own")
    return parser


def boards_text(folder: Path | None = None) -> str:
    """List the boards with their tracks, numbers of cells and entries."""
    lines = []
    for name in board_names(folder):
        board = load_board(name, folder)
        lines.append(f"{name}: {board.about}")
        lines += [
            f"  {track}: {len(board.cells(track))} cells; {track_description.about}"
            for track, track_description in board.tracks.items()
        ]
        lines.append(f"  {len(board.entries)} entries: {'; '.join(board.entries)}")
    return "\n".join(lines)


def _board(board: Board, options: argparse.Namespace) -> None:
    """Carry out the command's options for one board."""
    folder = (options.results or results_folder()) / board.name
    for name in options.forget:
        delete_entry(board, folder, name)
    submitted_names: list[str] = []
    if options.entry is not None:
        entries, digest = submission.submitted_entries(options.entry)
        submission.add_entries(folder, board, entries, digest)
        submitted_names = list(entries)
    submission.with_submitted(folder, board)
    for name in options.only:
        checks.choice("--only", name, board.entries)
    entries_wanted = options.only or submitted_names or list(board.entries)
    cells = chosen_cells(board, options.cell)
    if options.check:
        _check(board, cells, entries_wanted, folder, options.tolerance)
    elif options.page:
        print(f"written: {', '.join(str(path) for path in write_pages(board, folder))}")
    else:
        torch.set_num_threads(1)
        jobs = jobs_at_once(options.jobs, "cpu", len(cells))
        compute_rows(board, cells, entries_wanted, folder, options.out / board.name, jobs, _provenance_of_run())


def chosen_cells(board: Board, globs: list[str]) -> list[Cell]:
    """Return the cells whose names match one of the patterns; all cells if there are no patterns.

    Raises:
        ConfigError: a pattern matches no cell.
    """
    cells = board.cells()
    for pattern in globs:
        if not any(fnmatch.fnmatch(cell.name, pattern) for cell in cells):
            examples = ", ".join(cell.name for cell in cells[:3])
            raise ConfigError(f"--cell {pattern} matches none of the {len(cells)} cells; they are called {examples}, …")
    return [c for c in cells if not globs or any(fnmatch.fnmatch(c.name, pattern) for pattern in globs)]


def delete_entry(board: Board, folder: Path, name: str) -> None:
    """Delete the rates, times, rows and submission of an entry."""
    for store in (Rates.read(folder), RoundTimes.read(folder)):
        store.forget(name)
        store.write(folder)
    for cell in board.cells():
        cells = read(folder, cell, board)
        if cells.rows.pop(name, None) is not None:
            write(folder, cells, board)
    submission.delete_submission(folder, name)


def _check(board: Board, cells: list[Cell], entries: list[str], folder: Path, tolerance: float) -> None:
    """Recompute a random one of the cells that have rows, and compare."""
    candidates = [cell for cell in cells if set(read(folder, cell, board).rows) & set(entries)]
    if not candidates:
        raise ConfigError("no cell has a row yet that could be made again")
    cell = random.choice(candidates)
    print(f"{cell.name}: making its rows again")
    with tempfile.TemporaryDirectory() as scratch:
        worst = recheck(board, cell, entries, folder, Path(scratch))
    message = f"{cell.name}: numbers differ by at most {worst:.2g} of themselves"
    if worst > tolerance:
        raise ConfigError(f"{message}, more than --tolerance {tolerance:g}")
    print(f"{message}; data, splits, traces, initial models and batches are the same")


def _provenance_of_run() -> dict[str, Any]:
    """Return the provenance that rows record: command, commit, date and versions."""
    provenance = environment(torch.device("cpu"))
    versions = {name: provenance["versions"][name] for name in VERSIONED_PACKAGES}
    date = datetime.now(timezone.utc).date().isoformat()
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"command": command, "commit": provenance["commit"], "date": date, "versions": versions}
