"""Bar charts of final numbers with a paper's printed ones, and heat maps of numbers over two axes."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from fedsim.studies.plots.cells import ResultCell, cells_at_label, labels_of_axis
from fedsim.studies.plots.style import (
    FITTED_BAR_STYLE,
    FITTED_LABEL,
    legend_below,
    matplotlib_parameters,
    nth_colour,
    panel_figure,
    typeset_formulas,
    wrap_name,
)


def bars_figure(
    cells: list[ResultCell],
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
    group_labels, tint_labels = labels_of_axis(cells, group), labels_of_axis(cells, colours)
    measure_names = [measure] if isinstance(measure, str) else measure
    panels = [(label, group_label) for label in labels_of_axis(cells, panel) for group_label in measure_names]
    bar_width = 0.8 / len(tint_labels)
    with matplotlib.rc_context(matplotlib_parameters()):
        figure, grid = panel_figure(
            len(panels), width=max(4.4, 0.26 * len(group_labels) * max(len(tint_labels), 5)), columns=1
        )
        for axes, (panel_label, quantity) in zip(grid, panels, strict=True):
            axes.set_title(
                typeset_formulas(
                    ", ".join(
                        [panel_label, quantity] if panel_label and len(measure_names) > 1 else [panel_label or quantity]
                    )
                )
            )
            axes.grid(visible=False, axis="x")
            for tint_index, colour in enumerate(tint_labels):
                is_literal = not all(cell.is_fitted for cell in cells_at_label(cells, colours, colour))
                for group_index, group_label in enumerate(group_labels):
                    for cell in cells_at_label(
                        cells_at_label(cells_at_label(cells, panel, panel_label), group, group_label), colours, colour
                    ):
                        values, x = (
                            cell.values_by_measure[quantity],
                            group_index + (tint_index - (len(tint_labels) - 1) / 2) * bar_width,
                        )
                        spread = values.std(ddof=1) if len(values) > 1 else None
                        axes.bar(
                            x, values.mean(), bar_width * 0.9, yerr=spread, color=nth_colour(tint_index),
                            label=None if is_literal and cell.is_fitted else colour or "ours",
                            **(FITTED_BAR_STYLE if cell.is_fitted else {}),
                        )  # fmt: skip
                        if quantity in cell.paper_values:
                            paper = cell.paper_values[quantity]
                            axes.plot(
                                x, paper, "o", color="black", markeredgecolor="white", markersize=5, label="paper"
                            )
            axes.set_xticks(range(len(group_labels)), [wrap_name(group_label, 14) for group_label in group_labels])
            axes.set_ylabel(typeset_formulas(unit))
            if minimum is not None:
                highest = axes.dataLim.ymax
                axes.set_ylim(minimum, highest + 0.1 * (highest - minimum))
        if any(cell.is_fitted for cell in cells):
            axes.bar(0, 0, color="grey", label=FITTED_LABEL, **FITTED_BAR_STYLE)
        legend_below(figure, grid)
    return figure


def heatmap_figure(
    cells: list[ResultCell],
    measure: str,
    x: str,
    y: str,
    panel: str | None = None,
    unit: str = "",
    digits: int = 1,
    log: bool = False,
) -> Figure:
    """Draw numbers over two axes as coloured squares, with the paper's numbers in brackets.

    Args:
        cells: measured runs.
        measure: name of the measure.
        x, y: the axes that make columns and rows.
        panel: the axis whose labels make panels.
        unit: label of the colour bar.
        digits: number of digits after the decimal point.
        log: whether colours follow the logarithm.
    """
    column_labels, rows, panel_labels = labels_of_axis(cells, x), labels_of_axis(cells, y), labels_of_axis(cells, panel)
    value_table = np.full((len(panel_labels), len(rows), len(column_labels)), np.nan)
    paper_values, fitted_mask = np.full_like(value_table, np.nan), np.zeros(value_table.shape, dtype=bool)
    for cell in cells:
        index = (
            panel_labels.index(cell.axis_labels[panel]) if panel else 0,
            rows.index(cell.axis_labels[y]),
            column_labels.index(cell.axis_labels[x]),
        )
        value_table[index] = cell.values_by_measure[measure].mean()
        paper_values[index], fitted_mask[index] = cell.paper_values.get(measure, np.nan), cell.is_fitted
    low, high = np.nanmin(value_table), np.nanmax(value_table)
    colours = LogNorm(low, high) if log else Normalize(low, high)
    with matplotlib.rc_context(matplotlib_parameters()):
        figure, grid = panel_figure(
            len(panel_labels), width=0.85 * len(column_labels) + 2, height=0.62 * len(rows) + 1.4
        )
        for panel_index, axes in enumerate(grid):
            heatmap_image = axes.imshow(value_table[panel_index], cmap="viridis", norm=colours, aspect="auto")
            for row, column_index in np.ndindex(len(rows), len(column_labels)):
                value, paper = value_table[panel_index, row, column_index], paper_values[panel_index, row, column_index]
                if np.isnan(value):
                    continue
                text = f"{value:.{digits}f}" + ("" if np.isnan(paper) else f"\n({paper:.{digits}f})")
                text += f"\n{FITTED_LABEL}" * bool(fitted_mask[panel_index, row, column_index])
                text_colour = "white" if colours(value) < 0.5 else "black"
                axes.text(column_index, row, text, ha="center", va="center", color=text_colour, fontsize=8)
            axes.set_xticks(range(len(column_labels)), column_labels)
            axes.set_yticks(range(len(rows)), rows)
            axes.set_xlabel(x)
            axes.set_ylabel(y)
            axes.set_title(typeset_formulas(panel_labels[panel_index] or measure))
            axes.grid(visible=False)
        figure.colorbar(heatmap_image, ax=grid, label=typeset_formulas(unit), shrink=0.85)
    return figure
