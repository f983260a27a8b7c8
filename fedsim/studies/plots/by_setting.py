"""Final values by a swept setting: one line per combination of the other settings."""

from __future__ import annotations

from numbers import Real

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedsim.core.settings import display_key
from fedsim.studies.plots.curves import INTERVAL_BAND, INTERVAL_LEVEL, STANDARD_DEVIATION_BAND
from fedsim.studies.plots.style import (
    legend_below,
    matplotlib_parameters,
    metric_axis_label,
    nth_colour,
    panel_figure,
    set_log_labels,
    set_percent_axis,
)
from fedsim.studies.results.differences import run_name, setting_value_text, swept_settings
from fedsim.studies.results.run_measures import TableCell
from fedsim.studies.results.runs import Run

LOG_AXIS_RATIO = 20  # from the smallest to the largest positive value
MARKERS = "osD^vP"


def swept_setting(runs: list[Run], name: str) -> str | None:
    """Return the key of the swept setting that a user names; None if no such setting was swept."""
    return next((key for key in swept_settings(runs) if name in (key, display_key(key))), None)


def final_by_setting_figure(
    runs: list[Run], key: str, metrics: list[str], band: str = STANDARD_DEVIATION_BAND
) -> Figure:
    """Draw each metric after the last round by the value of a setting, with error bars over replicates.

    Args:
        runs: runs that have different values of the setting, and maybe of others.
        key: the setting, of `swept_settings`.
        metrics: the metrics, a panel each.
        band: what the error bars show, of `BANDS`.
    """
    other_keys = [name for name in swept_settings(runs) if name != key]
    runs_by_line: dict[str, list[Run]] = {}
    for run in runs:
        if key in run.settings:
            runs_by_line.setdefault(run_name(run, other_keys), []).append(run)
    position_of_text, is_numeric = _positions([run for line in runs_by_line.values() for run in line], key)
    positions = sorted(set(position_of_text.values()))
    with matplotlib.rc_context(matplotlib_parameters()):
        figure, grid = panel_figure(len(metrics), width=5.0, height=3.6, columns=min(len(metrics), 2))
        for axes, metric in zip(grid, metrics, strict=True):
            for number, (label, line_runs) in enumerate(runs_by_line.items()):
                points = sorted(
                    (position_of_text[setting_value_text(run.settings, key)], *_mean_and_spread(run, metric, band))
                    for run in line_runs
                    if run.has_metric(metric)
                )
                if not points:
                    continue
                x, mean, spread = np.array(points).T
                axes.errorbar(
                    x, mean, yerr=np.nan_to_num(spread), label=label, color=nth_colour(number), capsize=3,
                    marker=MARKERS[number % len(MARKERS)], linestyle="-" if is_numeric else "none",
                )  # fmt: skip
            axes.set_xlabel(display_key(key))
            axes.set_ylabel(metric_axis_label(metric))
            set_percent_axis(axes.yaxis, metric)
            if not is_numeric:
                axes.set_xticks(range(len(position_of_text)), list(position_of_text))
            elif positions[0] > 0 and positions[-1] >= LOG_AXIS_RATIO * positions[0]:
                axes.set_xscale("log")
                set_log_labels(axes.xaxis)
        legend_below(figure, grid)
    return figure


def _mean_and_spread(run: Run, metric: str, band: str) -> tuple[float, float]:
    mean, spread = run.final(metric)
    if band == INTERVAL_BAND:
        spread = TableCell(run.final_values(metric), interval_level=INTERVAL_LEVEL).interval_half_width
    return mean, spread


def _positions(runs: list[Run], key: str) -> tuple[dict[str, float], bool]:
    """Return text of a value → its place on the axis, and whether places are the values: numbers, unlike words."""
    values = {setting_value_text(run.settings, key): run.settings[key] for run in runs}
    if all(isinstance(value, Real) and not isinstance(value, bool) for value in values.values()):
        return {text: float(value) for text, value in values.items()}, True
    return {text: float(position) for position, text in enumerate(values)}, False
