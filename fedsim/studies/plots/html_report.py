"""A self-contained HTML file that compares runs: differing settings, final results and pictures."""

from __future__ import annotations

import base64
import io
import math
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from fedsim.core.settings import display_key
from fedsim.studies.plots.compare import comparison_pictures, mean_text
from fedsim.studies.plots.curves import preferred_metrics
from fedsim.studies.plots.looks import curve_styles
from fedsim.studies.results.differences import (
    ABSENT_TEXT,
    differing_class_options,
    find_differing_keys,
    run_group_name,
    setting_value_text,
)
from fedsim.studies.results.runs import Run, final_metric_columns, run_that_measures

TEMPLATE = Path(__file__).with_name("report.html.jinja")
MAX_CURVE_METRICS = 4
SVG_DASHES = {"-": "", "--": "6 3", ":": "1.5 2.5", "-.": "6 2.5 1.5 2.5"}  # line style → SVG's stroke-dasharray
MAX_RUN_COLUMNS = 5  # more runs than this are rows of the table of differences


def report_html(runs: list[Run], metrics: list[str] | None = None, x: str | None = None) -> str:
    """Return the report as HTML.

    Args:
        runs: the labelled runs to compare.
        metrics: the metrics whose curves are drawn; by default the most informative ones.
        x: the column along which curves are drawn; None: rounds.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["formula"] = _formula_markup
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    keys = find_differing_keys(runs)
    return template.render(
        heading=runs[0].label if len(runs) == 1 else f"{len(runs)} runs compared",
        made=datetime.now().astimezone().strftime("%d %B %Y, %H:%M"),
        about=_runs_description(runs),
        runs=[
            {
                "label": run.label,
                "colour": style.colour,
                "dashes": SVG_DASHES.get(style.dashes, "0 99"),
                "marker": style.marker,
            }
            for run, style in zip(runs, curve_styles(runs).styles, strict=True)
        ],
        differences=_differing_settings(runs, keys),
        hidden=_hidden_settings(runs, keys),
        across=len(runs) <= MAX_RUN_COLUMNS,
        results=_result_rows(runs),
        pictures=[
            {"name": p.name, "heading": p.heading, "caption": p.caption, "data": _figure_base64_svg(p.figure)}
            for p in comparison_pictures(runs, metrics, MAX_CURVE_METRICS, x)
        ],
        replicated=max(run.replicates for run in runs) > 1,
        notes=_reader_notes(runs),
        shared=[
            (display_key(key), setting_value_text(runs[0].settings, key))
            for key in sorted(runs[0].settings)
            if key not in keys
        ],
        origins=[_run_origin(run) for run in runs],
    )


def _formula_markup(text: str) -> Markup:
    """Return HTML with superscripts, such as θ^PS with a raised PS."""
    return Markup(re.sub(r"\^(\w+)", r"<sup>\1</sup>", str(escape(text))))


def _runs_description(runs: list[Run]) -> str:
    """Return one line with the data set, clients, rounds and seeds, as far as the runs agree."""
    facts = []
    for key, form in (
        ("dataset._target_", "{}"),
        ("clients", "{} clients"),
        ("rounds", "{} rounds"),
        ("seeds", "seeds {}"),
    ):
        distinct_values = {setting_value_text(run.settings, key) for run in runs}
        if len(distinct_values) == 1 and distinct_values != {ABSENT_TEXT}:
            facts.append(form.format(*distinct_values))
    return " · ".join(facts)


def _differing_settings(runs: list[Run], keys: list[str]) -> list[dict[str, Any]]:
    """Return the differing settings: name, whether it is an option of a class that differs, a value per run.

    Options that only runs of a single class have, all with the same value, add nothing to the class and are left out
    (`_hidden_settings` names them).
    """
    class_options = differing_class_options(keys)
    return [
        {
            "name": display_key(key),
            "own": key in class_options,
            "values": [setting_value_text(run.settings, key) for run in runs],
        }
        for key in sorted(keys, key=lambda key: key in class_options)
        if not _is_single_class_option(runs, key, class_options)
    ]


def _is_single_class_option(runs: list[Run], key: str, class_options: set[str]) -> bool:
    """Return whether only runs of a single class have this option, all with the same value."""
    runs_with_key = [run for run in runs if key in run.settings]
    if key not in class_options or len(runs_with_key) == len(runs):
        return False
    groups = [
        name.removesuffix("_target_") for run in runs_with_key for name in run.settings if name.endswith("._target_")
    ]
    group = max((name for name in groups if key.startswith(name)), key=len, default="")
    classes = {run.settings.get(f"{group}_target_") for run in runs_with_key}
    return len(classes) == 1 and len({str(run.settings[key]) for run in runs_with_key}) == 1


def _hidden_settings(runs: list[Run], keys: list[str]) -> list[dict[str, Any]]:
    """Return the settings that `_differing_settings` leaves out: name, the runs that have it, and its value."""
    class_options = differing_class_options(keys)
    hidden_rows = []
    for key in keys:
        if _is_single_class_option(runs, key, class_options):
            runs_with_key = [run for run in runs if key in run.settings]
            label = run_group_name(runs_with_key, runs)
            hidden_rows.append(
                {"name": display_key(key), "run": label, "value": setting_value_text(runs_with_key[0].settings, key)}
            )
    return hidden_rows


def _result_rows(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the rows of the results: title and column of a metric, and per run its text and whether it is the best."""
    table = []
    for metric in dict.fromkeys([*preferred_metrics(runs), *final_metric_columns(runs)]):
        first_run = run_that_measures(runs, metric)
        final_values = [run.final(metric) for run in runs]
        means = [mean for mean, _ in final_values]
        description = first_run.describe_metric(metric)
        comparable_means = [mean for mean in means if description.better and not math.isnan(mean)]
        best = (max if first_run.higher_is_better(metric) else min)(comparable_means, default=math.nan)
        texts = [
            mean_text(metric, mean, std) if run.has_metric(metric) else ABSENT_TEXT
            for run, (mean, std) in zip(runs, final_values, strict=True)
        ]
        best_flags = [len(runs) > 1 and mean == best for mean in means]
        table.append({"title": description.label, "column": metric, "cells": list(zip(texts, best_flags, strict=True))})
    return table


