"""Curves of metrics over rounds, mean with a band of one standard deviation over replicates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedsim.core.errors import ConfigError
from fedsim.evaluation.columns import EVALUATED_MODEL_DESCRIPTIONS, is_fraction
from fedsim.evaluation.registry import DISTANCE_COLUMNS, NEWCOMER_PREFIX
from fedsim.studies.plots.cells import ResultCell, cells_at_label, labels_of_axis
from fedsim.studies.plots.looks import curve_styles
from fedsim.studies.plots.style import (
    FITTED_DASHES,
    FITTED_LABEL,
    LINE_STYLES,
    legend_below,
    matplotlib_parameters,
    metric_axis_label,
    nth_colour,
    panel_figure,
    set_log_labels,
    set_percent_axis,
    typeset_formulas,
    venue_font_size,
)
from fedsim.studies.results.paired import student_quantile
from fedsim.studies.results.runs import Run, final_metric_columns

PREFERRED_METRICS = (
    "test_accuracy",
    "test_accuracy_by_client_worst10",
    "client_accuracy_worst10",
    "distance_to_optimum",
    "distance_to_po",
    "distance_to_ps",
    "distance_to_nash",
    "performative_risk",
    "train_loss",
    "test_loss",
)
BAND_QUANTILES = (0.1, 0.9)  # of a band on a logarithmic axis, where mean − deviation may not be positive
MAX_AXIS_STRETCH = 1.5  # round 0 is outside the view if it would stretch the axis by more than this factor
INTERVAL_LEVEL = 0.95  # of an interval band
BANDS = STANDARD_DEVIATION_BAND, INTERVAL_BAND = "std", "interval"
LOSS_METRICS = ("test_loss", "train_loss")


def draw_curve(
    axes: Axes,
    rounds: np.ndarray,
    values: np.ndarray,
    metric: str,
    label: str,
    colour: str,
    dashes: Any = "-",
    marker: str = "",
    band: str = STANDARD_DEVIATION_BAND,
) -> None:
    """Draw the mean over replicates of values [E, R] at rounds [E], with a band of ±1 standard deviation.

    On a logarithmic axis the band is from the 10 % to the 90 % quantile. With `band='interval'` it is Student's 95 %
    interval of the mean on both axes. NaN values are left out.
    """
    values = np.ma.masked_invalid(values)
    mean = values.mean(1)
    marker_interval = max(1, len(rounds) // 8)
    marker_options: dict[str, Any] = {
        "marker": marker,
        "markersize": venue_font_size(4.5),
        "markevery": marker_interval,
    }
    axes.plot(
        rounds, mean, linestyle=dashes, color=colour, linewidth=venue_font_size(1.6), label=label, **marker_options
    )
    if values.shape[1] > 1:
        spread = values.std(1, ddof=1)
        if band == INTERVAL_BAND:
            spread = spread * _interval_factors(values.count(1))
        low, high = mean - spread, mean + spread
        if axes.get_yscale() == "log" and band == STANDARD_DEVIATION_BAND:
            samples = [row.compressed() for row in values]
            low, high = np.array(
                [np.quantile(sample, BAND_QUANTILES) if len(sample) else (np.nan, np.nan) for sample in samples]
            ).T
        if is_fraction(metric):
            low, high = low.clip(0, 1), high.clip(0, 1)
        axes.fill_between(rounds, low, high, color=colour, alpha=0.18, linewidth=0)


def _interval_factors(counts: np.ndarray) -> np.ndarray:
    """Return by what a standard deviation over so many replicates is multiplied for half of the 95 % interval of their
    mean; NaN for a single one."""
    share = 0.5 + INTERVAL_LEVEL / 2
    return np.array([student_quantile(share, n - 1) / np.sqrt(n) if n > 1 else np.nan for n in counts])


def exponential_moving_average(values: np.ndarray, decay: float) -> np.ndarray:
    """Return the exponential moving average along the first axis, starting at the first value (fedawe Fig. 7: 0.99)."""
    smoothed = np.array(values, dtype=float)
    for position in range(1, len(smoothed)):
        smoothed[position] = decay * smoothed[position - 1] + (1 - decay) * values[position]
    return smoothed


def comparison_figure(
    runs: list[Run],
    metrics: list[str] | None = None,
    x: str | None = None,
    limits: Mapping[str, tuple[float, float]] | None = None,
    band: str = STANDARD_DEVIATION_BAND,
) -> Figure:
    """Draw a panel per metric, with the curves of the runs that have it.

    Args:
        runs: the runs to compare.
        metrics: the metrics that are drawn; by default up to two most informative ones, and a loss.
        x: the column along which curves are drawn; None: rounds.
        limits: metric → limits of its vertical axis.
        band: of `BANDS`.
    """
    chosen_metrics, styles = metrics or metrics_with_loss(preferred_metrics(runs)[:2], runs), curve_styles(runs)
    with matplotlib.rc_context(matplotlib_parameters()):
        columns = 3 if len(chosen_metrics) == 3 else min(len(chosen_metrics), 2)
        drawing, grid = panel_figure(
            len(chosen_metrics), width=5.0 if columns < 3 else 4.2, height=3.6, columns=columns
        )
        for axes, metric in zip(grid, chosen_metrics, strict=True):
            _prepare_axes(axes, metric, "", metric in DISTANCE_COLUMNS, x)
            axes.set_ylabel(metric_axis_label(metric, _max_label_length(axes)))
            for run, style in zip(runs, styles.styles, strict=True):
                if run.has_metric(metric):
                    draw_curve(
                        axes, *run.curve_along(metric, x), metric, "", style.colour, style.dashes, style.marker, band
                    )
            _hide_round_0(axes)
            if limits and metric in limits:
                axes.set_ylim(*limits[metric])
            set_percent_axis(axes.yaxis, metric)
        legend_below(drawing, grid, styles.legend_entries(), styles.legend_title)
    return drawing


def _max_label_length(axes: Axes) -> int:
    """Return how many characters of a label fit on the vertical axis: 36 at 3.6 inches and a font of 10 points."""
    drawing = axes.figure
    assert isinstance(drawing, Figure)
    rows = axes.get_gridspec().nrows  # type: ignore[union-attr]
    return max(12, int(36 * drawing.get_figheight() / rows / 3.6 / venue_font_size(1)))


def _hide_round_0(axes: Axes) -> None:
    """Limit a linear axis to the later rounds if the initial model would stretch it too much."""
    points = [line.get_xydata() for line in axes.get_lines()]
    points += [path.vertices for band in axes.collections for path in band.get_paths()]
    if axes.get_yscale() == "log" or not points:
        return
    x, y = np.ma.masked_invalid(np.concatenate([np.asarray(p) for p in points])).T
    later_values = y[x > 0].compressed()
    if len(set(x.compressed())) < 4 or not len(later_values):
        return
    low, high = later_values.min(), later_values.max()
    if high > low and y.max() - y.min() > MAX_AXIS_STRETCH * (high - low):
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def metrics_with_loss(metrics: list[str], runs: list[Run]) -> list[str]:
    """Return the metrics with a loss among them if a run has one: accuracy does not show that a loss grows."""
    if any("loss" in name or "risk" in name for name in metrics):
        return metrics
    return metrics[:1] + [name for name in LOSS_METRICS if any(run.has_metric(name) for run in runs)][:1] + metrics[1:]


def preferred_metrics(runs: list[Run]) -> list[str]:
    """Return the metrics of the runs, those of all runs before those of some, the most informative first."""
    available_metrics = final_metric_columns(runs)
    order = [*PREFERRED_METRICS, *(name for name in available_metrics if name not in PREFERRED_METRICS)]
    selected_metrics = [name for name in PREFERRED_METRICS if name in available_metrics] or available_metrics
    return sorted(selected_metrics, key=lambda name: (not all(run.has_metric(name) for run in runs), order.index(name)))


def curves_figure(  # noqa: PLR0913 (its options are the keys of a recipe's figure)
    cells: list[ResultCell],
    metric: str | list[str],
    panel: str | None = None,
    colours: str | None = None,
    dashes: str | None = None,
    log: bool | list[str] = False,
    ema: float | None = None,
    first: int = 0,
    iterations: bool = False,
    also: str | None = None,
    minimum: float | None = None,
    x: str | None = None,
) -> Figure:
    """Draw panels of curves; fitted ones are dashed and labelled as fitted.

    Args:
        cells: trained runs.
        metric: a metric as `Run.curve` takes it; a list makes a row of panels for each of several.
        panel, colours, dashes: the axes whose labels make panels, colours and line styles.
        log: whether the vertical axis is logarithmic; a list names the metrics for which it is.
        ema: decay per round of an exponential moving average; None shows the raw values.
        first: first round that is shown.
        iterations: count local steps instead of rounds.
        also: another model, such as client_mean, whose curve is added as a dotted line if the run evaluates
            it.
        minimum: where the vertical axes begin.
        x: the column along which curves are drawn, such as virtual_seconds (`Run.curve_along`), and to which `first`
            refers; None: rounds.
    """
    if x and (iterations or ema is not None):
        raise ConfigError(f"figure: x={x} goes with neither iterations nor ema, which count rounds")
    metrics = [metric] if isinstance(metric, str) else metric
    lines = _LineStyles(labels_of_axis(cells, colours), labels_of_axis(cells, dashes), colours, dashes, also)
    boxes = [(name, label) for name in metrics for label in labels_of_axis(cells, panel)]
    with matplotlib.rc_context(matplotlib_parameters()):
        num_columns = len(boxes) // len(metrics)
        drawing, grid = panel_figure(len(boxes), columns=num_columns if num_columns > 1 and len(metrics) > 1 else None)
        for axes, (name, label) in zip(grid, boxes, strict=True):
            logarithmic = log if isinstance(log, bool) else name in log
            _prepare_axes(axes, name, typeset_formulas(label), logarithmic, x)
            if iterations:
                axes.set_xlabel("iteration")
            first_of_its_kind = grid[next(n for n, box in enumerate(boxes) if box[0] == name)]
            if axes is not first_of_its_kind:
                axes.sharey(first_of_its_kind)
            axes.set_ylabel(metric_axis_label(name, 36))
            set_percent_axis(axes.yaxis, name)
            for cell in cells_at_label(cells, panel, label):
                assert cell.run is not None
                for quantity, quantity_label, style in lines.drawn_quantities(cell, name):
                    rounds, values = cell.run.curve_along(quantity, x)
                    if ema is not None:
                        values = exponential_moving_average(values, ema ** float(np.diff(rounds).mean()))
                    visible_mask = rounds >= first
                    x_values = rounds[visible_mask]
                    if iterations:
                        x_values = x_values * cell.run.settings["local_steps"]
                    draw_curve(
                        axes, x_values, values[visible_mask], quantity, quantity_label, lines.colour(cell), style
                    )
        if minimum is not None:
            _set_lower_limit(minimum, grid, [name for name, _ in boxes])
        legend_below(drawing, grid)
    return drawing


@dataclass
class _LineStyles:
    """The colours and line styles that distinguish the curves of a figure.

    Attributes:
        colour_labels, dash_labels: the labels along `colours` and `dashes`, in the order of the colours and line
            styles.
        colour_axis, dash_axis, extra_quantity: see `curves`.
    """

    colour_labels: list[str]
    dash_labels: list[str]
    colour_axis: str | None
    dash_axis: str | None
    extra_quantity: str | None

    def colour(self, cell: ResultCell) -> str:
        """Return the colour of a run's lines."""
        if self.colour_axis is None:
            return nth_colour(0)
        return nth_colour(self.colour_labels.index(cell.axis_labels[self.colour_axis]))

    def drawn_quantities(self, cell: ResultCell, metric: str) -> list[tuple[str, str, Any]]:
        """Return the quantities of a run that are drawn, each with its label and line style."""
        dash: Any = "-"
        if self.dash_axis is not None:
            dash = LINE_STYLES[self.dash_labels.index(cell.axis_labels[self.dash_axis]) % len(LINE_STYLES)]
        names = [cell.axis_labels[axis] for axis in (self.colour_axis, self.dash_axis) if axis]
        if cell.is_fitted:
            dash = "--" if self.dash_axis is None else FITTED_DASHES
            if all(FITTED_LABEL not in name for name in names):
                names.append(FITTED_LABEL)
        lines = [(metric, ", ".join(names), dash)]
        companion_metric = f"{self.extra_quantity}_{metric}"
        if self.extra_quantity and cell.run is not None and cell.run.has_metric(companion_metric):
            lines.append(
                (
                    companion_metric,
                    ", ".join([*names, EVALUATED_MODEL_DESCRIPTIONS[self.extra_quantity].removeprefix("the ")]),
                    ":",
                )
            )
        return lines


