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
from fedsim.studies.reproduce.measures import ConvergenceBoundRatio, RoundsToTarget
from fedsim.studies.reproduce.number import MeasuredNumber
from fedsim.studies.reproduce.recipe import LabelByAxis, Recipe, RecipeSetting, load_recipe


@dataclass
class StoredRecipeResult:
    """A stored result: its folder, and the content of its report.json."""

    folder: Path
    report_content: dict[str, Any]

    @property
    def recipe(self) -> str:
        """The name of the recipe, PAPER/NAME."""
        return str(self.report_content["recipe"])

    @property
    def paper(self) -> str:
        """The folder of its paper."""
        return self.folder.parents[1].name

    @property
    def scale(self) -> str:
        """The scale: 'cpu', 'paper' or 'smoke'."""
        return str(self.report_content["scale"])

    @property
    def run_seconds(self) -> float | None:
        """The sum of the seconds of its runs, as far as they are recorded; None for older results and without runs."""
        seconds = self.report_content.get("seconds") or {}
        return float(sum(seconds.values())) if seconds else None

    @property
    def measured_number_rows(self) -> list[dict[str, Any]]:
        """The rows that are numbers; in reports before version 0.5 the other rows have a `claim`."""
        return [row for row in self.report_content["rows"] if not row.get("comparison") and not row.get("claim")]

    def numbers(self, recipe: Recipe) -> dict[str, list[MeasuredNumber]]:
        """Return measure → numbers of the runs, as far as the recipe still has these places and measures."""
        numbers: dict[str, list[MeasuredNumber]] = {name: [] for name in recipe.measures}
        positions = labels_by_row_name(recipe, self.scale)
        for row in self.measured_number_rows:
            if row.get("values") is not None:
                labels, name = dict(row["at"]), str(row["measure"])
                values = np.array([np.nan if value is None else value for value in row["values"]], dtype=float)
                seeds = (
                    tuple(self.report_content["seeds"]) if len(values) == len(self.report_content["seeds"]) else None
                )
            else:
                if row["name"] not in positions:
                    continue
                labels, name = positions[row["name"]]
                values, seeds = self._synthetic_values(recipe, name, row), None
            if name in numbers:
                paper_value = recipe.paper_value(name, labels) if recipe.scales[self.scale].printed else None
                numbers[name].append(
                    MeasuredNumber(labels, values, paper_value, recipe.has_fitted_label(labels), seeds)
                )
        return numbers

    def _synthetic_values(self, recipe: Recipe, measure: str, row: dict[str, Any]) -> np.ndarray:
        """Return artificial values, one per seed, for a report that has only mean and standard deviation.

        They have that mean and deviation, which suffices for an unpaired interval; without seeds they are not paired.
        """
        mean, std = (np.nan if row[key] is None else float(row[key]) for key in ("ours", "std"))
        count = (
            1
            if isinstance(recipe.measures[measure], RoundsToTarget | ConvergenceBoundRatio)
            else len(self.report_content["seeds"])
        )
        if count == 1 or not std > 0:
            return np.full(count, mean)
        pattern = np.arange(count) - (count - 1) / 2
        return mean + pattern * (std / pattern.std(ddof=1))


def labels_in_report(recipe: Recipe, setting: RecipeSetting) -> LabelByAxis:
    """Return the labels of a run in the report, which has no tuned axis."""
    return {axis: label for axis, label in setting.labels if recipe.tune is None or axis != recipe.tune.axis}


def labels_by_row_name(recipe: Recipe, scale: str) -> dict[str, tuple[LabelByAxis, str]]:
    """Return name of a row → labels of its run, and measure, for reports whose rows have only a name."""
    positions: dict[str, tuple[LabelByAxis, str]] = {}
    for setting in recipe.settings(scale):
        setting_position = labels_in_report(recipe, setting)
        name = " / ".join(setting_position.values())
        positions.setdefault(name, (setting_position, next(iter(recipe.measures), "")))
        for measure in recipe.measures:
            positions[" / ".join([*setting_position.values(), measure])] = setting_position, measure
    return positions


def load_stored_results(root: Path) -> list[StoredRecipeResult]:
    """Return all stored results, by paper and in the order of their figures' numbers."""
    stored = [
        StoredRecipeResult(path.parent, json.loads(path.read_text())) for path in root.glob("*/results/*/report.json")
    ]
    return sorted(stored, key=lambda result: (result.paper, natural_sort_key(result.folder.name)))


def natural_sort_key(name: str) -> list[tuple[str, int]]:
    """Return a sort key by which fig2 precedes fig10."""
    return [(letters, int(digits or 0)) for letters, digits in re.findall(r"(\D*)(\d*)", name)]


def judge(result: StoredRecipeResult, recipe: Recipe) -> list[Judgement]:
    """Return the verdicts of the current recipe on a stored result."""
    return report.judge_comparisons(recipe, result.numbers(recipe), result.scale)


def comparisons_with_numbers(
    result: StoredRecipeResult, recipe: Recipe
) -> Iterator[tuple[Comparison, list[MeasuredNumber], list[MeasuredNumber] | None]]:
    """Yield each comparison of the result's scale with the stored numbers of its measures."""
    return report.comparisons_with_numbers(recipe, result.numbers(recipe), result.scale)


def update_verdicts(result: StoredRecipeResult, folder: Path | None = None) -> None:
    """Write the verdicts of the current recipe into a stored result."""
    recipe = load_recipe(result.recipe, folder)
    number_rows = [row for row in map(_parse_report_row, result.measured_number_rows) if row is not None]
    judgements = judge(result, recipe)
    lines = number_rows + [report.comparison_row(judgement) for judgement in judgements]
    metadata = {key: value for key, value in result.report_content.items() if key != "rows"}
    report.save_json(result.folder / "report.json", lines, metadata)
    if lines:
        report.save_rows(result.folder / "results.csv", lines, metadata)


def _parse_report_row(row: dict[str, Any]) -> report.ReportRow | None:
    fields = report.ReportRow.__dataclass_fields__
    return report.ReportRow(**{key: value for key, value in row.items() if key in fields})
