"""When a metric reached a value, and what it took until then."""

from __future__ import annotations

import math

import numpy as np

from fedsim.results.runs import Run

TOLERANCE = 1e-9  # 0.7 is reached by 0.7 however it was computed
# What a target cost: name → columns that are summed.
COSTS = {
    "rounds": ("round",),
    "bytes": ("total_bytes_down", "total_bytes_up"),
    "virtual seconds": ("virtual_seconds",),
}


def reached(values: np.ndarray, target: float, above: bool) -> np.ndarray:
    """Which of the values [E, …] are at the target or on its better side."""
    return np.asarray(values >= target - TOLERANCE if above else values <= target + TOLERANCE)


def first_reached(values: np.ndarray, target: float, above: bool) -> np.ndarray:
    """[R] the first evaluation of values [E, R] that is there; −1 where none is."""
    reached_mask = reached(values, target, above)
    return np.where(reached_mask.any(0), reached_mask.argmax(0), -1)


def cost(run: Run, metric: str, target: float, columns: tuple[str, ...]) -> np.ndarray:
    """[R] the sum of these columns at the first evaluation at which the metric was there; NaN where it never was."""
    at = first_reached(run.curve(metric)[1], target, run.rises(metric))
    spent = np.sum([run.curve(name)[1] if name != "round" else _rounds(run, metric) for name in columns], axis=0)
    return np.array([spent[e, r] if e >= 0 else math.nan for r, e in enumerate(at)], dtype=float)


def _rounds(run: Run, metric: str) -> np.ndarray:
    rounds, values = run.curve(metric)
    return np.broadcast_to(rounds[:, None], values.shape)
