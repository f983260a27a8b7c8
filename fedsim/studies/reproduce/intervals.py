"""The difference of two measured numbers over seeds: its interval, and the smallest difference it would have shown.

Sides that share their seeds are compared seed by seed, since replicates of equal seed share partition, availability and
initial model; others as independent samples of unequal variance (Welch 1947).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedsim.studies.reproduce.number import MeasuredNumber
from fedsim.studies.results.paired import PairedDifference, student_quantile

CONFIDENCE_LEVEL, STATISTICAL_POWER = 0.95, 0.8
EXACT_SPREAD_TOLERANCE = 1e-3  # of a difference: seeds of a deterministic quantity may not spread wider


class NoIntervalError(Exception):
    """These runs give no interval; the message says why."""


@dataclass(frozen=True)
class MeanDifference:
    """Left side minus right side.

    Attributes:
        value: the difference of the means.
        standard_error: its standard error; 0 if exact.
        degrees_of_freedom: degrees of freedom of the error; infinite if exact.
        is_paired: whether it was computed seed by seed.
    """

    value: float
    standard_error: float = 0.0
    degrees_of_freedom: float = math.inf
    is_paired: bool = False

    def interval_half_width(self, min_errors: float = 0.0) -> float:
        """Return half the width of the 95 % interval, at least `min_errors` standard errors."""
        return (
            max(student_quantile(0.5 + CONFIDENCE_LEVEL / 2, self.degrees_of_freedom), min_errors) * self.standard_error
            if self.standard_error
            else 0.0
        )

    @property
    def smallest_detectable_difference(self) -> float:
        """The smallest true difference whose interval would exclude zero in 80 % of repetitions, at this spread."""
        if not self.standard_error:
            return 0.0
        return (
            student_quantile(0.5 + CONFIDENCE_LEVEL / 2, self.degrees_of_freedom)
            + student_quantile(STATISTICAL_POWER, self.degrees_of_freedom)
        ) * self.standard_error


def mean_difference(left_number: MeasuredNumber, right: MeasuredNumber | float, exact: bool = False) -> MeanDifference:
    """Return the difference of two measured numbers, or of a number and a constant.

    Args:
        left_number, right: the sides.
        exact: whether the quantity is deterministic: it has no interval, and seeds may not differ.

    Raises:
        NoIntervalError: a side is NaN, is not finite, is a single value, or is exact and differs between seeds.
    """
    sides = [left_number] if isinstance(right, float) else [left_number, right]
    target = right if isinstance(right, float) else right.mean
    for side in sides:
        if np.isnan(side.values).any():
            raise NoIntervalError(f"{side.name} is not a number")
    if exact:
        return _exact_mean_difference(sides, left_number.mean - target if left_number.mean != target else 0.0)
    for side in sides:
        if len(side.values) < 2:
            raise NoIntervalError(f"{side.name} is one value, which has no interval")
        if not np.isfinite(side.values).all():
            raise NoIntervalError(f"{side.name} is not finite in every seed")
    if isinstance(right, float):
        return _mean_of_differences(left_number.values - right)
    if (
        left_number.seeds is not None
        and left_number.seeds == right.seeds
        and len(left_number.values) == len(right.values)
    ):
        return _mean_of_differences(left_number.values - right.values, paired=True)
    error = math.hypot(left_number.standard_error, right.standard_error)
    if not error:
        return MeanDifference(left_number.mean - target)
    degrees_of_freedom = 1 / sum((side.standard_error / error) ** 4 / (len(side.values) - 1) for side in sides)
    return MeanDifference(left_number.mean - target, error, degrees_of_freedom)


def _mean_of_differences(values: np.ndarray, paired: bool = False) -> MeanDifference:
    by_seed = PairedDifference(values)
    return MeanDifference(by_seed.mean, by_seed.standard_error, by_seed.num_pairs - 1, paired)


def _exact_mean_difference(sides: list[MeasuredNumber], value: float) -> MeanDifference:
    for side in sides:
        if side.std > EXACT_SPREAD_TOLERANCE * abs(value):
            raise NoIntervalError(f"{side.name} is called exact, and its seeds differ by {side.std:.3g}")
    return MeanDifference(value)
