"""When a curve first reaches a target, as McMahan et al. (2017) count it: best value so far, linear between rounds."""

from __future__ import annotations

import math

import numpy as np

from fedsim.run.rules import reaches_target


def best_so_far(values: np.ndarray, higher_is_better: bool) -> np.ndarray:
    """[E, …] the best value up to each evaluation; what is not a number counts for nothing."""
    return np.fmax.accumulate(values, axis=0) if higher_is_better else np.fmin.accumulate(values, axis=0)


def rounds_to_target(rounds: np.ndarray, values: np.ndarray, target: float, higher_is_better: bool) -> np.ndarray:
    """[R] where the monotone curve of each replicate crosses the target; nan where it never does.

    The curve is the best value so far, and linear between two evaluations, so that the result need not be a round.

    Args:
        rounds: [E] of the evaluations, growing.
        values: [E, R] of a metric.
        target: to be reached.
        higher_is_better: whether larger values are better.
    """
    best = best_so_far(values, higher_is_better)
    return np.array([_first_crossing(rounds, curve, target, higher_is_better) for curve in best.T], dtype=float)


def _first_crossing(rounds: np.ndarray, best: np.ndarray, target: float, higher_is_better: bool) -> float:
    reached_mask = reaches_target(best, target, higher_is_better)
    if not reached_mask.any():
        return math.nan
    e = int(reached_mask.argmax())
    if e == 0 or not math.isfinite(best[e - 1]):
        return float(rounds[e])
    share = min((target - best[e - 1]) / (best[e] - best[e - 1]), 1.0)  # above 1 within the tolerance only
    return float(rounds[e - 1] + share * (rounds[e] - rounds[e - 1]))
