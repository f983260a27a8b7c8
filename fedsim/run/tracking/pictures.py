"""Pictures of a finished run, for trackers that show them.

What draws them is no part of the simulator. It is looked up by name when the first picture is wanted; where it is not
installed, there are no pictures.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTS_PACKAGE = (
    "fedsim.studies"  # the package whose plots.compare.figures_of_folder(folder) yields headings and figures
)


def run_pictures(folder: Path) -> Iterator[tuple[str, Figure]]:
    """Return headings and figures of the run in this folder."""
    if importlib.util.find_spec(PLOTS_PACKAGE) is not None:
        yield from importlib.import_module(f"{PLOTS_PACKAGE}.plots.compare").figures_of_folder(folder)
