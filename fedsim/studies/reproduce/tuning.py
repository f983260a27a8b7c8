"""Tuned options of a paper: labels of an axis are tried, possibly on shorter runs, and the best is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fedsim.core import checks
from fedsim.studies.plots.cells import ResultCell

BEST_DIRECTIONS = ("lowest", "highest")


@dataclass
class TunedAxis:
    """An axis whose best label is selected by tuning.

    Attributes:
        axis: the axis whose labels are tried.
        measure: the measure that selects, as a mean over replicates.
        best: 'lowest' | 'highest'.
        trial_overrides: scale → overrides of the trials; without them the trials are the runs themselves.
    """

    axis: str
    measure: str
    best: str
    trial_overrides: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.check_choice("tune.best", self.best, BEST_DIRECTIONS)

    def best_label_by_place(self, cells: list[ResultCell]) -> dict[str, str]:
        """Return place on the other axes → the best label there; a trial that is not finite is ranked last."""
        groups: dict[str, list[ResultCell]] = {}
        for cell in cells:
            groups.setdefault(self.untuned_axes_label(cell.axis_labels), []).append(cell)
        sign = 1 if self.best == "lowest" else -1
        label_by_place = {}
        for position, members in groups.items():
            scores = [sign * float(c.values_by_measure[self.measure].mean()) for c in members]
            finite = [s if math.isfinite(s) else math.inf for s in scores]
            label_by_place[position] = members[int(np.argmin(finite))].axis_labels[self.axis]
        return label_by_place

    def untuned_axes_label(self, at: dict[str, str]) -> str:
        """Return the labels of a run on the axes other than the tuned one."""
        return " / ".join(label for axis, label in at.items() if axis != self.axis) or "all"
