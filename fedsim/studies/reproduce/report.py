"""The report of a reproduction: report.json, results.csv, curves.csv, and a table for the terminal."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.core.files import replacement_file, write_json
from fedsim.evaluation.registry import NEWCOMER_PREFIX
from fedsim.studies.plots.cells import ResultCell
from fedsim.studies.plots.curves import curve_metrics
from fedsim.studies.reproduce.comparison import HELD_VERDICT, VERDICTS_WORST_FIRST, Comparison, Judgement
from fedsim.studies.reproduce.measures import LeadEndRound, RoundsToTarget, RunMeasure
from fedsim.studies.reproduce.number import MeasuredNumber
from fedsim.studies.reproduce.recipe import Recipe


@dataclass
class ReportRow:
    """A line of the report: a number beside the paper's, or a comparison with its verdict.

    Attributes:
        name: the number's place, or what is compared.
        at, measure: whose number it is.
        paper, ours, std: what the paper printed, the mean over seeds and its standard deviation.
        values: of every seed.
        fitted: does it use fitted constants?
        comparison: what is compared; None of a number.
        statement: that it decides; None of a number, or of a control of our own.
        choice: which unprinted choice its runs make.
        verdict: of the comparison.
        smallest_shown: the smallest difference that the seeds would have shown.
        reason, shown_by: why it does not hold.
        detail: the differences behind the verdict.
    """

    name: str
    at: dict[str, str] | None = None
    measure: str | None = None
    paper: float | None = None
    ours: float | None = None
    std: float | None = None
    values: list[float | None] | None = None
    fitted: bool = False
    comparison: str | None = None
    statement: str | None = None
    choice: str | None = None
    verdict: str | None = None
    smallest_shown: float | None = None
    reason: str | None = None
    shown_by: str | None = None
    detail: str | None = None


def check_columns(recipe: Recipe, columns: Collection[str], newcomers: bool, run: str) -> None:
    """Refuse a recipe that needs a column which a run does not measure.

    Args:
        recipe: whose measures, and figure of curves, are computed from columns.
        columns: of the run.
        newcomers: whether clients join after training.
        run: which run it is, for the message.

    Raises:
        ConfigError: naming the measure and the column.
    """
    needed = {f"measures.{name}": measure.columns for name, measure in recipe.measures.items()}
    if recipe.figure is not None and recipe.figure["kind"] == "curves":
        needed["figure"] = curve_metrics(recipe.figure | {"also": None})  # optional: a run without it has one curve
    for key, names in needed.items():
        for name in names:
            if name.startswith(NEWCOMER_PREFIX):
                if not newcomers:
                    raise ConfigError(
                        f"{recipe.name}: {key} needs newcomers, but {run} has none; set personal.newcomers"
                    )
            elif not any(alternative in columns for alternative in name.split(" or ")):
                raise ConfigError(
                    f"{recipe.name}: {key} needs the column {name}, which {run} does not measure"
                    f"{checks.nearest_name_hint(name, columns)}"
                )


def compute_cell_measures(recipe: Recipe, cells: list[ResultCell]) -> None:
    """Give every trained cell its numbers and the paper's.

    Raises:
        ConfigError: a run has not measured what a measure needs.
    """
    for cell in cells:
        cell.is_fitted = recipe.has_fitted_label(cell.axis_labels)
        if cell.run is not None:
            check_columns(recipe, cell.run.rows[0], bool(cell.run.newcomers), f"the run in {cell.run.folder}")
    for name, recipe_measure in recipe.measures.items():
        for cell in cells:
            if cell.run is None:
                continue
            rival_runs = [c.run for c in cells if c.run is not None and needs_other_cell(recipe_measure, c, cell)]
            cell.values_by_measure[name] = recipe_measure(cell.run, rival_runs)
            paper_value = recipe.paper_value(name, cell.axis_labels)
            if paper_value is not None:
                cell.paper_values[name] = paper_value


def needs_other_cell(measure: RunMeasure, first_cell: ResultCell, second_cell: ResultCell) -> bool:
    """Return whether the measure of `second_cell` needs `first_cell`; fitted runs are compared only with fitted
    ones."""
    return measure.is_needed_for(first_cell.axis_labels, second_cell.axis_labels) and (
        first_cell.is_fitted == second_cell.is_fitted or isinstance(measure, LeadEndRound)
    )


def numbers_by_measure(recipe: Recipe, cells: list[ResultCell]) -> dict[str, list[MeasuredNumber]]:
    """Return measure → the numbers of all cells that have it."""
    return {
        name: [
            MeasuredNumber(
                cell.axis_labels,
                cell.values_by_measure[name],
                cell.paper_values.get(name),
                cell.is_fitted,
                _seeds_of_values(cell, len(cell.values_by_measure[name])),
            )
            for cell in cells
            if name in cell.values_by_measure
        ]
        for name in recipe.measures
    }


def judge_comparisons(recipe: Recipe, numbers: dict[str, list[MeasuredNumber]], scale: str) -> list[Judgement]:
    """Return the verdict on each comparison that is meant for this scale."""
    substitutes = recipe.scale_specific_labels(scale)
    return [
        comparison.judge(side_numbers, than_numbers, substitutes)
        for comparison, side_numbers, than_numbers in comparisons_with_numbers(recipe, numbers, scale)
    ]


def comparisons_with_numbers(
    recipe: Recipe, numbers: dict[str, list[MeasuredNumber]], scale: str
) -> Iterator[tuple[Comparison, list[MeasuredNumber], list[MeasuredNumber] | None]]:
    """Yield each comparison for this scale with the numbers of its measure and those of its other measure."""

    def numbers_without_nan(name: str) -> list[MeasuredNumber]:
        absent = recipe.measures[name].absent
        return [replace(number, values=np.nan_to_num(number.values, nan=absent)) for number in numbers[name]]

    for comparison in recipe.comparisons:
        if scale in comparison.scales:
            than_numbers = None if comparison.than_measure is None else numbers_without_nan(comparison.than_measure)
            yield comparison, numbers_without_nan(comparison.measure or next(iter(recipe.measures))), than_numbers


def _seeds_of_values(cell: ResultCell, values: int) -> tuple[int, ...] | None:
    """Return the seeds of the values; None if a value is of all replicates together."""
    seeds = cell.run.settings.get("seeds") if cell.run is not None else None
    return tuple(seeds) if isinstance(seeds, list) and len(seeds) == values else None


def make_number_rows(
    recipe: Recipe, numbers: dict[str, list[MeasuredNumber]], cells: list[ResultCell]
) -> list[ReportRow]:
    """Return a row for each number, run by run."""
    by_place = {
        (measure_name, number.name): number for measure_name, numbers_ in numbers.items() for number in numbers_
    }
    return [
        number_row(by_place[name, " / ".join(cell.axis_labels.values())], name, len(recipe.measures) > 1)
        for cell in cells
        for name in recipe.measures
        if name in cell.values_by_measure
    ]


def number_row(number: MeasuredNumber, measure_name: str, has_several_measures: bool) -> ReportRow:
    """Return the row of a number; with `has_several_measures` measures its name includes the measure."""
    return ReportRow(
        " / ".join([*number.axis_labels.values(), *([measure_name] if has_several_measures else [])]) or measure_name,
        at=number.axis_labels,
        measure=measure_name,
        paper=number.paper_value,
        ours=rounded_or_none(number.mean),
        std=rounded_or_none(number.std),
        values=[rounded_or_none(float(value), 10) for value in number.values],
        fitted=number.is_fitted,
    )


def comparison_row(judgement: Judgement) -> ReportRow:
    """Return the row of a verdict."""
    comparison = judgement.comparison
    return ReportRow(
        comparison.we_test,
        fitted=comparison.fitted,
        comparison=comparison.we_test,
        statement=comparison.statement or None,
        choice=comparison.choice or None,
        verdict=judgement.verdict,
        smallest_shown=None
        if judgement.smallest_detectable_difference is None
        else rounded_or_none(judgement.smallest_detectable_difference),
        reason=comparison.reason or None,
        shown_by=comparison.shown_by or None,
        detail=judgement.evidence_text,
    )


def rounded_or_none(value: float, digits: int = 7) -> float | None:
    """Round to the given digits; None for a number that is not finite, which JSON cannot represent."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def unreached_target_texts(recipe: Recipe, table_lines: list[ReportRow], cells: list[ResultCell]) -> dict[str, str]:
    """Name of a number's row → what a terminal shows of it, where a target was not reached: '> 100' of a run of 100
    rounds, '≥ 95' of a mean of seeds of which some did not get there."""
    texts = {}
    runs = {tuple(cell.axis_labels.items()): cell.run for cell in cells if cell.run is not None}
    for row in table_lines:
        number_measure = recipe.measures.get(row.measure or "")
        run = runs.get(tuple((row.at or {}).items()))
        if row.comparison is not None or not isinstance(number_measure, RoundsToTarget) or run is None:
            continue
        last_time, values = (
            number_measure.last_counted_time(run),
            [value for value in row.values or [] if value is not None],
        )
        if not values:
            texts[row.name] = "not reached"
        elif min(values) > last_time:
            texts[row.name] = f"> {last_time:.4g}"
        elif max(values) > last_time:
            texts[row.name] = f"≥ {row.ours:.4g}"
    return texts


