"""The report of a reproduction: report.json, results.csv, curves.csv, and a table for the terminal."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core.files import replacement_file, write_json
from fedsim.studies.plots.cells import Cell
from fedsim.studies.reproduce.comparison import HELD, WORST_FIRST, Comparison, Judgement
from fedsim.studies.reproduce.measures import Measure, RoundsAhead, RoundsToTarget
from fedsim.studies.reproduce.number import Number
from fedsim.studies.reproduce.recipe import Recipe


@dataclass
class Row:
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


def measure(recipe: Recipe, cells: list[Cell]) -> None:
    """Give every trained cell its numbers and the paper's."""
    for cell in cells:
        cell.fitted = recipe.is_fitted(cell.at)
    for name, recipe_measure in recipe.measures.items():
        for cell in cells:
            if cell.run is None:
                continue
            rivals = [c.run for c in cells if c.run is not None and is_rival(recipe_measure, c, cell)]
            cell.numbers[name] = recipe_measure(cell.run, rivals)
            printed = recipe.printed(name, cell.at)
            if printed is not None:
                cell.paper[name] = printed


def is_rival(measure: Measure, first: Cell, second: Cell) -> bool:
    """Return whether the measure of `second` needs `first`; fitted runs are compared only with fitted ones."""
    return measure.compares(first.at, second.at) and (first.fitted == second.fitted or isinstance(measure, RoundsAhead))


def numbers_of(recipe: Recipe, cells: list[Cell]) -> dict[str, list[Number]]:
    """Return measure → the numbers of all cells that have it."""
    return {
        name: [
            Number(
                cell.at,
                cell.numbers[name],
                cell.paper.get(name),
                cell.fitted,
                _seeds_of_values(cell, len(cell.numbers[name])),
            )
            for cell in cells
            if name in cell.numbers
        ]
        for name in recipe.measures
    }


def judge(recipe: Recipe, numbers: dict[str, list[Number]], scale: str) -> list[Judgement]:
    """Return the verdict on each comparison that is meant for this scale."""
    substitutes = recipe.substitutes(scale)
    return [
        comparison.judge(side_numbers, than_numbers, substitutes)
        for comparison, side_numbers, than_numbers in compared(recipe, numbers, scale)
    ]


def compared(
    recipe: Recipe, numbers: dict[str, list[Number]], scale: str
) -> Iterator[tuple[Comparison, list[Number], list[Number] | None]]:
    """Yield each comparison for this scale with the numbers of its measure and those of its other measure."""

    def comparable(name: str) -> list[Number]:
        absent = recipe.measures[name].absent
        return [replace(number, values=np.nan_to_num(number.values, nan=absent)) for number in numbers[name]]

    for comparison in recipe.comparisons:
        if scale in comparison.scales:
            than_numbers = None if comparison.than_measure is None else comparable(comparison.than_measure)
            yield comparison, comparable(comparison.measure or next(iter(recipe.measures))), than_numbers


def _seeds_of_values(cell: Cell, values: int) -> tuple[int, ...] | None:
    """Return the seeds of the values; None if a value is of all replicates together."""
    seeds = cell.run.settings.get("seeds") if cell.run is not None else None
    return tuple(seeds) if isinstance(seeds, list) and len(seeds) == values else None


def number_rows(recipe: Recipe, numbers: dict[str, list[Number]], cells: list[Cell]) -> list[Row]:
    """Return a row for each number, run by run."""
    by_place = {
        (measure_name, number.name): number for measure_name, numbers_ in numbers.items() for number in numbers_
    }
    return [
        number_row(by_place[name, " / ".join(cell.at.values())], name, len(recipe.measures) > 1)
        for cell in cells
        for name in recipe.measures
        if name in cell.numbers
    ]


def number_row(number: Number, measure_name: str, several: bool) -> Row:
    """Return the row of a number; with `several` measures its name includes the measure."""
    return Row(
        " / ".join([*number.at.values(), *([measure_name] if several else [])]) or measure_name,
        at=number.at,
        measure=measure_name,
        paper=number.paper,
        ours=finite(number.mean),
        std=finite(number.std),
        values=[finite(float(value), 10) for value in number.values],
        fitted=number.fitted,
    )


def comparison_row(judgement: Judgement) -> Row:
    """Return the row of a verdict."""
    comparison = judgement.comparison
    return Row(
        comparison.we_test,
        fitted=comparison.fitted,
        comparison=comparison.we_test,
        statement=comparison.statement or None,
        choice=comparison.choice or None,
        verdict=judgement.word,
        smallest_shown=None if judgement.smallest_shown is None else finite(judgement.smallest_shown),
        reason=comparison.reason or None,
        shown_by=comparison.shown_by or None,
        detail=judgement.detail,
    )


