"""Measured numbers with their replicates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LabelsByAxis = dict[str, list[str]]  # axis → labels that are meant


@dataclass
class MeasuredNumber:
    """A measured number.

    Attributes:
        axis_labels: its place on the axes.
        values: [R], one per replicate.
        paper_value: what the paper printed.
        is_fitted: whether it uses constants that were fitted to the paper's numbers.
        seeds: the seeds of the replicates, if known.
    """

    axis_labels: dict[str, str]
    values: np.ndarray
    paper_value: float | None = None
    is_fitted: bool = False
    seeds: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The labels of its place, for readers."""
        return " / ".join(self.axis_labels.values())

    @property
    def mean(self) -> float:
        """The mean over replicates."""
        return float(self.values.mean())

    @property
    def std(self) -> float:
        """The sample standard deviation over replicates; 0 for one."""
        with np.errstate(invalid="ignore"):  # infinitely many rounds have no spread
            return float(self.values.std(ddof=1)) if len(self.values) > 1 else 0.0

    @property
    def standard_error(self) -> float:
        """The standard error of the mean."""
        return self.std / math.sqrt(len(self.values))

    def matches_axis_labels(self, labels_by_axis: LabelsByAxis) -> bool:
        """Return whether the number is at one of these places."""
        return all(self.axis_labels.get(axis) in labels for axis, labels in labels_by_axis.items())
