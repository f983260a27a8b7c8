"""The pictures that compare runs, as far as the runs have the data for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedsim.core.settings import display_key
from fedsim.evaluation.columns import is_fraction
from fedsim.evaluation.registry import DISTANCE_COLUMNS, describe_metric
from fedsim.run.tracking.clients import MAX_DETAILED_CLIENTS, MAX_DETAILED_ROUNDS
from fedsim.run.tracking.result import format_spread as after
from fedsim.studies.plots import clients
from fedsim.studies.plots.by_setting import final_by_setting_figure, swept_setting
from fedsim.studies.plots.curves import (
    INTERVAL_BAND,
    STANDARD_DEVIATION_BAND,
    comparison_figure,
    metrics_with_loss,
    preferred_metrics,
)
from fedsim.studies.plots.looks import curve_styles
from fedsim.studies.plots.style import (
    escape_mathtext,
    matplotlib_parameters,
    metric_axis_label,
    panel_figure,
    set_percent_axis,
    venue_font_size,
    wrap_name,
)
from fedsim.studies.results.bold import MIN_RELIABLE_REPLICATES
from fedsim.studies.results.differences import ABSENT_TEXT
from fedsim.studies.results.runs import Run, load


@dataclass
class Picture:
    """A figure with its name, heading and caption.

    Attributes:
        name: file name without suffix.
        heading, caption: what it shows, and how to read it.
        figure: the figure.
    """

    name: str
    heading: str
    caption: str
    figure: Figure


def comparison_pictures(
    runs: list[Run],
    metrics: list[str] | None = None,
    max_metrics: int = 2,
    x: str | None = None,
    limits: Mapping[str, tuple[float, float]] | None = None,
    band: str = STANDARD_DEVIATION_BAND,
) -> Iterator[Picture]:
    """Yield the pictures that compare runs.

    Args:
        runs: the runs to compare.
        metrics: the metrics whose curves are drawn; by default the most informative ones.
        max_metrics: number of these default metrics.
        x: the column along which curves are drawn, or a swept setting by which final values are drawn as well; None:
            rounds.
        limits: metric → limits of the curves' vertical axis.
        band: what the bands of curves and the error bars by a setting show, of `BANDS`.
    """
    key = None if x is None else swept_setting(runs, x)
    x = x if key is None else None
    runs = [dataclasses.replace(run, label=escape_mathtext(run.label)) for run in runs]
    has_several_replicates, num_runs = max(run.replicates for run in runs) > 1, seed_counts_text(runs)
    few_note = f" {FEW_REPLICATES_NOTE}" if has_few_replicates(runs) else ""
    is_interval = band == INTERVAL_BAND
    spread_text = "Student's 95 % interval of the mean" if is_interval else "±1 standard deviation"
    band_sentence = f" Bands are {spread_text} over {num_runs}.{few_note}" if has_several_replicates else ""
    middle_band = (
        f" Bands hold the replicates ({num_runs}) from the 10 % to the 90 % quantile.{few_note}"
        if has_several_replicates and not is_interval
        else band_sentence
    )
    chosen_metrics = metrics or metrics_with_loss(
        [name for name in preferred_metrics(runs) if name not in DISTANCE_COLUMNS][:max_metrics], runs
    )
    if chosen_metrics:
        curves_heading = "Over the rounds" if x is None else f"Over {describe_metric(x).label}"
        logarithmic = any(name in DISTANCE_COLUMNS for name in chosen_metrics)
        sentences = {
            band_sentence: is_interval or not all(name in DISTANCE_COLUMNS for name in chosen_metrics),
            middle_band.replace(" Bands", " On logarithmic axes, bands"): logarithmic and not is_interval,
            " Bands of fractions are cut off at 0 and 100 %.": any(is_fraction(name) for name in chosen_metrics),
        }
        text = "".join(sentence for sentence, applies in sentences.items() if applies)
        text = f"Mean over the replicates.{text}" if has_several_replicates else "One seed."
        yield Picture("curves", curves_heading, text, comparison_figure(runs, chosen_metrics, x, limits, band))
    if len(runs) > 1:
        whiskers = (
            f" Whiskers are ±1 standard deviation over {num_runs}, dots the replicates.{few_note}"
            if has_several_replicates
            else ""
        )
        bars_caption = f"After the last round.{whiskers}"
        yield Picture("final", "Where the runs ended", bars_caption, final_values_figure(runs, metrics))
        if key is not None:
            by_setting_caption = (
                f"After the last round. Error bars are {spread_text} over {num_runs}.{few_note}"
                if has_several_replicates
                else "After the last round. One seed."
            )
            yield Picture(
                "by_setting", f"By {display_key(key)}", by_setting_caption,
                final_by_setting_figure(runs, key, chosen_metrics, band),
            )  # fmt: skip
    if distances := [name for name in DISTANCE_COLUMNS if any(name in run.metrics for run in runs)]:
        distance_caption = f"Euclidean distance of the evaluated model, on a logarithmic axis.{middle_band}"
        yield Picture(
            "distances",
            "How far from the reference points",
            distance_caption,
            comparison_figure(runs, distances, x, band=band),
        )
    if drawing := clients.accuracy_box_plot(runs):
        caption = (
            "A dot is a client, evaluated after the last round on the samples that the axis names; all replicates "
        )
        caption += (
            "together. Boxes hold the middle half, whiskers the middle 80 %, the line is the median, the diamond "
        )
        caption += "the mean."
        yield Picture("clients", "From client to client", caption, drawing)
    for metric in dict.fromkeys(name for run in runs if run.clients is not None for name in run.clients.metrics):
        if drawing := clients.accuracy_box_plot(runs, metric):
            caption = "A dot is a client for which it exists, as above."
            yield Picture(f"clients_{metric}", f"From client to client: {metric}", caption, drawing)
    if drawing := clients.availability_figure(runs):
        caption = (
            f"First replicate, at most the first {MAX_DETAILED_ROUNDS} rounds and {MAX_DETAILED_CLIENTS} clients. "
        )
        caption += "Dark: the client could take part. Above: how many could; the line is their mean."
        yield Picture("availability", "Who was there", caption, drawing)
    if drawing := clients.partition_figure(runs):
        caption = f"First replicate, at most the first {clients.MAX_BUBBLE_CLIENTS} clients. "
        caption += "A circle's area is the share of the class in the client's samples."
        yield Picture("partition", "Who holds what", caption, drawing)


FEW_REPLICATES_NOTE = f"A spread over fewer than {MIN_RELIABLE_REPLICATES} seeds is itself uncertain."


def seed_counts_text(runs: list[Run]) -> str:
    """Return the number of seeds of the runs as text, for a caption."""
    counts = sorted({run.replicates for run in runs})
    return f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s' * (counts[0] > 1)}"


def has_few_replicates(runs: list[Run]) -> bool:
    """Return whether a run has several seeds, but fewer than `MIN_RELIABLE_REPLICATES`."""
    return any(1 < run.replicates < MIN_RELIABLE_REPLICATES for run in runs)


def figures_of_folder(folder: Path) -> Iterator[tuple[str, Figure]]:
    """Yield the headings and figures of one run, which trackers show at its end."""
    yield from ((picture.heading, picture.figure) for picture in comparison_pictures([load(folder)]))


def final_values_figure(runs: list[Run], metrics: list[str] | None = None) -> Figure:
    """Draw a bar per run, mean ± 1 standard deviation over replicates, for the first two metrics; by default for up to
    two most informative ones."""
    metrics, colours = (metrics or preferred_metrics(runs))[:2], [style.colour for style in curve_styles(runs).styles]
    with matplotlib.rc_context(matplotlib_parameters()):
        width = 5.4 if len(metrics) > 1 else 8.0
        figure, grid = panel_figure(len(metrics), width=width, height=1.0 + 0.42 * len(runs))
        for axes, metric in zip(grid, metrics, strict=True):
            for series_position, run in enumerate(runs):
                final_metric_values = run.final_values(metric)
                final_mean, final_spread = run.final(metric)
                if run.has_metric(metric):
                    axes.barh(series_position, final_mean, 0.62, color=colours[series_position], alpha=0.85)
                if len(final_metric_values) > 1:
                    axes.errorbar(
                        final_mean, series_position, xerr=final_spread, color="#333333", capsize=3, linewidth=1.2
                    )
                    axes.plot(
                        final_metric_values,
                        np.full(len(final_metric_values), series_position),
                        ".",
                        color="#333333",
                        markersize=4,
                        alpha=0.6,
                    )
                axes.annotate(
                    mean_text(metric, final_mean, final_spread) if run.has_metric(metric) else ABSENT_TEXT,
                    (1, series_position), (6, 0),
                    xycoords=("axes fraction", "data"), textcoords="offset points", va="center",
                    fontsize=venue_font_size(9),
                )  # fmt: skip
            axes.set_xlabel(metric_axis_label(metric))
            axes.set_ylim(len(runs) - 0.45, -0.55)
            axes.set_yticks(range(len(runs)), [wrap_name(run.label) for run in runs] if axes is grid[0] else [])
            axes.grid(visible=False, axis="y")
            if is_fraction(metric):
                axes.set_xlim(0, 1)
            set_percent_axis(axes.xaxis, metric)
    return figure


def mean_text(metric: str, mean: float, std: float) -> str:
    """Format mean ± standard deviation, fractions in per cent, others to four digits; a NaN deviation is left out."""
    if is_fraction(metric):
        return f"{100 * mean:.1f}" + ("" if np.isnan(std) else f" ± {100 * std:.1f}") + " %"
    return f"{mean:.4g}{after(std)}"
