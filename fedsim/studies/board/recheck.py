"""Recompute a cell and compare it with the committed results."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.studies.board.board import Board, Cell
from fedsim.studies.board.digests import check_digests
from fedsim.studies.board.rows import DONE, Rates, read
from fedsim.studies.board.tasks import FillCell

RECHECK_TOLERANCE = 1e-6  # largest relative difference of a number


def recheck(board: Board, cell: Cell, entries: list[str], folder: Path, scratch: Path) -> float:
    """Return the largest relative difference between the cell's stored rows and the same rows recomputed.

    Args:
        board: the board that the cell belongs to.
        cell: the cell that is recomputed.
        entries: names of the entries whose rows are recomputed; entries without a stored row are left out.
        folder: folder of the stored results.
        scratch: an empty folder.

    Raises:
        ConfigError: the cell has no such row, or a row differs from the recomputed one in its data, splits, traces,
            initial models, batches, status or missing values.
    """
    old_cells = read(folder, cell, board)
    names = [name for name in entries if name in old_cells.rows]
    if not names:
        raise ConfigError(f"{cell.name} has no row yet that could be made again")
    rates = Rates.read(folder).by_track[cell.track]
    FillCell(board, names, scratch / "runs", scratch / "results", {}, cell, rates)()
    new_cells = read(scratch / "results", cell, board)
    worst = 0.0
    for name in names:
        old, new = old_cells.rows[name], new_cells.rows[name]
        check_digests(f"{name} in {cell.name}", old.digests, new.digests, board.compared)
        if old.status != new.status:
            raise ConfigError(f"{name} in {cell.name} is {old.status} on disk, and {new.status} now: {new.message}")
        for measure in board.measures if old.status == DONE else ():
            a, b = old.of(measure), new.of(measure)
            if len(a) != len(b) or (np.isfinite(a) != np.isfinite(b)).any():
                raise ConfigError(f"{name} in {cell.name}: {measure} is {list(a)} on disk, and {list(b)} now")
            finite_mask = np.isfinite(a)
            if finite_mask.any():
                worst = max(
                    worst, float((np.abs(a - b)[finite_mask] / np.maximum(np.abs(a[finite_mask]), 1e-12)).max())
                )
    return worst
