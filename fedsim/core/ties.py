"""Ranks of clients in which neither rounding nor a client's number decides between equals.

The same value comes out with other last bits from another executor, device or chunk. Values that are equal up to these
are ordered by random numbers, which are keyed by seed, round and client.
"""

from __future__ import annotations

import numpy as np
import torch

from fedsim.core import rng

ROUNDING_TOLERANCE_STEPS = 128  # of a mantissa's steps: how far values are apart that rounding may have made different
MAX_TIE_STEPS = 64  # times that: how far values can be apart that are connected by others between them


def tie_breakers(seed: int, clients: np.ndarray, t: int) -> np.ndarray:
    """[k] int64 random numbers, a function of seed, client and round: the smaller goes first."""
    return rng.row_keys_host(np.full(len(clients), seed, dtype=np.int64), rng.Purpose.TIE, clients, t)


def relative_tolerance(dtype: torch.dtype) -> float:
    """How far apart, relative to the values, equal values may be; 0 for whole numbers."""
    return ROUNDING_TOLERANCE_STEPS * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def tie_slack(value: float, values: np.ndarray, relative: float) -> float:
    """How far from this one of the values an equal one may be: rounding also comes from what cancels in a small one."""
    largest_magnitude = np.abs(values[np.isfinite(values)]).max(initial=0.0)
    return float(max(relative * abs(value), relative / 32 * largest_magnitude))


def largest_positions(values: np.ndarray, k: int, breakers: np.ndarray, relative: float) -> np.ndarray:
    """Positions of the k largest values; NaN counts as the smallest.

    Those that are tied with the k-th largest are admitted by their breakers. Values are tied with it if steps of
    at most the `slack` lead to it from one to the next, the first of them at most `MAX_TIE_STEPS` steps away.
    """
    values = np.where(np.isnan(values), -np.inf, values)
    order = np.lexsort((breakers, -values))
    if not 0 < k < len(values):
        return order[: max(k, 0)]
    ordered = values[order]
    first, last = _tied_range(ordered, k - 1, relative)
    tied_positions = order[first:last]
    return np.concatenate(
        [order[:first], tied_positions[np.argsort(breakers[tied_positions], kind="stable")][: k - first]]
    )


def _tied_range(ordered: np.ndarray, rank: int, relative: float) -> tuple[int, int]:
    """The range of places that are tied with this one, in descending values."""
    value = ordered[rank]
    if not np.isfinite(value):
        return int((ordered > value).sum()), int((ordered >= value).sum())
    step = tie_slack(value, ordered, relative)
    first, last = rank, rank + 1
    while first and ordered[first - 1] - ordered[first] <= step and ordered[first - 1] - value <= MAX_TIE_STEPS * step:
        first -= 1
    while (
        last < len(ordered)
        and ordered[last - 1] - ordered[last] <= step
        and value - ordered[last] <= MAX_TIE_STEPS * step
    ):
        last += 1
    return first, last