def _set_lower_limit(minimum: float, grid: list[Axes], names: list[str]) -> None:
    """Start the vertical axes at `minimum`, and end them above the values of panels with the same name."""
    for axes, name in zip(grid, names, strict=True):
        highest = max(
            panel_axes.dataLim.ymax for panel_axes, panel_name in zip(grid, names, strict=True) if panel_name == name
        )
        logarithmic = axes.get_yscale() == "log"
        axes.set_ylim(minimum, 1.3 * highest if logarithmic else highest + 0.05 * (highest - minimum))


def curve_metrics(options: dict[str, Any]) -> list[str]:
    """Return the metrics that a figure of curves with these options shows."""
    metric_option = options["metric"]
    metrics = [metric_option] if isinstance(metric_option, str) else list(metric_option)
    return metrics + [f"{options['also']}_{name}" for name in metrics if options.get("also")]


def _prepare_axes(axes: Axes, metric: str, heading: str, logarithmic: bool, x: str | None = None) -> None:
    axes.set_title(heading)
    x_values = "round" if x is None else metric_axis_label(x)
    axes.set_xlabel("epoch of the newcomers" if metric.startswith(NEWCOMER_PREFIX) else x_values)
    axes.margins(x=0.01)
    if logarithmic:
        axes.set_yscale("log")
        set_log_labels(axes.yaxis)
