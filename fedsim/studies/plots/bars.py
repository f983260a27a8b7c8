"""Bar charts of final numbers with a paper's printed ones, and heat maps of numbers over two axes."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedsim.studies.plots.cells import Cell, axis_labels, cells_at_label
from fedsim.studies.plots.style import (
    FITTED_BAR_STYLE,
    FITTED_LABEL,
    legend_below,
    nth_colour,
    panel_figure,
    parameters,
    typeset_formulas,
    wrap_name,
)


def bars(
    cells: list[Cell],
    measure: str | list[str],
    group: str | None = None,
    colours: str | None = None,
    panel: str | None = None,
    unit: str = "",
    minimum: float | None = None,
) -> Figure:
    """Draw a bar per run, mean ± 1 standard deviation over replicates, hatched where fitted, and a dot for the paper.

    Args:
        cells: measured runs.
        measure: name of the measure; a list makes a panel for each of several.
        group, colours, panel: the axes whose labels make groups of bars, colours and panels; without groups the labels
            of `colours` are written below the bars.
        unit: label of the vertical axis.
        minimum: where the vertical axis begins.
    """
    if group is None:
        group, colours = colours, None
    groups, tints = axis_labels(cells, group), axis_labels(cells, colours)
    names = [measure] if isinstance(measure, str) else measure
    panels = [(label, name) for label in axis_labels(cells, panel) for name in names]
    width = 0.8 / len(tints)
    with matplotlib.rc_context(parameters()):
        drawing, grid = panel_figure(len(panels), width=max(4.4, 0.26 * len(groups) * max(len(tints), 5)), columns=1)
        for axes, (panel_label, quantity) in zip(grid, panels, strict=True):
            axes.set_title(
                typeset_formulas(
                    ", ".join([panel_label, quantity] if panel_label and len(names) > 1 else [panel_label or quantity])
                )
            )
            axes.grid(visible=False, axis="x")
            for number, tint in enumerate(tints):
                literal = not all(cell.fitted for cell in cells_at_label(cells, colours, tint))
                for group_index, name in enumerate(groups):
                    for cell in cells_at_label(
                        cells_at_label(cells_at_label(cells, panel, panel_label), group, name), colours, tint
                    ):
                        values, x = cell.numbers[quantity], group_index + (number - (len(tints) - 1) / 2) * width
                        spread = values.std(ddof=1) if len(values) > 1 else None
                        axes.bar(
                            x, values.mean(), width * 0.9, yerr=spread, color=nth_colour(number),
                            label=None if literal and cell.fitted else tint or "ours",
                            **(FITTED_BAR_STYLE if cell.fitted else {}),
                        )  # fmt: skip
                        if quantity in cell.paper:
                            paper = cell.paper[quantity]
                            axes.plot(
                                x, paper, "o", color="black", markeredgecolor="white", markersize=5, label="paper"
                            )
            axes.set_xticks(range(len(groups)), [wrap_name(name, 14) for name in groups])
            axes.set_ylabel(typeset_formulas(unit))
            if minimum is not None:
                highest = axes.dataLim.ymax
                axes.set_ylim(minimum, highest + 0.1 * (highest - minimum))
        if any(cell.fitted for cell in cells):
            axes.bar(0, 0, color="grey", label=FITTED_LABEL, **FITTED_BAR_STYLE)
        legend_below(drawing, grid)
    return drawing


def heatmap(
    cells: list[Cell], measure: str, x: str, y: str, panel: str | None = None, unit: str = "", digits: int = 1
) -> Figure:
    """Draw numbers over two axes as coloured squares, with the paper's numbers in brackets.

    Args:
        cells: measured runs.
        measure: name of the measure.
        x, y: the axes that make columns and rows.
        panel: the axis whose labels make panels.
        unit: label of the colour bar.
        digits: number of digits after the decimal point.
    """
    columns, rows, panel_labels = axis_labels(cells, x), axis_labels(cells, y), axis_labels(cells, panel)
    table = np.full((len(panel_labels), len(rows), len(columns)), np.nan)
    printed, fitted = np.full_like(table, np.nan), np.zeros(table.shape, dtype=bool)
    for cell in cells:
        index = (panel_labels.index(cell.at[panel]) if panel else 0, rows.index(cell.at[y]), columns.index(cell.at[x]))
        table[index] = cell.numbers[measure].mean()
        printed[index], fitted[index] = cell.paper.get(measure, np.nan), cell.fitted
    low, high = np.nanmin(table), np.nanmax(table)
    with matplotlib.rc_context(parameters()):
        drawing, grid = panel_figure(len(panel_labels), width=0.85 * len(columns) + 2, height=0.62 * len(rows) + 1.4)
        for number, axes in enumerate(grid):
            picture = axes.imshow(table[number], cmap="viridis", vmin=low, vmax=high, aspect="auto")
            for row, column in np.ndindex(len(rows), len(columns)):
                value, paper = table[number, row, column], printed[number, row, column]
                if np.isnan(value):
                    continue
                text = f"{value:.{digits}f}" + ("" if np.isnan(paper) else f"\n({paper:.{digits}f})")
                text += f"\n{FITTED_LABEL}" * bool(fitted[number, row, column])
                shade = "white" if value < (low + high) / 2 else "black"
                axes.text(column, row, text, ha="center", va="center", color=shade, fontsize=8)
            axes.set_xticks(range(len(columns)), columns)
            axes.set_yticks(range(len(rows)), rows)
            axes.set_xlabel(x)
            axes.set_ylabel(y)
            axes.set_title(typeset_formulas(panel_labels[number] or measure))
            axes.grid(visible=False)
        drawing.colorbar(picture, ax=grid, label=typeset_formulas(unit), shrink=0.85)
    return drawing
