"""The style of all pictures: colours, labels of metrics, the grid of panels."""

from __future__ import annotations

import io
import re
import textwrap
from typing import IO, Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation
from PIL import Image

from fedsim.evaluation.columns import is_fraction
from fedsim.evaluation.registry import describe_metric
from fedsim.studies.plots.venues import current_venue, panel_layout

PALETTE_DESCRIPTION = "Okabe–Ito, or viridis where they show the order of a number; both are safe for the colour-blind"
PALETTE = (  # Okabe–Ito (Okabe and Ito 2008), and two more
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F", "#8C510A", "#6A3D9A",
)  # fmt: skip
LINE_STYLES = ("-", "--", ":", "-.")
MARKER_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*")
FITTED_LABEL = "fitted"  # legend of results with constants that were fitted after seeing the paper's numbers
FITTED_BAR_STYLE: dict[str, Any] = {"hatch": "///", "edgecolor": "white", "linewidth": 0}  # bars of fitted results
FITTED_DASHES = (0, (6, 1.5, 1, 1.5, 1, 1.5))  # its curves where dashes already say something; else the plain ones

MATPLOTLIB_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "figure.dpi": 150,
    "savefig.bbox": "tight",
}


def save_small_png(figure: Figure, file: IO[bytes], dpi: float | str = "figure") -> None:
    """Save a figure as a PNG of 256 colours, which takes a third of the bytes.

    A drawing of lines and areas has few colours; the others are shades at edges, of which similar ones are merged.
    """
    png_bytes = io.BytesIO()
    figure.savefig(png_bytes, format="png", dpi=dpi)
    with Image.open(png_bytes) as picture:
        few_colours = picture.convert("RGB").quantize(256, kmeans=2, dither=Image.Dither.NONE)
        few_colours.save(file, "PNG", optimize=True, dpi=picture.info["dpi"])


def escape_mathtext(text: str) -> str:
    """Escape a name for matplotlib, on one line: `$` begins no formula, a leading `_` does not hide it in a legend."""
    return re.sub(r"^_", " _", " ".join(text.split()).replace("$", r"\$"))


def typeset_formulas(text: str) -> str:
    """Typeset names such as θ^PS as mathematics, for pictures and LaTeX."""
    return re.sub(r"θ\^([A-Za-z]+)", r"$\\theta^{\\mathrm{\1}}$", text)


def metric_axis_label(metric: str, max_characters: int | None = None) -> str:
    """Return the label and unit of a metric for an axis, on lines of at most `max_characters` characters."""
    heading = describe_metric(metric).heading
    return typeset_formulas(heading if max_characters is None else wrap_name(heading, max_characters))


def nth_colour(position: int) -> str:
    """Return the n-th colour of the palette, which repeats."""
    return PALETTE[position % len(PALETTE)]


def set_percent_axis(axis: Axis, metric: str) -> None:
    """Show fractions in per cent on an axis, as its label says."""
    if is_fraction(metric):
        axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}"))


class _PlainWithinDecade(LogFormatterSciNotation):
    """Powers of ten as usual; plain numbers on an axis that spans less than a decade."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        text = super().__call__(x, pos)
        assert self.axis is not None
        low, high = sorted(self.axis.get_view_interval())
        return f"{x:.4g}" if text and 0 < high < 10 * low else str(text)


def set_log_labels(axis: Axis) -> None:
    """A logarithmic axis that spans less than a decade has plain numbers."""
    axis.set_major_formatter(_PlainWithinDecade())
    axis.set_minor_formatter(_PlainWithinDecade(labelOnlyBase=False))


def panel_figure(
    count: int, width: float = 4.4, height: float = 3.4, columns: int | None = None
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels: up to three in a row, four as two by two, unless `columns` is given."""
    columns, width, height = panel_layout(count, columns or (2 if count == 4 else min(count, 3)), width, height)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(h_pad=0.1 if current_venue() is None else 0.04, w_pad=0.08 if current_venue() is None else 0.04)
    grid = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for unused in grid[count:]:
        unused.axis("off")
    return figure, list(grid[:count])


def matplotlib_parameters() -> dict[Any, Any]:
    """Return matplotlib's parameters for all pictures and for the current venue."""
    venue = current_venue()
    return MATPLOTLIB_STYLE | (venue.matplotlib_parameters if venue else {})


def venue_font_size(size: float) -> float:
    """Scale a size of letters or markers, given for a font of 10 points, to the font of the current venue."""
    venue = current_venue()
    return size * venue.font_size / 10 if venue else size


def legend_below(
    figure: Figure, grid: list[Axes], entries: dict[str, Artist] | None = None, title: str | None = None
) -> None:
    """Draw one legend below all panels, with as many columns as fit; none for a single name.

    Args:
        figure, grid: the figure and its panels.
        entries: label → artist; by default those of the panels' curves.
        title: title of the legend.
    """
    handles: dict[str, Artist] = {} if entries is None else entries
    for axes in grid if entries is None else []:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(typeset_formulas(name), handle)
    if len(handles) > 1:
        letters, character_width = (
            venue_font_size(1),
            0.075 if (venue := current_venue()) and venue.uses_serif_font else 0.085,
        )  # inches
        max_columns = int(figure.get_figwidth() / (letters * (0.65 + character_width * max(map(len, handles)))))
        columns = max(1, min(len(handles), max_columns))
        lines = -(-len(handles) // columns) - 1 + bool(title)
        figure.set_figheight(figure.get_figheight() + 0.2 * letters * lines)
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=columns, title=title,
            fontsize=venue_font_size(9), title_fontsize=venue_font_size(9),
        )  # fmt: skip


def wrap_name(text: str, width: int = 30) -> str:
    """Wrap a long name over several lines."""
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))
