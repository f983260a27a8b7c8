"""Recompute a cell and compare it with the committed results."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.studies.board.board import BoardCell, Leaderboard
from fedsim.studies.board.digests import check_matching_digests
from fedsim.studies.board.rows import DONE_STATUS, TunedRates, read_cell_rows
from fedsim.studies.board.tasks import FillCellTask

RECHECK_TOLERANCE = 1e-6  # largest relative difference of a number


def max_difference_from_rerun(
    board: Leaderboard, cell: BoardCell, entry_names: list[str], folder: Path, scratch_folder: Path
) -> float:
    """Return the largest relative difference between the cell's stored rows and the same rows recomputed.

    Args:
        board: the board that the cell belongs to.
        cell: the cell that is recomputed.
        entry_names: names of the entries whose rows are recomputed; entries without a stored row are left out.
        folder: folder of the stored results.
        scratch_folder: an empty folder.

    Raises:
        ConfigError: the cell has no such row, or a row differs from the recomputed one in its data, splits, traces,
            initial models, batches, status or missing values.
    """
    old_cells = read_cell_rows(folder, cell, board)
    compared_names = [entry_name for entry_name in entry_names if entry_name in old_cells.rows]
    if not compared_names:
        raise ConfigError(f"{cell.name} has no row yet that could be computed again")
    rates = TunedRates.read(folder).by_track[cell.track]
    FillCellTask(board, compared_names, scratch_folder / "runs", scratch_folder / "results", {}, cell, rates)()
    new_cells = read_cell_rows(scratch_folder / "results", cell, board)
    max_difference = 0.0
    for entry_name in compared_names:
        stored_row, new_row = old_cells.rows[entry_name], new_cells.rows[entry_name]
        check_matching_digests(f"{entry_name} in {cell.name}", stored_row.digests, new_row.digests, board.compared)
        if stored_row.status != new_row.status:
            raise ConfigError(
                f"{entry_name} in {cell.name} is {stored_row.status} on disk, and {new_row.status} now: "
                f"{new_row.message}"
            )
        for measure in board.measures if stored_row.status == DONE_STATUS else ():
            a, b = stored_row.values_of(measure), new_row.values_of(measure)
            if len(a) != len(b) or (np.isfinite(a) != np.isfinite(b)).any():
                raise ConfigError(f"{entry_name} in {cell.name}: {measure} is {list(a)} on disk, and {list(b)} now")
            finite_mask = np.isfinite(a)
            if finite_mask.any():
                max_difference = max(
                    max_difference,
                    float((np.abs(a - b)[finite_mask] / np.maximum(np.abs(a[finite_mask]), 1e-12)).max()),
                )
    return max_difference
