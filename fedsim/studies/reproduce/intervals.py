"""The difference of two measured numbers over seeds: its interval, and the smallest difference it would have shown.

Sides that share their seeds are compared seed by seed, since replicates of equal seed share partition, availability and
initial model; others as independent samples of unequal variance (Welch 1947).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedsim.studies.reproduce.number import Number
from fedsim.studies.results.paired import PairedDifference, student_quantile

CONFIDENCE, POWER = 0.95, 0.8
EXACT_SPREAD_TOLERANCE = 1e-3  # of a difference: seeds of a deterministic quantity may not spread wider


class NoIntervalError(Exception):
    """These runs give no interval; the message says why."""


@dataclass(frozen=True)
class Difference:
    """Left side minus right side.

    Attributes:
        value: the difference of the means.
        error: its standard error; 0 if exact.
        freedom: degrees of freedom of the error; infinite if exact.
        paired: whether it was computed seed by seed.
    """

    value: float
    error: float = 0.0
    freedom: float = math.inf
    paired: bool = False

    def reach(self, min_errors: float = 0.0) -> float:
        """Return half the width of the 95 % interval, at least `min_errors` standard errors."""
        return max(student_quantile(0.5 + CONFIDENCE / 2, self.freedom), min_errors) * self.error if self.error else 0.0

    @property
    def smallest_shown(self) -> float:
        """The smallest true difference whose interval would exclude zero in 80 % of repetitions, at this spread."""
        if not self.error:
            return 0.0
        return (
            student_quantile(0.5 + CONFIDENCE / 2, self.freedom) + student_quantile(POWER, self.freedom)
        ) * self.error


def difference(left: Number, right: Number | float, exact: bool = False) -> Difference:
    """Return the difference of two measured numbers, or of a number and a constant.

    Args:
        left, right: the sides.
        exact: whether the quantity is deterministic: it has no interval, and seeds may not differ.

    Raises:
        NoIntervalError: a side is NaN, is not finite, is a single value, or is exact and differs between seeds.
    """
    sides = [left] if isinstance(right, float) else [left, right]
    target = right if isinstance(right, float) else right.mean
    for side in sides:
        if np.isnan(side.values).any():
            raise NoIntervalError(f"{side.name} is not a number")
    if exact:
        return _exact_difference(sides, left.mean - target if left.mean != target else 0.0)
    for side in sides:
        if len(side.values) < 2:
            raise NoIntervalError(f"{side.name} is one value, which has no interval")
        if not np.isfinite(side.values).all():
            raise NoIntervalError(f"{side.name} is not finite in every seed")
    if isinstance(right, float):
        return _difference_interval(left.values - right)
    if left.seeds is not None and left.seeds == right.seeds and len(left.values) == len(right.values):
        return _difference_interval(left.values - right.values, paired=True)
    error = math.hypot(left.error, right.error)
    if not error:
        return Difference(left.mean - target)
    freedom = 1 / sum((side.error / error) ** 4 / (len(side.values) - 1) for side in sides)
    return Difference(left.mean - target, error, freedom)


def _difference_interval(values: np.ndarray, paired: bool = False) -> Difference:
    by_seed = PairedDifference(values)
    return Difference(by_seed.mean, by_seed.error, by_seed.pairs - 1, paired)


def _exact_difference(sides: list[Number], value: float) -> Difference:
    for side in sides:
        if side.std > EXACT_SPREAD_TOLERANCE * abs(value):
            raise NoIntervalError(f"{side.name} is called exact, and its seeds differ by {side.std:.3g}")
    return Difference(value)
