"""Pictures of a comparison of many algorithms on many problems: critical differences, wins, differences and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedsim.studies.plots.style import MATPLOTLIB_STYLE, escape_mathtext

NAME_LINE_INCHES = 0.21  # height of a line with a name, in inches


def critical_difference_diagram(
    names: Sequence[str], ranks: np.ndarray, difference: float, groups: Sequence[tuple[int, int]]
) -> Figure:
    """Draw Demšar's diagram: mean ranks on a line, best on the left; a bar joins those without significant difference.

    Args:
        names, ranks: names and mean ranks, best first.
        difference: Nemenyi's critical difference.
        groups: first and last index of the names joined by a bar.
    """
    count = len(names)
    left_count, bars_height = (count + 1) // 2, 0.11 * len(groups)
    height = 0.9 + bars_height + NAME_LINE_INCHES * left_count
    with matplotlib.rc_context({**MATPLOTLIB_STYLE, "axes.grid": False}):
        drawing = Figure(figsize=(9, height))
        axes = drawing.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_ylim(-height + 0.55, 0.55)
        low, high = 1.0, float(max(count, np.ceil(ranks.max())))
        name_width = 0.32 * (high - low)  # on each side of the line, for names
        axes.set_xlim(low - name_width, high + name_width)
        axes.plot([low, high], [0, 0], color="black", linewidth=1)
        for tick in _ticks(low, high):
            axes.plot([tick, tick], [0, 0.07], color="black", linewidth=1)
            axes.text(tick, 0.1, f"{tick:g}", ha="center", va="bottom", fontsize=8)
        axes.plot([low, low + difference], [0.38, 0.38], color="black", linewidth=1.5)
        axes.text(low + difference + 0.01 * (high - low), 0.38, f"CD = {difference:.2f}", va="center", fontsize=9)
        for number, (first_rank, last_rank) in enumerate(groups):
            y = -0.1 - 0.11 * number
            bar_overhang = 0.003 * (high - low)
            axes.plot(
                [ranks[first_rank] - bar_overhang, ranks[last_rank] + bar_overhang],
                [y, y],
                color="#D55E00",
                linewidth=2.6,
            )
        for position, (name, rank) in enumerate(zip(names, ranks, strict=True)):
            on_left = position < left_count
            label_row = position if on_left else count - 1 - position
            y, x = (
                -0.3 - bars_height - NAME_LINE_INCHES * label_row,
                low - 0.02 * name_width if on_left else high + 0.02 * name_width,
            )
            axes.plot([rank, rank, x], [0, y, y], color="#7F7F7F", linewidth=0.7)
            text = f"{escape_mathtext(name)}  {rank:.1f}" if on_left else f"{rank:.1f}  {escape_mathtext(name)}"
            axes.text(x, y, f" {text} ", ha="right" if on_left else "left", va="center", fontsize=8.5)
    return drawing


def _ticks(low: float, high: float) -> list[float]:
    """Return about a dozen or fewer ticks at round numbers."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100) if (high - low) / s <= 12)
    return [low, *(float(t) for t in range(step, int(high) + 1, step) if t > low)]


def wins_heatmap(names: Sequence[str], matrix: np.ndarray, num_cells: int) -> Figure:
    """Draw in how many cells the row's algorithm is significantly better than the column's, by its paired interval.

    Args:
        names: names of the algorithms, best first.
        matrix: [k, k] number of cells.
        num_cells: number of all cells.
    """
    count = len(names)
    with matplotlib.rc_context({**MATPLOTLIB_STYLE, "axes.grid": False}):
        size = 2.2 + 0.26 * count
        drawing = Figure(figsize=(size + 0.8, size), layout="constrained")
        axes = drawing.subplots()
        shares = matrix / num_cells
        picture = axes.imshow(np.ma.masked_where(np.eye(count, dtype=bool), shares), cmap="Blues", vmin=0, vmax=1)
        for i, j in np.ndindex(count, count):
            if i != j and matrix[i, j]:
                text_colour = "white" if shares[i, j] > 0.55 else "black"
                axes.text(j, i, str(matrix[i, j]), ha="center", va="center", fontsize=6.5, color=text_colour)
        axes.set_xticks(range(count), [escape_mathtext(name) for name in names], rotation=90, fontsize=8)
        axes.set_yticks(range(count), [escape_mathtext(name) for name in names], fontsize=8)
        axes.set_xlabel("… than that of the column")
        axes.set_ylabel("row is significantly better …")
        drawing.colorbar(picture, ax=axes, label=f"share of {num_cells} cells", shrink=0.7)
    return drawing


def difference_heatmap(
    names: Sequence[str], columns: Sequence[str], values: np.ndarray, unit: str, blocks: Sequence[tuple[str, int]] = ()
) -> Figure:
    """Draw each algorithm's difference to the reference in each cell, positive in blue, negative in red.

    Args:
        names: labels of the lines, best first.
        columns: labels of the cells.
        values: [k, N] differences; NaN or infinite where there is none.
        unit: label of the colour bar.
        blocks: (name, number of columns) of each group of neighbouring columns.
    """
    magnitudes = np.abs(values[np.isfinite(values)])
    limit = float(np.quantile(magnitudes, 0.97)) if len(magnitudes) else 1.0
    colour_options = {"cmap": "RdBu", "vmin": -limit or None, "vmax": limit or None}
    return _cell_heatmap(names, columns, values, blocks, unit, "both", colour_options)


def rank_heatmap(
    names: Sequence[str], columns: Sequence[str], ranks: np.ndarray, blocks: Sequence[tuple[str, int]] = ()
) -> Figure:
    """Draw the rank [k, N] of each algorithm in each cell; the other arguments as in `difference_heatmap`."""
    colour_options = {"cmap": "Blues_r", "vmin": 1, "vmax": len(names)}
    return _cell_heatmap(names, columns, ranks, blocks, "rank, 1 the best", "neither", colour_options)


def _cell_heatmap(
    names: Sequence[str], columns: Sequence[str], values: np.ndarray, blocks: Sequence[tuple[str, int]], label: str,
    extend: str, colour_options: dict[str, Any],
) -> Figure:  # fmt: skip
    """Draw a heat map with a line per algorithm and a column per cell; × marks missing numbers."""
    with matplotlib.rc_context({**MATPLOTLIB_STYLE, "axes.grid": False}):
        drawing = Figure(figsize=(3.4 + 0.27 * len(columns), 2.1 + 0.21 * len(names)), layout="constrained")
        axes = drawing.subplots()
        axes.set_facecolor("#E8E8E8")
        picture = axes.imshow(np.where(np.isfinite(values), values, np.nan), aspect="auto", **colour_options)
        for line, column in np.argwhere(~np.isfinite(values)):
            axes.text(column, line, "×", ha="center", va="center", fontsize=8)
        axes.set_yticks(range(len(names)), [escape_mathtext(name) for name in names], fontsize=8)
        axes.set_xticks(range(len(columns)), [escape_mathtext(name) for name in columns], rotation=90, fontsize=8)
        first_cell = 0
        for name, count in blocks:
            if first_cell:
                axes.axvline(first_cell - 0.5, color="black", linewidth=1)
            axes.text(first_cell + (count - 1) / 2, -0.7, escape_mathtext(name), ha="center", va="bottom", fontsize=7)
            first_cell += count
        drawing.colorbar(picture, ax=axes, label=label, extend=extend, shrink=0.7)
    return drawing
