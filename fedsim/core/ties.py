"""Ranks of clients in which equal values are ordered neither by rounding nor by client number.

The same value comes out with other last bits from another executor, device or chunk. Values that are equal up to these
are ordered by random numbers, which are keyed by seed, round and client.
"""

from __future__ import annotations

import numpy as np
import torch

from fedsim.core import rng

ROUNDING_TOLERANCE_STEPS = 128  # units in the last place by which rounding may separate equal values
MAX_TIE_STEPS = 64  # times that: the largest distance of values that are connected by others between them


def tie_breakers(seed: int, clients: np.ndarray, t: int) -> np.ndarray:
    """Return [k] int64 random numbers, a function of seed, client and round; of equal values the one with the
    smaller number comes first."""
    return rng.row_keys_host(np.full(len(clients), seed, dtype=np.int64), rng.Purpose.TIE, clients, t)


def relative_tolerance(dtype: torch.dtype) -> float:
    """Return how far apart, relative to the values, equal values may be; 0 for integers."""
    return ROUNDING_TOLERANCE_STEPS * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def tie_slack(value: float, values: np.ndarray, relative: float) -> float:
    """Return how far from this value an equal one may be; rounding errors of cancelled terms count."""
    largest_magnitude = np.abs(values[np.isfinite(values)]).max(initial=0.0)
    return float(max(relative * abs(value), relative / 32 * largest_magnitude))


def largest_positions(scores: np.ndarray, k: int, breakers: np.ndarray, tolerance: float) -> np.ndarray:
    """Return the positions of the k largest values; NaN counts as the smallest.

    Those that are tied with the k-th largest are admitted by their breakers. Values are tied with it if steps of
    at most the `slack` lead to it from one to the next, the first of them at most `MAX_TIE_STEPS` steps away.
    """
    scores = np.where(np.isnan(scores), -np.inf, scores)
    sorted_positions = np.lexsort((breakers, -scores))
    if not 0 < k < len(scores):
        return sorted_positions[: max(k, 0)]
    ordered = scores[sorted_positions]
    first, end = _tied_range(ordered, k - 1, tolerance)
    tied_positions = sorted_positions[first:end]
    return np.concatenate(
        [sorted_positions[:first], tied_positions[np.argsort(breakers[tied_positions], kind="stable")][: k - first]]
    )


def _tied_range(sorted_scores: np.ndarray, rank: int, relative: float) -> tuple[int, int]:
    """Return the range of places that are tied with this one, in descending values."""
    rank_score = sorted_scores[rank]
    if not np.isfinite(rank_score):
        return int((sorted_scores > rank_score).sum()), int((sorted_scores >= rank_score).sum())
    step = tie_slack(rank_score, sorted_scores, relative)
    first_tied, tied_end = rank, rank + 1
    while (
        first_tied
        and sorted_scores[first_tied - 1] - sorted_scores[first_tied] <= step
        and sorted_scores[first_tied - 1] - rank_score <= MAX_TIE_STEPS * step
    ):
        first_tied -= 1
    while (
        tied_end < len(sorted_scores)
        and sorted_scores[tied_end - 1] - sorted_scores[tied_end] <= step
        and rank_score - sorted_scores[tied_end] <= MAX_TIE_STEPS * step
    ):
        tied_end += 1
    return first_tied, tied_end
