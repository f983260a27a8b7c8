"""`fedsim-plot RUN_DIR…`: compare runs by a table on the terminal, pictures, and a report of one HTML file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.core.files import replacing
from fedsim.core.speaking import patiently
from fedsim.plots.compare import pictures
from fedsim.plots.report import html
from fedsim.results.differences import find
from fedsim.results.forms import FORMS
from fedsim.results.measured import Cell, metric
from fedsim.results.runs import Run, measured_by
from fedsim.results.table import Table

GROWING = ("virtual_seconds", "total_bytes_up", "total_bytes_down", "samples", "seconds")


@patiently()
def main(arguments: list[str] | None = None) -> None:
    """Entry point of `fedsim-plot`."""
    parser = argparse.ArgumentParser("fedsim-plot", description="Compare runs: a table, pictures, an HTML report.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN_DIR", help="run folders, a sweep's folder, or a glob"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the pictures, as PNG and PDF (default: the first RUN_DIR, unless --html)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report: one file that needs no other")
    parser.add_argument("--metric", action="append", metavar="NAME", help="a column of metrics.csv; may be repeated")
    parser.add_argument(
        "--x", metavar="NAME", help="a column along which curves are drawn, such as virtual_seconds (default: rounds)"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    try:
        runs = find(options.runs)
        available_metrics = measured_by(runs)
        for name in options.metric or []:
            checks.choice("--metric", name, available_metrics)
        if options.x is not None:
            checks.choice("--x", options.x, growing(runs))
        out = options.out
        if out is None and options.html is None:
            out = options.runs[0] if options.runs[0].is_dir() else runs[0].folder
        print(table(runs, options.metric or available_metrics, "markdown" if options.markdown else "text"))
        messages = [f"pictures: {_save(runs, options.metric, out, options.x)}"] if out is not None else []
        if options.html is not None:
            messages.append(f"report:   {_write(options.html, html(runs, options.metric, options.x))}")
    except ConfigError as error:
        sys.exit(f"fedsim-plot: {error}")
    folders = " ".join(map(str, options.runs))
    if not options.markdown:
        print("\n" + "\n".join([*messages, f"curves:   tensorboard --logdir {folders}"]))


def growing(runs: list[Run]) -> list[str]:
    """Columns along which the curves of all these runs can be drawn."""
    return [name for name in GROWING if all(run.has(name) for run in runs)]


def _save(runs: list[Run], metrics: list[str] | None, out: Path, x: str | None = None) -> str:
    """Every picture as PNG and PDF; returns where the PNGs are."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = []
        for picture in pictures(runs, metrics, x=x):
            names.append(picture.name)
            for ending in ("png", "pdf"):
                with replacing(out / f"{picture.name}.{ending}", "wb") as file:
                    picture.figure.savefig(file, format=ending)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({_why(error)}); choose another folder") from error
    return f"{out / names[0]}.png" + (f", {', '.join(names[1:])}" if names[1:] else "")


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written ({_why(error)}); choose another file") from error
    return path


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def table(runs: list[Run], metrics: list[str], form: str) -> str:
    """Final mean ± standard deviation of every metric and run; `fedsim table` knows more."""
    measures = [metric(name, runs) for name in metrics]
    lines = [([run.label], [Cell(measure.of(run)) for measure in measures]) for run in runs]
    return FORMS[form](Table(["run"], measures, [(keys, list(cells)) for keys, cells in lines]))
