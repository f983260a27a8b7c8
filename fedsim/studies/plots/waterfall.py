"""Waterfall charts, which divide the difference between two numbers into steps."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedsim.studies.plots.style import PALETTE, matplotlib_parameters, panel_figure, typeset_formulas, wrap_name
from fedsim.studies.results.paired import PairedDifference


def waterfall_figure(labels: list[str], steps: np.ndarray, start: float, unit: str) -> Figure:
    """Draw bars from the run without all causes to the actual run; each cause begins where the one before it ends.

    Args:
        labels: labels of the causes.
        steps: [k, R] the change due to each cause, per seed; bars show the mean, lines its 95 % interval over seeds.
        start: where the first bar begins, the value without all causes.
        unit: label of the vertical axis.
    """
    means = steps.mean(1)
    tops = start + np.concatenate([[0.0], np.cumsum(means)])
    with matplotlib.rc_context(matplotlib_parameters()):
        drawing, (axes,) = panel_figure(1, width=max(4.4, 1.2 * (len(labels) + 2)), columns=1)
        axes.bar(0, start, 0.7, color="#7F7F7F")
        lowest, highest = float(min(tops)), float(max(tops))
        for number, mean in enumerate(means):
            colour = PALETTE[1] if mean < 0 else PALETTE[0]
            axes.bar(number + 1, mean, 0.7, bottom=tops[number], color=colour)
            if steps.shape[1] > 1:
                lower_bound, upper_bound = PairedDifference(steps[number]).confidence_interval
                half_width = (upper_bound - lower_bound) / 2
                axes.errorbar(number + 1, tops[number + 1], half_width, color="black", linewidth=1, capsize=2)
                if np.isfinite(half_width):
                    lowest, highest = (
                        min(lowest, tops[number + 1] - half_width),
                        max(highest, tops[number + 1] + half_width),
                    )
            axes.plot([number + 0.35, number + 0.65], [tops[number]] * 2, color="black", linewidth=0.6)
        axes.bar(len(labels) + 1, tops[-1], 0.7, color="#7F7F7F")
        margin = 0.15 * (highest - lowest or abs(highest) or 1.0)
        axes.set_ylim(lowest - 2 * margin, highest + margin)
        names = ["without all", *labels, "as it is"]
        axes.set_xticks(range(len(names)), [wrap_name(name, 12) for name in names])
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(typeset_formulas(unit))
    return drawing
