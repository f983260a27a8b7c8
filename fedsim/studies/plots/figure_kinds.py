"""The kinds of figure that a recipe can use, by name. Each takes the cells and the options of `figure:`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from fedsim.core.errors import ConfigError
from fedsim.studies.plots.bars import bars_figure, heatmap_figure
from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.plots.configured import availability_rasters, bubbles_figure, probability_histogram
from fedsim.studies.plots.curves import curves_figure

DRAW_FUNCTION_BY_KIND: dict[str, Callable[..., Figure]] = {
    "curves": curves_figure,
    "bars": bars_figure,
    "heatmap": heatmap_figure,
    "bubbles": bubbles_figure,
    "histogram": probability_histogram,
    "rasters": availability_rasters,
}


def draw_figure(cells: list[ResultCell], options: dict[str, Any]) -> Figure:
    """Draw the figure that `options` (`kind` and its arguments) describe."""
    arguments = dict(options)
    kind = arguments.pop("kind")
    try:
        return DRAW_FUNCTION_BY_KIND[kind](cells, **arguments)
    except TypeError as error:
        raise ConfigError(f"figure: {kind} does not take these options ({error})") from error
