"""Pictures of single clients: their accuracies, their classes, and the rounds in which they were available."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedsim.run.tracking.clients import ClientSummary
from fedsim.studies.plots.looks import curve_styles
from fedsim.studies.plots.style import matplotlib_parameters, nth_colour, panel_figure, venue_font_size, wrap_name
from fedsim.studies.plots.venues import panel_layout
from fedsim.studies.results.differences import run_group_name
from fedsim.studies.results.runs import Run

EXTRA_CLASS_COLOURS = ("#882255", "#999933")  # of classes after the eighth
MAX_BUBBLE_CLIENTS = 20
MAX_PANELS = 6
MAX_NAME_LENGTH = 16  # characters of a client's name
ABSENT_COLOUR, PRESENT_COLOUR = "#f2f2ed", "#1f61a0"


def accuracy_box_plot(runs: list[Run], metric: str | None = None) -> Figure | None:
    """Draw a box plot of the clients' accuracies, or of another metric, for each run, with a dot for each client.

    Replicates are pooled. None if no run has the metric.
    """
    colours = [style.colour for style in curve_styles(runs).styles]
    client_records = [(n, run, run.clients) for n, run in enumerate(runs) if run.clients is not None]
    has_held_out = metric is None and all(c.held_out is not None for _, _, c in client_records)
    candidates = [
        (n, run.label, c.metrics.get(metric) if metric is not None else c.held_out if has_held_out else c.accuracy)
        for n, run, c in client_records
    ]
    scale = 100 if metric is None else 1
    box_series = [
        (n, label, scale * client_values[np.isfinite(client_values)])
        for n, label, client_values in candidates
        if client_values is not None
    ]
    box_series = [(n, label, client_values) for n, label, client_values in box_series if len(client_values)]
    if not box_series:
        return None
    draw = np.random.default_rng(0)  # random positions across the box keep dots apart
    with matplotlib.rc_context(matplotlib_parameters()):
        figure, (axes,) = panel_figure(1, width=8.0, height=1.1 + 0.62 * len(box_series))
        for series_position, (number, _, client_values) in enumerate(box_series):
            colour = colours[number]
            x_positions = series_position + draw.uniform(-0.26, 0.26, len(client_values))
            axes.scatter(
                client_values,
                x_positions,
                s=9,
                color=colour,
                alpha=0.35,
                linewidths=0,
                rasterized=len(client_values) > 300,
            )
            axes.boxplot(
                client_values, positions=[series_position], orientation="horizontal", widths=0.62, showfliers=False,
                whis=(10, 90),
                medianprops={"color": "#111111", "linewidth": 2.2}, boxprops={"color": "#444444"},
                whiskerprops={"color": "#444444"}, capprops={"color": "#444444"}, manage_ticks=False,
            )  # fmt: skip
            axes.plot(client_values.mean(), series_position, "D", color="white", markeredgecolor=colour, markersize=5.5)
        axes.set_yticks(range(len(box_series)), [wrap_name(name) for _, name, _ in box_series])
        axes.set_ylim(len(box_series) - 0.45, -0.55)
        axes.grid(visible=False, axis="y")
        samples = "samples held out of the client" if has_held_out else "the client's own training samples"
        max_characters = int(8 * figure.get_figwidth() / venue_font_size(1))
        axes.set_xlabel(wrap_name(f"{metric or 'accuracy'} on {samples}" + ("" if metric else " (%)"), max_characters))
    return figure


def availability_figure(runs: list[Run]) -> Figure | None:
    """Draw which clients were available in each round, and their number above; one panel per availability process."""
    run_groups = _group_runs_by_client_array(runs, "present")
    if all(presence_matrix.all() for _, presence_matrix, _ in run_groups):  # full availability, or no record of it
        return None
    num_columns = min(len(run_groups), 3)
    with matplotlib.rc_context(matplotlib_parameters()):
        x_positions = max(4.4, 8.0 / num_columns)
        num_columns, x_positions, height = panel_layout(len(run_groups), num_columns, x_positions, 3.6)
        rows = -(-len(run_groups) // num_columns)
        figure = Figure(figsize=(x_positions * num_columns, height * rows), layout="constrained")
        grid = figure.subplots(2 * rows, num_columns, squeeze=False, height_ratios=[1, 3.2] * rows)
        for axes in grid.ravel():
            axes.grid(visible=False)
        for unused in range(len(run_groups), rows * num_columns):
            for axes in grid[2 * (unused // num_columns) :, unused % num_columns][:2]:
                axes.axis("off")
        for number, (group_heading, presence_matrix, clients) in enumerate(run_groups):
            count_axes, raster_axes = grid[2 * (number // num_columns) :, number % num_columns][:2]
            present_counts = presence_matrix.sum(0)
            count_axes.fill_between(
                range(len(present_counts)), present_counts, step="mid", color=PRESENT_COLOUR, alpha=0.35, linewidth=0
            )
            count_axes.axhline(present_counts.mean(), color=nth_colour(1), linewidth=1.2)
            count_axes.set_ylim(0, len(presence_matrix))
            count_axes.set_xlim(-0.5, len(present_counts) - 0.5)
            count_axes.set_yticks([0, len(presence_matrix)])
            count_axes.set_xticks([])
            count_axes.set_title(
                wrap_name(
                    f"{group_heading}: {present_counts.mean():.1f} of {len(presence_matrix)} on average".lstrip(": "),
                    52,
                )
            )
            raster_axes.imshow(
                presence_matrix,
                cmap=ListedColormap([ABSENT_COLOUR, PRESENT_COLOUR]),
                vmin=0,
                vmax=1,
                aspect="auto",
                interpolation="nearest",
            )
            raster_axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
            _label_ticks(raster_axes.yaxis, clients.names)
            raster_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            raster_axes.set_xlabel("round")
            raster_axes.set_ylabel("client")
            count_axes.set_ylabel("active", fontsize=venue_font_size(9))
    return figure


def partition_figure(runs: list[Run]) -> Figure | None:
    """Draw the class shares of the first clients as bubbles; one panel per partition."""
    run_groups = _group_runs_by_client_array(runs, "class_fractions")
    if not run_groups:
        return None
    with matplotlib.rc_context(matplotlib_parameters()):
        class_count = max(shares.shape[1] for _, shares, _ in run_groups)
        figure, grid = panel_figure(
            len(run_groups), width=max(3.6, 0.3 * class_count), height=4.6, columns=min(len(run_groups), 3)
        )
        for axes, (heading, shares, clients) in zip(grid, run_groups, strict=True):
            draw_bubbles(axes, shares[:MAX_BUBBLE_CLIENTS])
            _label_ticks(axes.yaxis, clients.names)
            _label_ticks(axes.xaxis, clients.labels)
            axes.set_title(wrap_name(heading, 40))
    return figure


def draw_bubbles(axes: Axes, share_matrix: np.ndarray) -> None:
    """Draw a circle per client and class, its area the class's share [m', C] of the samples (fedawe Fig. 4)."""
    client, label = np.indices(share_matrix.shape)
    colours = [nth_colour(int(c)) if c < 8 else EXTRA_CLASS_COLOURS[int(c) % 2] for c in label.ravel()]
    axes.scatter(label.ravel(), client.ravel(), s=170 * share_matrix.ravel(), c=colours, linewidths=0)
    if share_matrix.shape[1] <= 20:
        axes.set_xticks(range(share_matrix.shape[1]))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("class")
    axes.set_ylabel("client")
    axes.invert_yaxis()


def _label_ticks(tick_axis: Axis, names: np.ndarray | None) -> None:
    """Label the ticks of clients or classes with their names in the data, if they have names."""
    if names is not None:

        def tick_label(position: float, _: int | None = None) -> str:
            in_range = position == int(position) and 0 <= position < len(names)
            return shortened_name(str(names[int(position)]), MAX_NAME_LENGTH) if in_range else ""

        tick_axis.set_major_formatter(FuncFormatter(tick_label))


def shortened_name(name: str, max_length: int) -> str:
    """Shorten a name that is longer than the given number of characters."""
    return name if len(name) <= max_length else f"{name[: max_length - 1]}…"


def _group_runs_by_client_array(runs: list[Run], attribute_name: str) -> list[tuple[str, np.ndarray, ClientSummary]]:
    """Group runs in which an array and the clients' names are equal; return the first `MAX_PANELS` groups.

    Each group is given as its name, the array and the clients of its first run.
    """
    run_groups: dict[tuple[object, ...], list[tuple[Run, ClientSummary]]] = {}
    for run, clients in ((run, run.clients) for run in runs if run.clients is not None):
        array = getattr(clients, attribute_name)
        if array is not None:
            names = None if clients.names is None else clients.names.tobytes()
            run_groups.setdefault((array.shape, array.tobytes(), names), []).append((run, clients))
    panel_groups = list(run_groups.values())[:MAX_PANELS]
    return [
        (run_group_name([run for run, _ in group], runs), getattr(group[0][1], attribute_name), group[0][1])
        for group in panel_groups
    ]