def number_notes(recipe: Recipe, table_lines: list[ReportRow]) -> list[str]:
    """Return what ± is, the units, and over which evaluations measures are taken unless it is the last one."""
    notes = ["± is the standard deviation over seeds"] if any(row.std for row in table_lines) else []
    for name, measure in recipe.measures.items():
        unit_text = f"in {measure.unit}" if measure.unit else ""
        if text := ", ".join(filter(None, [unit_text, measure.period_text])):
            notes.append(f"{name}: {text}")
    return notes


def format_report_rows(
    table_lines: list[ReportRow], text_by_unreached: Mapping[str, str] | None = None, notes: Iterable[str] = ()
) -> str:
    """Return a table for the terminal: a line per number, then the lines of each comparison; columns of the paper only
    if it has numbers.

    Args:
        table_lines: of the report.
        text_by_unreached: name of a row → what is shown in the place of our number.
        notes: lines after the numbers.
    """
    numbers = [row for row in table_lines if row.comparison is None]
    has_paper_values = any(row.paper is not None for row in numbers)
    width = max((len(row.name) for row in numbers), default=0)

    def line(name: str, paper: str, ours: str, gap: str) -> str:
        return (
            f"{name:{width}}  {paper:>8}  {ours:>20}  {gap:>10}" if has_paper_values else f"{name:{width}}  {ours:>20}"
        )

    lines_of_text = [line("", "paper", "ours", "difference")] if numbers else []
    for row in numbers:
        paper = "" if row.paper is None else f"{row.paper:.4g}"
        own_number_text = "–" if row.ours is None else f"{row.ours:.4g}" + (f" ± {row.std:.2g}" if row.std else "")
        difference_text = "" if row.paper is None or row.ours is None else f"{row.ours - row.paper:+.3g}"
        if text_by_unreached and row.name in text_by_unreached:
            own_number_text, difference_text = text_by_unreached[row.name], ""
        lines_of_text.append(line(row.name, paper, own_number_text, difference_text) + "  fitted" * row.fitted)
    return "\n".join(
        [
            *lines_of_text,
            *(notes if numbers else ()),
            *(line for row in table_lines if row.comparison is not None for line in _comparison_lines(row)),
        ]
    )


