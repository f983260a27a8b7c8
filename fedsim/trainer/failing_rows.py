"""Rows whose local steps raise an error because a numerical routine refuses their numbers: they end as NaN, and the
other rows of their chunk as they would without failing rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedsim.core.numerical import is_numerical_error
from fedsim.local.rule import Carry

RowRunner = Callable[[np.ndarray], "tuple[Carry, Tensor]"]


def run_without_failing_rows(
    run_rows: RowRunner, rows: np.ndarray, diverged_mask: np.ndarray
) -> tuple[Carry, Tensor] | None:
    """Return the results of `run_rows` for these rows, of which some raise an error.

    A row that fails is computed as its neighbour, so that the chunk keeps its size, and the numbers of the other rows
    do not depend on how many fail.

    Args:
        run_rows: takes positions, each of which may be there several times, through their local steps.
        rows: the positions of the chunk [c].
        diverged_mask: [c] bool: rows that began with numbers that are not finite.

    Returns:
        Carry [c, …] and losses [c], NaN where the row failed; None where all of them do.
    """
    failing_mask = diverged_mask.copy()
    if failing_mask.any() and not failing_mask.all():
        result = _try_rows(run_rows, _replace_failing_positions(rows, failing_mask))
        if result is not None:
            return _set_failed_rows_nan(*result, failing_mask)
    failing_mask[_failing_positions(run_rows, rows, np.flatnonzero(~failing_mask))] = True
    result = None if failing_mask.all() else _try_rows(run_rows, _replace_failing_positions(rows, failing_mask))
    return None if result is None else _set_failed_rows_nan(*result, failing_mask)


def _try_rows(run: RowRunner, rows: np.ndarray) -> tuple[Carry, Tensor] | None:
    """Return the results; None if a numerical routine refuses some row."""
    try:
        return run(rows)
    except Exception as error:
        if not is_numerical_error(error):
            raise
        return None


def _failing_positions(run_rows: RowRunner, rows: np.ndarray, row_positions: np.ndarray) -> list[int]:
    """Return which of these positions fail, by bisection."""
    if not len(row_positions) or _try_rows(run_rows, rows[row_positions]) is not None:
        return []
    if len(row_positions) == 1:
        return [int(row_positions[0])]
    half_count = len(row_positions) // 2
    return _failing_positions(run_rows, rows, row_positions[:half_count]) + _failing_positions(
        run_rows, rows, row_positions[half_count:]
    )


def _replace_failing_positions(rows: np.ndarray, failing_mask: np.ndarray) -> np.ndarray:
    """Replace each failing position by the nearest one that does not fail, which keeps the order by steps."""
    good_positions = np.flatnonzero(~failing_mask)
    next_good_index = np.searchsorted(good_positions, np.arange(len(rows))).clip(max=len(good_positions) - 1)
    replaced_rows: np.ndarray = rows[good_positions[next_good_index]]
    return replaced_rows


def _set_failed_rows_nan(carry: Carry, losses: Tensor, failing_mask: np.ndarray) -> tuple[Carry, Tensor]:
    """Set the failed rows to NaN."""
    failed_mask = torch.as_tensor(failing_mask, device=losses.device)
    marked_carry = {name: fill_failed_rows_with_nan(failed_mask, value) for name, value in carry.items()}
    return marked_carry, fill_failed_rows_with_nan(failed_mask, losses)


def fill_failed_rows_with_nan(failed_mask: Tensor, values: Tensor) -> Tensor:
    """Return [c, …] with NaN in the bad rows [c]; integers are unchanged."""
    if not values.is_floating_point():
        return values
    return torch.where(failed_mask.reshape(-1, *[1] * (values.dim() - 1)), math.nan, values)
