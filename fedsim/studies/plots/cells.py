"""The data of the pictures of a comparison: runs with their labels on named axes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fedsim.availability import Availability
from fedsim.studies.results.runs import Run


@dataclass
class Cell:
    """One run of a comparison.

    Attributes:
        at: axis → label.
        run: the run read from disk, if it was trained.
        availability: the availability process bound to its federation, for pictures without training.
        numbers: measure → [R].
        paper: measure → the number the paper printed.
        fitted: whether it uses constants that were fitted after seeing the paper's numbers.
    """

    at: dict[str, str]
    run: Run | None = None
    availability: Availability | None = None
    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    paper: dict[str, float] = field(default_factory=dict)
    fitted: bool = False


def axis_labels(cells: list[Cell], axis: str | None) -> list[str]:
    """Return the labels on an axis, in the order of the cells; one empty label if the axis is None."""
    return [""] if axis is None else list(dict.fromkeys(cell.at[axis] for cell in cells))


def cells_at_label(cells: list[Cell], axis: str | None, label: str) -> list[Cell]:
    """Return the cells with this label on the axis; all cells if the axis is None."""
    return cells if axis is None else [cell for cell in cells if cell.at[axis] == label]
