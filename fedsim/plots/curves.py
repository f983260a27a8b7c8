"""Curves of metrics over rounds, mean with a band of one standard deviation over replicates."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsim.plots.runs import Run

TITLES = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "train_loss": "training loss, mean over clients",
    "train_accuracy": "training accuracy, mean over clients",
    "client_accuracy_worst10": "accuracy of the worst tenth of clients",
    "distance_to_optimum": "distance to the optimum",
}
PREFERRED = ("test_accuracy", "client_accuracy_worst10", "distance_to_optimum", "train_loss")
LOGARITHMIC = ("distance_to_optimum",)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")  # Okabe–Ito

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "figure.dpi": 150,
    "savefig.bbox": "tight",
}


def draw_curve(axes: Axes, run: Run, metric: str, colour: str, style: str = "-") -> None:
    """One run's curve: mean over replicates, ±1 standard deviation."""
    rounds, values = run.curve(metric)
    mean = values.mean(1)
    axes.plot(rounds, mean, style, color=colour, linewidth=1.6, label=run.label)
    if values.shape[1] > 1:
        spread = values.std(1, ddof=1)
        low, high = mean - spread, mean + spread
        if metric in LOGARITHMIC:
            low = np.maximum(low, mean * 0.1)  # a band down to zero would fill the picture
        if "accuracy" in metric:
            low, high = low.clip(0, 1), high.clip(0, 1)
        axes.fill_between(rounds, low, high, color=colour, alpha=0.18, linewidth=0)


def figure(runs: list[Run], metrics: list[str] | None = None) -> Figure:
    """A panel per metric that all runs have; by default the (up to two) most telling ones."""
    shared = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
    chosen = metrics or ([name for name in PREFERRED if name in shared] or shared)[:2]
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(5.0 * len(chosen), 3.6), layout="constrained")
        panels = drawing.subplots(1, len(chosen), squeeze=False)[0]
        for axes, metric in zip(panels, chosen, strict=True):
            for number, run in enumerate(runs):
                colour, lap = COLOURS[number % len(COLOURS)], number // len(COLOURS)
                draw_curve(axes, run, metric, colour, ("-", "--", ":")[lap % 3])
            axes.set_title(TITLES.get(metric, metric))
            axes.set_xlabel("round")
            axes.margins(x=0.01)
            if metric in LOGARITHMIC:
                axes.set_yscale("log")
        panels[0].legend(fontsize=9)
    return drawing
