"""Stored results, judged again without running: their numbers, and the verdicts of the current recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.studies.reproduce import report
from fedsim.studies.reproduce.comparison import Comparison, Judgement
from fedsim.studies.reproduce.measures import ConvergenceBound, RoundsToTarget
from fedsim.studies.reproduce.number import Number
from fedsim.studies.reproduce.recipe import LabelByAxis, Recipe, Setting, load


@dataclass
class Result:
    """A stored result: its folder, and the content of its report.json."""

    folder: Path
    content: dict[str, Any]

    @property
    def recipe(self) -> str:
        """The name of the recipe, PAPER/NAME."""
        return str(self.content["recipe"])

    @property
    def paper(self) -> str:
        """The folder of its paper."""
        return self.folder.parents[1].name

    @property
    def scale(self) -> str:
        """The scale: 'cpu', 'paper' or 'smoke'."""
        return str(self.content["scale"])

    @property
    def number_rows(self) -> list[dict[str, Any]]:
        """The rows that are numbers; in reports before version 0.5 the other rows have a `claim`."""
        return [row for row in self.content["rows"] if not row.get("comparison") and not row.get("claim")]

    def numbers(self, recipe: Recipe) -> dict[str, list[Number]]:
        """Return measure → numbers of the runs, as far as the recipe still has these places and measures."""
        numbers: dict[str, list[Number]] = {name: [] for name in recipe.measures}
        positions = positions_by_row(recipe, self.scale)
        for row in self.number_rows:
            if row.get("values") is not None:
                labels, name = dict(row["at"]), str(row["measure"])
                values = np.array([np.nan if value is None else value for value in row["values"]], dtype=float)
                seeds = tuple(self.content["seeds"]) if len(values) == len(self.content["seeds"]) else None
            else:
                if row["name"] not in positions:
                    continue
                labels, name = positions[row["name"]]
                values, seeds = self._stand_ins(recipe, name, row), None
            if name in numbers:
                printed = recipe.printed(name, labels) if recipe.scales[self.scale].printed else None
                numbers[name].append(Number(labels, values, printed, recipe.is_fitted(labels), seeds))
        return numbers

    def _stand_ins(self, recipe: Recipe, measure: str, row: dict[str, Any]) -> np.ndarray:
        """Return artificial values, one per seed, for a report that has only mean and standard deviation.

        They have that mean and deviation, which suffices for an unpaired interval; without seeds they are not paired.
        """
        mean, std = (np.nan if row[key] is None else float(row[key]) for key in ("ours", "std"))
        count = (
            1 if isinstance(recipe.measures[measure], RoundsToTarget | ConvergenceBound) else len(self.content["seeds"])
        )
        if count == 1 or not std > 0:
            return np.full(count, mean)
        pattern = np.arange(count) - (count - 1) / 2
        return mean + pattern * (std / pattern.std(ddof=1))


def position(recipe: Recipe, setting: Setting) -> LabelByAxis:
    """Return the labels of a run in the report, which has no tuned axis."""
    return {axis: label for axis, label in setting.labels if recipe.tune is None or axis != recipe.tune.axis}


def positions_by_row(recipe: Recipe, scale: str) -> dict[str, tuple[LabelByAxis, str]]:
    """Return name of a row → labels of its run, and measure, for reports whose rows have only a name."""
    positions: dict[str, tuple[LabelByAxis, str]] = {}
    for setting in recipe.settings(scale):
        at = position(recipe, setting)
        name = " / ".join(at.values())
        positions.setdefault(name, (at, next(iter(recipe.measures), "")))
        for measure in recipe.measures:
            positions[" / ".join([*at.values(), measure])] = at, measure
    return positions


def results(root: Path) -> list[Result]:
    """Return all stored results, by paper and in the order of their figures' numbers."""
    stored = [Result(path.parent, json.loads(path.read_text())) for path in root.glob("*/results/*/report.json")]
    return sorted(stored, key=lambda result: (result.paper, in_order(result.folder.name)))


def in_order(name: str) -> list[tuple[str, int]]:
    """Return a sort key by which fig2 precedes fig10."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", name)]


def judge(result: Result, folder: Path | None = None) -> list[Judgement]:
    """Return the verdicts of the current recipe on a stored result; `folder` holds the recipes."""
    recipe = load(result.recipe, folder)
    return report.judge(recipe, result.numbers(recipe), result.scale)


def compared(result: Result, recipe: Recipe) -> Iterator[tuple[Comparison, list[Number], list[Number] | None]]:
    """Yield each comparison of the result's scale with the stored numbers of its measures."""
    return report.compared(recipe, result.numbers(recipe), result.scale)


def rejudge(result: Result, folder: Path | None = None) -> None:
    """Write the verdicts of the current recipe into a stored result."""
    recipe = load(result.recipe, folder)
    number_rows = [row for row in map(_known_numbers, result.number_rows) if row is not None]
    judgements = report.judge(recipe, result.numbers(recipe), result.scale)
    lines = number_rows + [report.comparison_row(judgement) for judgement in judgements]
    metadata = {key: value for key, value in result.content.items() if key != "rows"}
    report.save_json(result.folder / "report.json", lines, metadata)
    if lines:
        report.save_rows(result.folder / "results.csv", lines, metadata)


def _known_numbers(row: dict[str, Any]) -> report.Row | None:
    fields = report.Row.__dataclass_fields__
    return report.Row(**{key: value for key, value in row.items() if key in fields})