def finite(value: float, digits: int = 7) -> float | None:
    """Round to the given digits; None for a number that is not finite, which JSON cannot represent."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def unreached_texts(recipe: Recipe, lines: list[Row], cells: list[Cell]) -> dict[str, str]:
    """Name of a number's row → what a terminal shows of it, where a target was not reached: '> 100' of a run of 100
    rounds, '≥ 95' of a mean of seeds of which some did not get there."""
    texts = {}
    runs = {tuple(cell.at.items()): cell.run for cell in cells if cell.run is not None}
    for row in lines:
        number_measure = recipe.measures.get(row.measure or "")
        run = runs.get(tuple((row.at or {}).items()))
        if row.comparison is not None or not isinstance(number_measure, RoundsToTarget) or run is None:
            continue
        last, values = number_measure.last_time(run), [value for value in row.values or [] if value is not None]
        if not values:
            texts[row.name] = "not reached"
        elif min(values) > last:
            texts[row.name] = f"> {last:.4g}"
        elif max(values) > last:
            texts[row.name] = f"≥ {row.ours:.4g}"
    return texts


def table(lines: list[Row], unreached: Mapping[str, str] | None = None) -> str:
    """Return a table for the terminal: a line per number, then the lines of each comparison; columns of the paper only
    if it has numbers.

    Args:
        lines: of the report.
        unreached: name of a row → what is shown in the place of our number.
    """
    numbers = [row for row in lines if row.comparison is None]
    printed = any(row.paper is not None for row in numbers)
    width = max((len(row.name) for row in numbers), default=0)

    def line(name: str, paper: str, ours: str, gap: str) -> str:
        return f"{name:{width}}  {paper:>8}  {ours:>20}  {gap:>10}" if printed else f"{name:{width}}  {ours:>20}"

    lines_of_text = [line("", "paper", "ours", "difference")] if numbers else []
    for row in numbers:
        paper = "" if row.paper is None else f"{row.paper:.4g}"
        ours = "–" if row.ours is None else f"{row.ours:.4g}" + (f" ± {row.std:.2g}" if row.std else "")
        gap = "" if row.paper is None or row.ours is None else f"{row.ours - row.paper:+.3g}"
        if unreached and row.name in unreached:
            ours, gap = unreached[row.name], ""
        lines_of_text.append(line(row.name, paper, ours, gap) + "  fitted" * row.fitted)
    return "\n".join(
        [*lines_of_text, *(line for row in lines if row.comparison is not None for line in _comparison_text(row))]
    )


def _comparison_text(row: Row) -> list[str]:
    """Return the verdict and what was compared, followed by the differences, the power and the reason."""
    purpose = f"[{row.statement}] " if row.statement else "[ours] "
    lines = [f"{row.verdict:12}  {purpose}{row.comparison}" + " (fitted)" * row.fitted, f"{row.detail}"]
    if row.smallest_shown:
        lines.append(f"smallest difference that these seeds would have shown: {row.smallest_shown:.3g}")
    if row.reason and row.verdict == HELD:
        lines.append(f"its reason did not show in these runs: {row.reason} ({row.shown_by})")
    elif row.reason:
        lines.append(f"reason: {row.reason} (shown by {row.shown_by})")
    return [lines[0], *(f"{'':14}{line}" for line in lines[1:])]


def count(lines: list[Row]) -> dict[str, int]:
    """Return verdict → number of comparisons."""
    return {verdict: sum(row.verdict == verdict for row in lines) for verdict in reversed(WORST_FIRST)}


def summary(recipes: dict[str, list[Row]]) -> str:
    """Return a summary of several recipes for the terminal: the number of comparisons with each verdict."""
    width = max(map(len, recipes))
    return "\n".join(
        f"{name:{width}}  " + ", ".join(f"{number:3} {word}" for word, number in count(lines).items())
        for name, lines in recipes.items()
    )


def save_rows(path: Path, lines: list[Row], metadata: dict[str, Any]) -> None:
    """Write results.csv: metadata in '#' lines, then a line per number and per comparison."""
    with replacement_file(path) as file:
        _write_metadata_header(file, metadata)
        columns = [name for name in asdict(Row("")) if name != "at"]
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in lines:
            content = {name: value for name, value in asdict(row).items() if name in columns}
            if row.values is not None:
                content["values"] = " ".join("nan" if value is None else f"{value:.10g}" for value in row.values)
            writer.writerow(content)


def save_curves(
    path: Path, cells: list[Cell], metrics: list[str], metadata: dict[str, Any], max_points: int = 150
) -> None:
    """Write curves.csv: mean and standard deviation of the figure's curves, at most `max_points` rounds per run."""
    with replacement_file(path) as file:
        _write_metadata_header(file, metadata)
        writer = csv.writer(file)
        writer.writerow([*(cells[0].at if cells else []), "metric", "round", "mean", "std"])
        for cell in cells:
            for name in metrics:
                if cell.run is None or not cell.run.has_metric(name):
                    continue
                rounds, values = cell.run.curve(name)
                for e in range(0, len(rounds), -(-len(rounds) // max_points)):
                    number = Number(cell.at, values[e])
                    writer.writerow([*cell.at.values(), name, rounds[e], f"{number.mean:.6g}", f"{number.std:.3g}"])


def _write_metadata_header(file: Any, metadata: dict[str, Any]) -> None:
    for key in ("recipe", "source", "scale", "reduced", "command", "seeds", "machine"):
        if metadata.get(key):
            file.write(f"# {key}: {metadata[key]}\n")


def save_json(path: Path, lines: list[Row], metadata: dict[str, Any]) -> None:
    """Write report.json: metadata and all rows."""
    write_json(path, metadata | {"rows": [asdict(row) for row in lines]})