def _comparison_lines(row: ReportRow) -> list[str]:
    """Return the verdict and what was compared, followed by the differences, the power and the reason."""
    purpose = f"[{row.statement}] " if row.statement else "[ours] "
    table_lines = [f"{row.verdict:12}  {purpose}{row.comparison}" + " (fitted)" * row.fitted, f"{row.detail}"]
    if row.smallest_shown:
        table_lines.append(f"smallest difference that these seeds would have shown: {row.smallest_shown:.3g}")
    if row.reason and row.verdict == HELD_VERDICT:
        table_lines.append(f"its reason did not show in these runs: {row.reason} ({row.shown_by})")
    elif row.reason:
        table_lines.append(f"reason: {row.reason} (shown by {row.shown_by})")
    return [table_lines[0], *(f"{'':14}{line}" for line in table_lines[1:])]


def count_verdicts(table_lines: list[ReportRow]) -> dict[str, int]:
    """Return verdict → number of comparisons."""
    return {verdict: sum(row.verdict == verdict for row in table_lines) for verdict in reversed(VERDICTS_WORST_FIRST)}


def summary_table(recipes: dict[str, list[ReportRow]]) -> str:
    """Return a summary of several recipes for the terminal: the number of comparisons with each verdict."""
    width = max(map(len, recipes))
    return "\n".join(
        f"{name:{width}}  "
        + ", ".join(f"{number:3} {verdict}" for verdict, number in count_verdicts(table_lines).items())
        for name, table_lines in recipes.items()
    )


def save_rows(path: Path, table_lines: list[ReportRow], metadata: dict[str, Any]) -> None:
    """Write results.csv: metadata in '#' lines, then a line per number and per comparison."""
    with replacement_file(path) as file:
        _write_metadata_header(file, metadata)
        columns = [name for name in asdict(ReportRow("")) if name != "at"]
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in table_lines:
            content = {name: value for name, value in asdict(row).items() if name in columns}
            if row.values is not None:
                content["values"] = " ".join("nan" if value is None else f"{value:.10g}" for value in row.values)
            writer.writerow(content)


def save_curves(
    path: Path, cells: list[ResultCell], metrics: list[str], metadata: dict[str, Any], max_points: int = 150
) -> None:
    """Write curves.csv: mean and standard deviation of the figure's curves, at most `max_points` rounds per run."""
    with replacement_file(path) as file:
        _write_metadata_header(file, metadata)
        writer = csv.writer(file)
        writer.writerow([*(cells[0].axis_labels if cells else []), "metric", "round", "mean", "std"])
        for cell in cells:
            for name in metrics:
                if cell.run is None or not cell.run.has_metric(name):
                    continue
                rounds, values = cell.run.curve(name)
                for e in range(0, len(rounds), -(-len(rounds) // max_points)):
                    number = MeasuredNumber(cell.axis_labels, values[e])
                    writer.writerow(
                        [*cell.axis_labels.values(), name, rounds[e], f"{number.mean:.6g}", f"{number.std:.3g}"]
                    )


def _write_metadata_header(file: Any, metadata: dict[str, Any]) -> None:
    for key in ("recipe", "source", "scale", "reduced", "command", "seeds", "machine"):
        if metadata.get(key):
            file.write(f"# {key}: {metadata[key]}\n")


def save_json(path: Path, table_lines: list[ReportRow], metadata: dict[str, Any]) -> None:
    """Write report.json: metadata and all rows."""
    write_json(path, metadata | {"rows": [asdict(row) for row in table_lines]})
