"""Rows whose local steps raise, since a numerical routine refuses their numbers: they end as NaN, and the others of
their chunk as they would have beside rows that do not fail."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedsim.core.numerical import is_numerical
from fedsim.local.rule import Carry

RowRunner = Callable[[np.ndarray], "tuple[Carry, Tensor]"]


def run_without_failing(run: RowRunner, rows: np.ndarray, diverged: np.ndarray) -> tuple[Carry, Tensor] | None:
    """What `run` gives for these rows, where it raises for some of them.

    A row that fails is computed as its neighbour, so that the chunk keeps its size, and the numbers of the other rows
    do not depend on how many fail.

    Args:
        run: takes positions, each of which may be there several times, through their local steps.
        rows: the positions of the chunk [c].
        diverged: [c] bool: rows that began with numbers that are not finite.

    Returns:
        Carry [c, …] and losses [c], NaN where the row failed; None where all of them do.
    """
    failing = diverged.copy()
    if failing.any() and not failing.all():
        result = _try_rows(run, _replace_failing_rows(rows, failing))
        if result is not None:
            return _mark_failed_rows(*result, failing)
    failing[_failing_positions(run, rows, np.flatnonzero(~failing))] = True
    result = None if failing.all() else _try_rows(run, _replace_failing_rows(rows, failing))
    return None if result is None else _mark_failed_rows(*result, failing)


def _try_rows(run: RowRunner, rows: np.ndarray) -> tuple[Carry, Tensor] | None:
    """None where a numerical routine refuses some row."""
    try:
        return run(rows)
    except Exception as error:
        if not is_numerical(error):
            raise
        return None


def _failing_positions(run: RowRunner, rows: np.ndarray, positions: np.ndarray) -> list[int]:
    """Which of these positions fail, by halves."""
    if not len(positions) or _try_rows(run, rows[positions]) is not None:
        return []
    if len(positions) == 1:
        return [int(positions[0])]
    half_count = len(positions) // 2
    return _failing_positions(run, rows, positions[:half_count]) + _failing_positions(run, rows, positions[half_count:])


def _replace_failing_rows(rows: np.ndarray, failing: np.ndarray) -> np.ndarray:
    """Positions with the nearest one that does not fail instead of each that does: the order by steps is kept."""
    good_positions = np.flatnonzero(~failing)
    after = np.searchsorted(good_positions, np.arange(len(rows))).clip(max=len(good_positions) - 1)
    replaced_rows: np.ndarray = rows[good_positions[after]]
    return replaced_rows


def _mark_failed_rows(carry: Carry, losses: Tensor, failing: np.ndarray) -> tuple[Carry, Tensor]:
    """NaN where a row failed."""
    failed_mask = torch.as_tensor(failing, device=losses.device)
    marked_carry = {name: nan_where(failed_mask, value) for name, value in carry.items()}
    return marked_carry, nan_where(failed_mask, losses)


def nan_where(failed_mask: Tensor, values: Tensor) -> Tensor:
    """[c, …] with NaN in the rows that are bad [c]; whole numbers stay."""
    if not values.is_floating_point():
        return values
    return torch.where(failed_mask.reshape(-1, *[1] * (values.dim() - 1)), math.nan, values)
