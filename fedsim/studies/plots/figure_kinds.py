"""The kinds of figure that a recipe can use, by name. Each takes the cells and the options of `figure:`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from fedsim.core.errors import ConfigError
from fedsim.studies.plots.bars import bars, heatmap
from fedsim.studies.plots.cells import Cell
from fedsim.studies.plots.configured import bubbles, histogram, rasters
from fedsim.studies.plots.curves import curves

DRAW_FUNCTION_BY_KIND: dict[str, Callable[..., Figure]] = {
    "curves": curves,
    "bars": bars,
    "heatmap": heatmap,
    "bubbles": bubbles,
    "histogram": histogram,
    "rasters": rasters,
}


def draw(cells: list[Cell], options: dict[str, Any]) -> Figure:
    """Draw the figure that `options` (`kind` and its arguments) describe."""
    arguments = dict(options)
    kind = arguments.pop("kind")
    try:
        return DRAW_FUNCTION_BY_KIND[kind](cells, **arguments)
    except TypeError as error:
        raise ConfigError(f"figure: {kind} does not take these options ({error})") from error
