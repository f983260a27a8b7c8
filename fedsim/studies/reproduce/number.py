"""Measured numbers with their replicates, and the standard error of a difference of two of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.studies.results.paired import paired_difference as differences

Where = dict[str, list[str]]  # axis → labels that are meant


@dataclass
class Number:
    """A measured number.

    Attributes:
        at: its place on the axes.
        values: [R], one per replicate.
        paper: what the paper printed.
        fitted: is it of constants that were fitted to the paper's numbers?
        seeds: of the replicates, where they are known.
    """

    at: dict[str, str]
    values: np.ndarray
    paper: float | None = None
    fitted: bool = False
    seeds: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """What a person reads."""
        return " / ".join(self.at.values())

    @property
    def mean(self) -> float:
        """Over replicates."""
        return float(self.values.mean())

    @property
    def std(self) -> float:
        """Sample standard deviation over replicates; 0 for one."""
        with np.errstate(invalid="ignore"):  # infinitely many rounds have no spread
            return float(self.values.std(ddof=1)) if len(self.values) > 1 else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.std / math.sqrt(len(self.values))

    def matches(self, labels_by_axis: Where) -> bool:
        """Is it at one of these places?"""
        return all(self.at.get(axis) in labels for axis, labels in labels_by_axis.items())


class Undecided(Exception):
    """A statistic that these runs do not give; the message says why."""


def standard_error(number: Number, right: Number | None, paired: bool = False) -> float:
    """Of the difference of two means over seeds; without `right`, of the left one: a printed number has no error.

    Independent: √(s²/R + s'²/R'). Paired, where both sides have the same seeds: that of the differences by seed.

    Raises:
        Undecided: for a side of one value, or one whose partner has other seeds.
    """
    for side in (number, right):
        if side is not None and len(side.values) < 2:
            raise Undecided(f"a standard error needs two seeds or more, and {side.name} has one")
    if right is None:
        return number.error
    if not paired:
        return math.hypot(number.error, right.error)
    try:
        return differences(number.values, right.values, number.seeds or (), right.seeds or ()).error
    except ConfigError as error:
        raise Undecided(f"{error}: {number.name} against {right.name}") from error
