"""Curves of one metric: mean over seeds, and a band around it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fedsim.evaluation.columns import is_fraction
from fedsim.studies.results.run_measures import TableCell, final_metric_measure
from fedsim.studies.results.runs import Run

DEVIATION_BAND, INTERVAL_BAND, NO_BAND = "± 1 standard deviation", "95 % interval of the mean", "no band"
BAND_KINDS = (DEVIATION_BAND, INTERVAL_BAND, NO_BAND)
MAX_CURVE_POINTS = 400  # points of a curve, about the pixels of a page


@dataclass(frozen=True)
class Curve:
    """The curve of a metric with its band.

    Attributes:
        rounds: [E] rounds of the evaluations.
        mean: [E] mean over the replicates that have a number, in the metric's unit; fractions are in per cent.
        lower_band, upper_band: [E] limits of the band; NaN where fewer than two replicates have a number.
    """

    rounds: np.ndarray
    mean: np.ndarray
    lower_band: np.ndarray
    upper_band: np.ndarray


def make_curve(run: Run, name: str, band: str = DEVIATION_BAND) -> Curve | None:
    """Return the curve of a metric; None if the run has not measured it."""
    if not run.has_metric(name):
        return None
    rounds, values = run.curve(name)
    step = max(1, math.ceil(len(rounds) / MAX_CURVE_POINTS))
    positions = np.arange(len(rounds) - 1, -1, -step)[::-1]  # the last evaluation is always shown
    rounds, values = rounds[positions], np.ma.masked_invalid(values[positions])
    mean = values.mean(1)
    half_width = _half_width(values, band)
    low, high = (end.filled(np.nan) for end in (mean - half_width, mean + half_width))
    mean = np.ma.filled(mean, np.nan)
    if is_fraction(name):
        mean, low, high = 100 * mean, 100 * low.clip(0, 1), 100 * high.clip(0, 1)
    return Curve(rounds, mean, low, high)


def _half_width(values: np.ma.MaskedArray, band: str) -> np.ma.MaskedArray:
    """Return the half-width of the band [E]; masked where fewer than two replicates have a number."""
    counts = values.count(1)
    too_few_mask = (counts < 2) | (band == NO_BAND)
    deviation = np.ma.masked_where(
        too_few_mask, values.std(1, ddof=1) if values.shape[1] > 1 else np.zeros(len(values))
    )
    if band == INTERVAL_BAND:
        safe_counts = np.maximum(counts, 2)
        deviation = deviation * stats.t.ppf(0.975, safe_counts - 1) / np.sqrt(safe_counts)
    return deviation


def final_value_text(run: Run, name: str) -> str:
    """Return mean ± standard deviation at the last evaluation as text; '' if the run has not measured the metric."""
    if not run.has_metric(name):
        return ""
    text: str = TableCell(run.final_values(name), run.seeds).format_entry(final_metric_measure(name, [run]))[0]
    return text
