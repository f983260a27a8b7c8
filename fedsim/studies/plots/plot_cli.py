"""`fedsim-plot RUN_DIR…`: compare runs by a table on the terminal, by pictures, and by a report in one HTML file."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.core.files import replacement_file
from fedsim.core.speaking import tolerate_broken_pipes
from fedsim.studies.plots.by_setting import swept_setting
from fedsim.studies.plots.compare import (
    FEW_REPLICATES_NOTE,
    Picture,
    comparison_pictures,
    has_few_replicates,
    seed_counts_text,
)
from fedsim.studies.plots.curves import BANDS, STANDARD_DEVIATION_BAND
from fedsim.studies.plots.html_report import report_html
from fedsim.studies.plots.style import PALETTE_DESCRIPTION, matplotlib_parameters
from fedsim.studies.plots.venues import VENUES, use_venue
from fedsim.studies.results.differences import load_runs, swept_keys
from fedsim.studies.results.forms import TABLE_FORMATTERS
from fedsim.studies.results.run_measures import TableCell, final_metric_measure
from fedsim.studies.results.runs import Run, final_metric_columns
from fedsim.studies.results.table import ResultTable

PICTURE_FORMATS = ("png", "pdf", "svg")
UNDATED_METADATA: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}  # without dates, so that equal pictures are equal files
INCREASING_COLUMNS = ("virtual_seconds", "total_bytes_up", "total_bytes_down", "samples", "seconds")


@tolerate_broken_pipes()
def main(arguments: list[str] | None = None) -> None:
    """Entry point of `fedsim-plot`."""
    options = _parser().parse_args(arguments)
    try:
        runs = load_runs(options.runs)
        available_metrics = final_metric_columns(runs)
        for name in options.metric or []:
            checks.check_choice("--metric", name, available_metrics)
        if options.x is not None and swept_setting(runs, options.x) is None:
            checks.check_choice("--x", options.x, [*x_axis_columns(runs), *swept_keys(runs)])
        formats = _parse_formats(options.format)
        limits = dict(_parse_limits(text, available_metrics) for text in options.ylim)
        out = options.out
        if out is None and options.html is None:
            out = options.runs[0] if options.runs[0].is_dir() else runs[0].folder
        print(final_values_table(runs, options.metric or available_metrics, "markdown" if options.markdown else "text"))
        messages = []
        if out is not None:
            with use_venue(VENUES.get(options.style)):
                figures = comparison_pictures(runs, options.metric, x=options.x, limits=limits, band=options.spread)
                if options.only:
                    figures = iter(_select_pictures(list(figures), options.only))
                messages.append(f"pictures: {_save_pictures(figures, out, formats)}")
        if options.html is not None:
            messages.append(f"report:   {_write_text(options.html, report_html(runs, options.metric, options.x))}")
        if has_few_replicates(runs):
            print(f"fedsim-plot: bands are over {seed_counts_text(runs)}. {FEW_REPLICATES_NOTE}", file=sys.stderr)
    except ConfigError as error:
        sys.exit(f"fedsim-plot: {error}")
    folders = " ".join(map(str, options.runs))
    if not options.markdown:
        print("\n" + "\n".join([*messages, f"curves:   tensorboard --logdir {folders}"]))


def _parser() -> argparse.ArgumentParser:
    """Return the options of `fedsim-plot`."""
    parser = argparse.ArgumentParser("fedsim-plot", description="Compare runs: a table, pictures, an HTML report.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN_DIR", help="run folders, a sweep's folder, or a glob"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the pictures and their captions, NAME.caption.txt (default: the first RUN_DIR, unless --html)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained HTML report")
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="column of metrics.csv for the table, the curves and the final values; the other pictures "
        "(distances, clients, availability, partition) are drawn as well; may be repeated",
    )
    parser.add_argument(
        "--x",
        metavar="NAME",
        help="column for the horizontal axis of curves, such as virtual_seconds (default: rounds), or a swept "
        "setting, such as lr: the final values are drawn by it as well",
    )
    parser.add_argument(
        "--spread",
        choices=BANDS,
        default=STANDARD_DEVIATION_BAND,
        help="what bands and error bars by a setting show: the standard deviation over seeds (default), or Student's "
        "95 %% interval of the mean",
    )
    parser.add_argument(
        "--style",
        type=str.lower,
        choices=VENUES,
        help="figure width and font size of a venue: "
        + ", ".join(f"{name} ({venue.text_width:g} in, {venue.font_size:g} pt)" for name, venue in VENUES.items()),
    )
    parser.add_argument(
        "--ylim",
        action="append",
        default=[],
        metavar="NAME=LOW,HIGH",
        help="limits of the vertical axis of a metric's curves, in the units of metrics.csv; may be repeated",
    )
    parser.add_argument(
        "--format",
        default="png,pdf",
        metavar="LIST",
        help=f"formats of the pictures, a list of: {', '.join(PICTURE_FORMATS)} (default: png,pdf)",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME,NAME",
        help="draw only these pictures, such as curves or by_setting (default: all that the runs have data for)",
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser


def x_axis_columns(runs: list[Run]) -> list[str]:
    """Return the columns along which the curves of all these runs can be drawn."""
    return [name for name in INCREASING_COLUMNS if all(run.has_metric(name) for run in runs)]


def _parse_formats(text: str) -> list[str]:
    formats = [name.strip() for name in text.split(",")]
    for name in formats:
        checks.check_choice("--format", name, PICTURE_FORMATS)
    return formats


def _parse_limits(text: str, metrics: list[str]) -> tuple[str, tuple[float, float]]:
    """Parse NAME=LOW,HIGH."""
    name, _, limits_text = text.partition("=")
    checks.check_choice("--ylim", name, metrics)
    try:
        low, high = map(float, limits_text.split(","))
    except ValueError as error:
        raise ConfigError(f"--ylim {text} must be NAME=LOW,HIGH, such as test_accuracy=0.5,1") from error
    if not -math.inf < low < high < math.inf:
        raise ConfigError(f"--ylim {text}: {low:g} must be less than {high:g}")
    return name, (low, high)


def _select_pictures(figures: list[Picture], names_text: str) -> list[Picture]:
    """Return the pictures with these names, which are separated by commas."""
    names = [name.strip() for name in names_text.split(",")]
    for name in names:
        checks.check_choice("--only", name, [picture.name for picture in figures])
    return [picture for picture in figures if picture.name in names]


def _save_pictures(figures: Iterable[Picture], out: Path, formats: list[str]) -> str:
    """Save each picture in each format, with its caption as text; return a description of the paths."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = []
        for picture in figures:
            names.append(picture.name)
            for file_format in formats:
                with (
                    matplotlib.rc_context(matplotlib_parameters() | {"savefig.bbox": None}),
                    replacement_file(out / f"{picture.name}.{file_format}", "wb") as file,
                ):
                    picture.figure.savefig(file, format=file_format, metadata=UNDATED_METADATA.get(file_format))
            with replacement_file(out / f"{picture.name}.caption.txt") as file:
                file.write(f"{picture.heading}. {picture.caption}\nColours: {PALETTE_DESCRIPTION}.\n")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({_error_text(error)}); choose another folder") from error
    return f"{out / names[0]}.{formats[0]}" + (f", {', '.join(names[1:])}" if names[1:] else "")


def _write_text(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement_file(path) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written ({_error_text(error)}); choose another file") from error
    return path


def _error_text(error: OSError) -> str:
    return error.strerror or str(error)


def final_values_table(runs: list[Run], metrics: list[str], form: str) -> str:
    """Return a table of final mean ± standard deviation per metric and run; `fedsim table` has more options."""
    measures = [final_metric_measure(name, runs) for name in metrics]
    lines = [([run.label], [TableCell(measure.values_function(run)) for measure in measures]) for run in runs]
    return TABLE_FORMATTERS[form](ResultTable(["run"], measures, [(keys, list(cells)) for keys, cells in lines]))
