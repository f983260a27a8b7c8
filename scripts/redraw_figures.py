"""Draw the figures of curves of committed results again, from their curves.csv, so that a change of the figures' style
needs no new runs.

The file has the means and standard deviations over seeds, at most 150 rounds of each run. A band on a logarithmic axis
shows quantiles, which these do not determine: it is left out. Figures along another column than rounds are not drawn.

python scripts/redraw_figures.py experiments/apfl/results/fig2-paper ...
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from fedsim.core.files import replacement_file
from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.plots.curves import curve_metrics
from fedsim.studies.plots.figure_kinds import draw_figure
from fedsim.studies.plots.style import save_small_png
from fedsim.studies.reproduce.recipe import load_recipe


@dataclass
class StoredCurves:
    """The curves of one run, in place of the run.

    Attributes:
        curve_by_metric: metric → rounds [E], and values [E, 2] of their mean and standard deviation, or [E, 1].
    """

    curve_by_metric: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]

    def has_metric(self, metric: str) -> bool:
        """Return whether the file has the metric."""
        return metric in self.curve_by_metric

    def curve_along(self, metric: str, x: str | None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return rounds and values."""
        assert x is None
        return self.curve_by_metric[metric]


def read_cells(path: Path, logarithmic: set[str]) -> list[ResultCell]:
    """Return the runs of a curves.csv in their order; curves of the logarithmic metrics have means only."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(line for line in file if not line.startswith("#")))
    axes = [name for name in lines[0] if name not in ("metric", "round", "mean", "std")]
    runs: dict[tuple[str, ...], dict[str, list[tuple[int, float, float]]]] = {}
    for line in lines:
        curves = runs.setdefault(tuple(line[axis] for axis in axes), {})
        curves.setdefault(line["metric"], []).append((int(line["round"]), float(line["mean"]), float(line["std"])))
    cells = []
    for labels, curves in runs.items():
        stored_curves = {}
        for metric, points in curves.items():
            rounds, mean, std = np.array(points).T
            spread = std / np.sqrt(2)  # two values at this distance from the mean have this standard deviation
            values = mean[:, None] if metric in logarithmic else np.stack([mean - spread, mean + spread], 1)
            stored_curves[metric] = rounds.astype(np.int64), values
        cells.append(ResultCell(dict(zip(axes, labels, strict=True)), StoredCurves(stored_curves)))  # type: ignore[arg-type]
    return cells


def redraw(folder: Path) -> None:
    """Write figure.png of a results folder.

    Raises:
        SystemExit: its figure does not show curves by round.
    """
    recipe = load_recipe(f"{folder.parent.parent.name}/{folder.name.rpartition('-')[0]}")
    options = recipe.figure or {}
    if options.get("kind") != "curves" or options.get("x") or options.get("iterations"):
        sys.exit(f"{folder}: its figure does not show curves by round; make it with fedsim-reproduce")
    log = options.get("log", False)
    logarithmic = set(curve_metrics(options if log is True else {**options, "metric": log or []}))
    cells = read_cells(folder / "curves.csv", logarithmic)
    for cell in cells:
        cell.is_fitted = recipe.has_fitted_label(cell.axis_labels)
    figure = draw_figure(cells, options)
    with replacement_file(folder / "figure.png", "wb") as file:
        save_small_png(figure, file)
    plt.close(figure)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        redraw(Path(argument).resolve())
