"""`fedsim table`: a table of the results of runs for a paper, with their differences and intervals."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.core.files import replacement_file
from fedsim.evaluation.columns import validation_metric
from fedsim.studies.results.differences import load_runs
from fedsim.studies.results.display_names import UserDisplayNames
from fedsim.studies.results.forms import TABLE_FORMATTERS
from fedsim.studies.results.latex import latex_table
from fedsim.studies.results.run_measures import TableMeasure, cost_measures, final_metric_measure
from fedsim.studies.results.runs import Run, final_metric_columns
from fedsim.studies.results.table import SPREADS, make_table, select_best_runs

DEFAULT_METRICS = (
    "test_accuracy",
    "test_loss",
    "performative_risk",
    "distance_to_optimum",
    "train_loss",
)  # the first of these that all runs have
FORM_BY_FILE_ENDING = {".md": "markdown", ".tex": "latex", ".csv": "csv"}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    argument_parser = argparse.ArgumentParser("fedsim table", description=f"Show {COMMAND_DESCRIPTIONS['table']}.")
    argument_parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN_DIR", help="run folders, a sweep's folder, or a glob"
    )
    argument_parser.add_argument(
        "--metric", action="append", metavar="NAME", help="a column of metrics.csv; may be repeated"
    )
    argument_parser.add_argument(
        "--last", type=int, default=1, metavar="K", help="mean of the last K evaluations (default: 1)"
    )
    argument_parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="rounds and bytes until a metric reaches a value; may be repeated",
    )
    argument_parser.add_argument(
        "--rows", default="", metavar="KEY,KEY", help="swept keys that form the rows (default: all others)"
    )
    argument_parser.add_argument("--columns", default="", metavar="KEY,KEY", help="swept keys that form the columns")
    argument_parser.add_argument(
        "--best", default="", metavar="KEY,KEY", help="select the best value of these keys, such as the best lr"
    )
    argument_parser.add_argument("--by", metavar="NAME", help="metric for --best (default: on validation samples)")
    argument_parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="differences by seed from the run with this value",
    )
    argument_parser.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        help="confidence level of the intervals, also for bold entries (default: 0.95)",
    )
    argument_parser.add_argument(
        "--spread",
        choices=SPREADS,
        default=SPREADS[0],
        help="what ± is: std, the standard deviation over seeds (default), or interval, half the width of Student's "
        "interval of the mean",
    )
    argument_parser.add_argument(
        "--blocks",
        default="",
        metavar="KEY,KEY",
        help="swept keys that form blocks of rows; the best entry of each block is bold",
    )
    argument_parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="rename a strategy, metric, setting or value; may be repeated",
    )
    argument_parser.add_argument(
        "--caption", metavar="TEXT", help="LaTeX: a table with this caption, extended by the meaning of ± and bold"
    )
    argument_parser.add_argument("--label", metavar="NAME", help="LaTeX: a table with this label, such as tab:accuracy")
    form = argument_parser.add_mutually_exclusive_group()
    for name in ("markdown", "latex", "csv"):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=f"print as {name}")
    argument_parser.add_argument(
        "--to", type=Path, metavar="FILE", help="write to a file instead: FILE.tex, FILE.md, FILE.csv or text"
    )
    return argument_parser


def main(arguments: list[str]) -> None:
    """Print or write the table."""
    options = parser().parse_args(arguments)
    last = checks.check_whole_number("--last", options.last)
    if not 0 < checks.check_finite("--confidence", options.confidence) < 1:
        raise ConfigError(f"--confidence {options.confidence} must lie between 0 and 1, such as 0.95")
    form = options.form or FORM_BY_FILE_ENDING.get(options.to.suffix if options.to else "", "text")
    _check_latex_options(form, options.caption, options.label)
    runs = load_runs(options.runs)
    names = _table_metric_names(runs, options.metric)
    if options.by is not None:
        checks.check_choice("--by", options.by, _common_metrics(runs))
    choice = select_best_runs(runs, _split_names(options.best), names[0], options.by, last)
    measures: list[TableMeasure] = [final_metric_measure(name, runs, last) for name in names]
    for name, target in _parse_pairs("--target", options.target).items():
        checks.check_choice("--target", name, _common_metrics(runs))
        measures += cost_measures(name, _parse_number(f"--target {name}", target), runs)
    result_table = make_table(
        choice,
        measures,
        _split_names(options.rows),
        _split_names(options.columns),
        _parse_pairs("--against", options.against),
        options.confidence,
        _split_names(options.blocks),
        UserDisplayNames(_parse_pairs("--rename", options.rename)),
        options.spread,
    )
    text = (
        latex_table(result_table, options.caption, options.label)
        if form == "latex"
        else TABLE_FORMATTERS[form](result_table)
    )
    if options.to is None:
        print(text)
        return
    try:
        options.to.parent.mkdir(parents=True, exist_ok=True)
        with replacement_file(options.to) as file:
            file.write(text + "\n")
    except OSError as error:
        raise ConfigError(f"--to {options.to} cannot be written ({error}); choose another file") from error
    print(f"table: {options.to}")


def _check_latex_options(form: str, caption: str | None, label: str | None) -> None:
    for option, value in (("--caption", caption), ("--label", label)):
        if value is not None and form != "latex":
            raise ConfigError(f"{option} is for LaTeX; add --latex, or --to FILE.tex")
    if label is not None and not re.fullmatch(r"[\w:.+/-]+", label, re.ASCII):
        raise ConfigError(f"--label {label!r} must be letters, digits and :.+/-_ such as tab:accuracy")


def _table_metric_names(runs: list[Run], requested: list[str] | None) -> list[str]:
    """Return the metrics of the table: the requested ones, else the most informative one and a validation metric."""
    common_metrics = _common_metrics(runs)
    for name in requested or []:
        checks.check_choice("--metric", name, final_metric_columns(runs))
    first_metrics = (
        [name for name in DEFAULT_METRICS if name in common_metrics][:1]
        or common_metrics[:1]
        or final_metric_columns(runs)[:1]
    )
    chosen_metric = validation_metric(common_metrics)
    return requested or [*first_metrics, *([chosen_metric] if chosen_metric else [])]


def _common_metrics(runs: list[Run]) -> list[str]:
    return [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]


def _split_names(text: str) -> list[str]:
    return [name for name in text.replace(" ", "").split(",") if name]


def _parse_pairs(option: str, texts: list[str]) -> dict[str, str]:
    """Parse several options of the form NAME=VALUE."""
    pairs = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator and value):
            raise ConfigError(f"{option} {text} must be NAME=VALUE, such as strategy=fedavg")
        pairs[name] = value
    return pairs


def _parse_number(option: str, text: str) -> float:
    try:
        return checks.check_finite(option, float(text))
    except ValueError as error:
        raise ConfigError(f"{option}={text} must be a number") from error
