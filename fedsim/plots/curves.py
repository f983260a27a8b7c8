"""Curves of metrics over rounds, mean with a band of one standard deviation over replicates."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsim.evaluation.columns import MODELS
from fedsim.plots.cells import Cell, at, labels
from fedsim.plots.style import (
    DASHES,
    FITTED,
    FITTED_DASHES,
    LOGARITHMIC,
    STYLE,
    colour,
    drawn,
    legend_below,
    line,
    panels,
    percent,
)
from fedsim.results.runs import NEWCOMERS, Run

PREFERRED = (
    "test_accuracy",
    "client_accuracy_worst10",
    "distance_to_optimum",
    "distance_to_po",
    "distance_to_ps",
    "performative_risk",
    "train_loss",
    "test_loss",
)
BAND_FLOOR = 0.1  # on a logarithmic axis a band does not fall below this share of its mean: it would fill the picture


def draw_curve(
    axes: Axes, rounds: np.ndarray, values: np.ndarray, metric: str, label: str, tint: str, dashes: Any = "-"
) -> None:
    """Mean over replicates and ±1 standard deviation of [E, R] values at [E] rounds; NaN is no value."""
    values = np.ma.masked_invalid(values)
    mean = values.mean(1)
    axes.plot(rounds, mean, linestyle=dashes, color=tint, linewidth=1.6, label=label)
    if values.shape[1] > 1:
        spread = values.std(1, ddof=1)
        low, high = mean - spread, mean + spread
        if axes.get_yscale() == "log":
            low = np.maximum(low, mean * BAND_FLOOR)
        if "accuracy" in metric:
            low, high = low.clip(0, 1), high.clip(0, 1)
        axes.fill_between(rounds, low, high, color=tint, alpha=0.18, linewidth=0)


def smooth(values: np.ndarray, decay: float) -> np.ndarray:
    """Exponential moving average along the first axis, starting at the first value (fedawe Fig. 7: 0.99)."""
    out = np.array(values, dtype=float)
    for position in range(1, len(out)):
        out[position] = decay * out[position - 1] + (1 - decay) * values[position]
    return out


def figure(runs: list[Run], metrics: list[str] | None = None) -> Figure:
    """A panel per metric, of the runs that have it; by default the (up to two) most telling ones that all have."""
    chosen = metrics or telling(runs)[:2]
    with matplotlib.rc_context(STYLE):
        drawing, grid = panels(len(chosen), width=5.0, height=3.6, columns=min(len(chosen), 2))
        for axes, metric in zip(grid, chosen, strict=True):
            _prepare(axes, metric, drawn(metric), metric in LOGARITHMIC)
            for number, run in enumerate(runs):
                if metric in run.metrics:
                    draw_curve(axes, *run.curve(metric), metric, run.label, colour(number), line(number))
            percent(axes.yaxis, metric)
        legend_below(drawing, grid)
    return drawing


def telling(runs: list[Run]) -> list[str]:
    """The metrics that all runs have, the most telling first."""
    shared = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
    return [name for name in PREFERRED if name in shared] or shared


def curves(
    cells: list[Cell],
    metric: str | list[str],
    panel: str | None = None,
    colours: str | None = None,
    dashes: str | None = None,
    log: bool | list[str] = False,
    ema: float | None = None,
    first: int = 0,
    iterations: bool = False,
    also: str | None = None,
    least: float | None = None,
) -> Figure:
    """Panels of curves; fitted ones dashed, and named so.

    Args:
        cells: trained runs.
        metric: one, or a row of panels for each of several, in the terms of `Run.curve`.
        panel, colours, dashes: the axes whose labels make panels, colours and line styles.
        log: logarithmic values; of some metrics where it is a list.
        ema: decay per round of an exponential moving average; None shows the raw values.
        first: round from which on curves are shown.
        iterations: count local steps instead of rounds.
        also: beside every curve, dotted, that of another model, where the run evaluates it too: client_mean.
        least: where the vertical axes begin.
    """
    metrics = [metric] if isinstance(metric, str) else metric
    boxes = [(name, label) for name in metrics for label in labels(cells, panel)]
    tints, styles = labels(cells, colours), labels(cells, dashes)
    with matplotlib.rc_context(STYLE):
        across = len(boxes) // len(metrics)
        drawing, grid = panels(len(boxes), columns=across if across > 1 and len(metrics) > 1 else None)
        for axes, (name, label) in zip(grid, boxes, strict=True):
            logarithmic = log if isinstance(log, bool) else name in log
            _prepare(axes, name, label or drawn(name), logarithmic)
            if iterations:
                axes.set_xlabel("iteration")
            first_of_its_kind = grid[next(n for n, box in enumerate(boxes) if box[0] == name)]
            if axes is not first_of_its_kind:
                axes.sharey(first_of_its_kind)
            if label:
                axes.set_ylabel(drawn(name))
            for cell in at(cells, panel, label):
                assert cell.run is not None
                tint = colour(tints.index(cell.at[colours]) if colours else 0)
                dash: Any = DASHES[styles.index(cell.at[dashes]) % len(DASHES)] if dashes else "-"
                names = [cell.at[axis] for axis in (colours, dashes) if axis]
                if cell.fitted:
                    dash = FITTED_DASHES if dashes else "--"
                    names += [FITTED] * all(FITTED not in name for name in names)
                drawn_here = [(name, names, dash)]
                if also and cell.run.has(other := f"{also}_{name}"):
                    drawn_here.append((other, [*names, MODELS[also].removeprefix("the ")], ":"))
                for quantity, words, style in drawn_here:
                    rounds, values = cell.run.curve(quantity)
                    if ema is not None:
                        values = smooth(values, ema ** float(np.diff(rounds).mean()))
                    shown = rounds >= first
                    along = rounds[shown] * (cell.run.settings["local_steps"] if iterations else 1)
                    draw_curve(axes, along, values[shown], quantity, ", ".join(words), tint, style)
        if least is not None:
            _begin_at(least, grid, [name for name, _ in boxes])
        legend_below(drawing, grid)
    return drawing


def _begin_at(least: float, grid: list[Axes], names: list[str]) -> None:
    """The vertical axes begin there, and end above what panels of the same name show."""
    for axes, name in zip(grid, names, strict=True):
        highest = max(other.dataLim.ymax for other, its in zip(grid, names, strict=True) if its == name)
        logarithmic = axes.get_yscale() == "log"
        axes.set_ylim(least, 1.3 * highest if logarithmic else highest + 0.05 * (highest - least))


def metrics_of(options: dict[str, Any]) -> list[str]:
    """What a picture of this kind with these options shows, of the runs that have it."""
    given = options["metric"]
    metrics = [given] if isinstance(given, str) else list(given)
    return metrics + [f"{options['also']}_{name}" for name in metrics if options.get("also")]


def _prepare(axes: Axes, metric: str, heading: str, logarithmic: bool) -> None:
    axes.set_title(heading)
    axes.set_xlabel("epoch of the newcomers" if metric.startswith(NEWCOMERS) else "round")
    axes.margins(x=0.01)
    if logarithmic:
        axes.set_yscale("log")