def _reader_notes(runs: list[Run]) -> list[str]:
    """Return notes on unfinished runs and missing files, for readers of the comparison."""
    reader_notes = []
    for run in runs:
        completed_rounds, planned_rounds = run.rows[-1]["round"], run.settings.get("rounds")
        if run.summary.get("stopped"):
            reader_notes.append(f"{run.label} was stopped by {run.summary['stopped']} of {planned_rounds}.")
        elif planned_rounds is not None and completed_rounds < planned_rounds:
            reader_notes.append(f"{run.label} has completed {completed_rounds} of {planned_rounds} rounds.")
        elif run.clients is None:
            reader_notes.append(f"{run.label} has no clients.npz, so pictures of its clients are missing.")
    return reader_notes


def _run_origin(run: Run) -> dict[str, str]:
    """Return the provenance of a run: command, start, device, duration, speed, versions and commit."""
    environment, summary = run.environment, run.summary
    versions = environment.get("versions") or {}
    speed, threads = summary.get("samples_per_second"), environment.get("threads", "?")
    machine = f"{environment.get('device', ABSENT_TEXT)}, {threads} thread{'' if threads == 1 else 's'}"
    return {
        "label": run.label,
        "folder": str(run.folder),
        "command": environment.get("command", ABSENT_TEXT),
        "started": str(environment.get("started", ABSENT_TEXT)).replace("T", " ")[:16],
        "device": environment.get("gpu") or machine,
        "took": _duration_text(run.rows[-1].get("seconds", math.nan)),
        "speed": ABSENT_TEXT if speed is None else f"{speed:,.0f} samples/s",
        "version": f"fedsim {versions.get('fedsim-torch') or '?'}, torch {versions.get('torch', '?')}",
        "commit": (environment.get("commit") or ABSENT_TEXT)[:10],
    }


def _duration_text(seconds: float) -> str:
    """Format a duration in hours, minutes or seconds."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds > 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def _figure_base64_svg(figure: Figure) -> str:
    """Return the figure as a base64 SVG whose letters are outlines, so that it looks the same everywhere."""
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "path"}):
        figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()
