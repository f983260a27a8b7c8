"""The data of the pictures of a comparison: runs with their labels on named axes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fedsim.availability import Availability
from fedsim.studies.results.runs import Run


@dataclass
class ResultCell:
    """One run of a comparison.

    Attributes:
        axis_labels: axis → label.
        run: the run read from disk, if it was trained.
        availability: the availability process bound to its federation, for pictures without training.
        values_by_measure: measure → [R].
        paper_values: measure → the number the paper printed.
        is_fitted: whether it uses constants that were fitted after seeing the paper's numbers.
    """

    axis_labels: dict[str, str]
    run: Run | None = None
    availability: Availability | None = None
    values_by_measure: dict[str, np.ndarray] = field(default_factory=dict)
    paper_values: dict[str, float] = field(default_factory=dict)
    is_fitted: bool = False


def labels_of_axis(cells: list[ResultCell], axis: str | None) -> list[str]:
    """Return the labels on an axis, in the order of the cells; one empty label if the axis is None."""
    return [""] if axis is None else list(dict.fromkeys(cell.axis_labels[axis] for cell in cells))


def cells_at_label(cells: list[ResultCell], axis: str | None, label: str) -> list[ResultCell]:
    """Return the cells with this label on the axis; all cells if the axis is None."""
    return cells if axis is None else [cell for cell in cells if cell.axis_labels[axis] == label]
