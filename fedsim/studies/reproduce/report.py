"""What a reproduction leaves behind: report.json, results.csv, the picture and its curves, and a table to read."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core.files import replacement_file, write_json
from fedsim.studies.plots.cells import Cell
from fedsim.studies.reproduce.claims import HELD, OPEN, VERDICTS, Verdict
from fedsim.studies.reproduce.measures import Ahead, Measure
from fedsim.studies.reproduce.number import Number
from fedsim.studies.reproduce.recipe import Recipe


@dataclass
class Row:
    """A line of the report: a number beside the paper's, or a claim with its verdict.

    `held` is the bare comparison; `verdict` knows whether its failure has a reason.
    """

    name: str
    paper: float | None = None
    ours: float | None = None
    std: float | None = None
    claim: str | None = None
    held: bool | None = None
    verdict: str | None = None
    reason: str | None = None
    shown_by: str | None = None
    fitted: bool = False
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
    """Does the measure compare the other with this one? The best of a fitted one is sought among fitted ones."""
    return measure.compares(first.at, second.at) and (first.fitted == second.fitted or isinstance(measure, Ahead))


def judge(recipe: Recipe, cells: list[Cell], scale: str) -> list[Verdict]:
    """The verdict on every claim that is meant for this scale."""

    def numbers(name: str) -> list[Number]:
        results = []
        for cell in cells:
            if name in cell.numbers:
                values = np.nan_to_num(cell.numbers[name], nan=recipe.measures[name].absent)
                results.append(Number(cell.at, values, cell.paper.get(name), cell.fitted, _seeds(cell, len(values))))
        return results

    verdicts = []
    for claim in recipe.claims:
        if scale in claim.scales:
            reference_numbers = None if claim.than_measure is None else numbers(claim.than_measure)
            verdicts.append(claim.judge(numbers(claim.measure or next(iter(recipe.measures))), reference_numbers))
    return verdicts


def _seeds(cell: Cell, values: int) -> tuple[int, ...] | None:
    """Of the replicates whose values these are; None where a value is of all replicates together."""
    seeds = cell.run.settings.get("seeds") if cell.run is not None else None
    return tuple(seeds) if isinstance(seeds, list) and len(seeds) == values else None


def rows(recipe: Recipe, cells: list[Cell], verdicts: list[Verdict]) -> list[Row]:
    """All numbers, then all claims."""
    number_rows = []
    for cell in cells:
        for name in recipe.measures:
            if name not in cell.numbers:
                continue
            number = Number(cell.at, cell.numbers[name], cell.paper.get(name))
            row_name = " / ".join([*cell.at.values(), *([name] if len(recipe.measures) > 1 else [])])
            number_rows.append(
                Row(row_name or name, number.paper, finite(number.mean), finite(number.std), fitted=cell.fitted)
            )
    return number_rows + [_row(verdict) for verdict in verdicts]


def _row(v: Verdict) -> Row:
    return Row(
        v.claim,
        claim=v.claim,
        held=v.holds,
        verdict=v.word,
        reason=v.reason or None,
        shown_by=v.shown_by or None,
        fitted=v.fitted,
        detail=v.detail,
    )


def finite(value: float) -> float | None:
    """Seven digits; JSON knows no nan."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def table(lines: list[Row]) -> str:
    """For a terminal: a line per number, then a line per claim."""
    numbers = [row for row in lines if row.claim is None]
    width = max((len(row.name) for row in numbers), default=0)
    out = [f"{'':{width}}  {'paper':>8}  {'ours':>20}  {'difference':>10}"] if numbers else []
    for row in numbers:
        paper = "" if row.paper is None else f"{row.paper:.4g}"
        ours = "–" if row.ours is None else f"{row.ours:.4g}" + (f" ± {row.std:.2g}" if row.std else "")
        gap = "" if row.paper is None or row.ours is None else f"{row.ours - row.paper:+.3g}"
        out.append(f"{row.name:{width}}  {paper:>8}  {ours:>20}  {gap:>10}" + "  fitted" * row.fitted)
    return "\n".join([*out, *(line for row in lines if row.claim is not None for line in _claim(row))])


def _claim(row: Row) -> list[str]:
    """The verdict and the claim; below it what was compared, and the reason."""
    word = OPEN.upper() if row.verdict == OPEN else row.verdict
    lines = [f"{word:8}  {row.claim}" + " (fitted)" * row.fitted, f"{row.detail}"]
    if row.reason and row.verdict == HELD:
        lines.append(f"its reason did not show in these runs: {row.reason} ({row.shown_by})")
    elif row.reason:
        lines.append(f"reason: {row.reason} (shown by {row.shown_by})")
    return [lines[0], *(f"          {line}" for line in lines[1:])]


def count(lines: list[Row]) -> dict[str, int]:
    """Verdict → how many claims."""
    return {word: sum(row.verdict == word for row in lines if row.claim is not None) for word in VERDICTS}


def summary(recipes: dict[str, list[Row]]) -> str:
    """For a terminal, after several recipes: how many claims of each have which verdict, the sums, and what is open."""
    counts = {name: count(lines) for name, lines in recipes.items()}
    sums = {word: sum(counted[word] for counted in counts.values()) for word in VERDICTS}
    width = max(len("all claims"), *map(len, counts))
    out = [
        f"{name:{width}}  " + ", ".join(f"{number:3} {word}" for word, number in counted.items())
        for name, counted in {**counts, "all claims": sums}.items()
    ]
    for name, lines in recipes.items():
        out += [f"{OPEN.upper()}  {name}: {row.claim}" for row in lines if row.verdict == OPEN]
    return "\n".join(out)


def save_rows(path: Path, lines: list[Row], metadata: dict[str, Any]) -> None:
    """results.csv: what made it in '#' lines, then a line per number and per claim."""
    with replacement_file(path) as file:
        _header(file, metadata)
        writer = csv.DictWriter(file, list(asdict(Row(""))))
        writer.writeheader()
        writer.writerows(asdict(row) for row in lines)


def save_curves(
    path: Path, cells: list[Cell], metrics: list[str], metadata: dict[str, Any], max_points: int = 150
) -> None:
    """curves.csv: what the picture shows, mean and standard deviation, thinned to at most so many rounds a run."""
    with replacement_file(path) as file:
        _header(file, metadata)
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


def _header(file: Any, metadata: dict[str, Any]) -> None:
    for key in ("recipe", "source", "scale", "reduced", "command", "seeds", "machine"):
        if metadata.get(key):
            file.write(f"# {key}: {metadata[key]}\n")


def save_json(path: Path, lines: list[Row], metadata: dict[str, Any]) -> None:
    """report.json: everything."""
    write_json(path, metadata | {"rows": [asdict(row) for row in lines]})
