"""The trials of a tuning: their curves, and their last values over a knob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedsim.studies.plots.style import (
    PALETTE,
    escape_mathtext,
    matplotlib_parameters,
    metric_axis_label,
    panel_figure,
    set_percent_axis,
)
from fedsim.studies.results.paired import PairedDifference

UNSELECTED_COLOUR = "#B0B0B0"


@dataclass(frozen=True)
class TrialCurve:
    """One trial.

    Attributes:
        colour_position: on the horizontal axis of the knob.
        rounds: of its evaluations.
        values: [evaluations, R] of the metric.
        is_finalist: whether it was not dropped.
        is_chosen: whether it was chosen.
    """

    colour_position: float
    rounds: Sequence[int]
    values: np.ndarray
    is_finalist: bool
    is_chosen: bool


def trials_figure(curves: Sequence[TrialCurve], metric: str, knob: str, labels: Sequence[str] | None = None) -> Figure:
    """Curves of all trials, and their last values over a knob; dropped trials are grey.

    Args:
        curves: of the trials.
        metric: what was measured.
        knob: its key.
        labels: of its values, if they are not numbers; positions are then 0, 1, …
    """
    with matplotlib.rc_context(matplotlib_parameters()):
        figure, (over_rounds, over_knob) = panel_figure(2, columns=2)
        for trial in sorted(curves, key=lambda trial: (trial.is_chosen, trial.is_finalist)):
            colour = PALETTE[1] if trial.is_chosen else PALETTE[0] if trial.is_finalist else UNSELECTED_COLOUR
            means = trial.values.mean(1)
            over_rounds.plot(trial.rounds, means, color=colour, linewidth=2 if trial.is_chosen else 1)
            error = PairedDifference(trial.values[-1]).standard_error
            over_knob.errorbar(
                trial.colour_position,
                means[-1],
                error,
                color=colour,
                marker="o",
                markersize=7 if trial.is_chosen else 4,
                capsize=2,
            )
        positions = [trial.colour_position for trial in curves]
        if labels is not None:
            over_knob.set_xticks(range(len(labels)), [escape_mathtext(label) for label in labels])
        elif min(positions) > 0 and max(positions) >= 10 * min(positions):
            over_knob.set_xscale("log")
        over_rounds.set_xlabel("round")
        over_knob.set_xlabel(escape_mathtext(knob))
        for axes in (over_rounds, over_knob):
            axes.set_ylabel(metric_axis_label(metric, 28))
            set_percent_axis(axes.yaxis, metric)
        finite = np.concatenate([trial.values.mean(1) for trial in curves])
        finite = finite[np.isfinite(finite)]
        if len(finite):  # trials that diverge must not hide the others
            low, high = np.percentile(finite, [5, 95])
            lower_limit = max(finite.min(), low - 2 * (high - low))
            highest = min(finite.max(), high + 2 * (high - low))
            margin = 0.05 * (highest - lower_limit) or 0.05 * abs(highest) or 1.0
            for axes in (over_rounds, over_knob):
                axes.set_ylim(lower_limit - margin, highest + margin)
    return figure
