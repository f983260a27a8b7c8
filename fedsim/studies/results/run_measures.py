"""The entries of a table: a number with its spread over replicates, the cost of a target, a difference by seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedsim.evaluation.columns import is_fraction
from fedsim.evaluation.registry import HIGHER
from fedsim.run.rules import first_evaluation_at_target
from fedsim.studies.results.paired import PairedDifference, student_quantile
from fedsim.studies.results.rounding import fixed_decimals, round_to_error
from fedsim.studies.results.runs import Run, run_that_measures

# Costs of a target: name → columns that are summed.
COLUMNS_BY_COST = {
    "rounds": ("round",),
    "bytes": ("total_bytes_down", "total_bytes_up"),
    "virtual seconds": ("virtual_seconds",),
}


def cost_to_target(run: Run, metric: str, target: float, columns: tuple[str, ...]) -> np.ndarray:
    """Return the sum of these columns [R] at the first evaluation that reaches the target; NaN where none does."""
    first_evaluations = first_evaluation_at_target(run.curve(metric)[1], target, run.higher_is_better(metric))
    cumulative_cost = np.sum(
        [run.curve(name)[1] if name != "round" else _evaluation_rounds(run, metric) for name in columns], axis=0
    )
    return np.array(
        [cumulative_cost[e, r] if e >= 0 else math.nan for r, e in enumerate(first_evaluations)], dtype=float
    )


def _evaluation_rounds(run: Run, metric: str) -> np.ndarray:
    rounds, values = run.curve(metric)
    return np.broadcast_to(rounds[:, None], values.shape)


PlainAndLatexText = tuple[str, str]  # a cell as plain text and as LaTeX


@dataclass(frozen=True)
class TableMeasure:
    """A column of a table.

    Attributes:
        heading: the heading of the column.
        values_function: run → [R] numbers, NaN where a replicate has none.
        higher_is_better: whether larger numbers are better.
        is_percent: whether numbers are fractions that are shown in per cent.
        label: the heading in a LaTeX table, without its unit; '' is the heading itself.
        unit: unit of the printed numbers.
        has_best_value: whether one direction is better.
        column_group_label: the values of swept keys that make this column, as a LaTeX table prints them.
    """

    heading: str
    values_function: Callable[[Run], np.ndarray]
    higher_is_better: bool
    is_percent: bool = False
    label: str = ""
    unit: str = ""
    has_best_value: bool = True
    column_group_label: str = ""

    @property
    def factor(self) -> int:
        return 100 if self.is_percent else 1

    @property
    def significant_digits(self) -> int:
        """The number of significant digits of a number whose error is not known."""
        return 3 if self.is_percent else 4

    def format_value(self, value: float) -> str:
        """Format a number: fractions in per cent to a tenth, others to four digits."""
        text = fixed_decimals(100 * value, 1) if self.is_percent else f"{value:.4g}"
        return text.removeprefix("-") if text == "-0" else text

    def format_spread(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.is_percent else f"{value:.2g}"


def final_metric_measure(name: str, runs: list[Run], last: int = 1) -> TableMeasure:
    """Return the measure of a column of metrics.csv at the end of a run, averaged over its `last` evaluations."""
    description = run_that_measures(runs, name).describe_metric(name)
    return TableMeasure(
        name + (f", last {last}" if last > 1 else ""),
        lambda run: run.final_values(name, last),
        description.better == HIGHER,
        is_fraction(name),
        description.label + (f", mean of the last {last} evaluations" if last > 1 else ""),
        description.unit,
        description.better is not None,
    )


def cost_measures(name: str, target: float, runs: list[Run]) -> list[TableMeasure]:
    """Return the costs until a metric reaches the target: rounds; bytes and virtual seconds if all runs have them."""

    description = run_that_measures(runs, name).describe_metric(name)
    shown_target = f"{100 * target:g} %" if is_fraction(name) else f"{target:g}"

    def make_cost_measure(cost_name: str, columns: tuple[str, ...]) -> TableMeasure:
        return TableMeasure(
            f"{cost_name} to {name} {target:g}",
            lambda run: cost_to_target(run, name, target, columns),
            False,
            label=f"{cost_name} to {description.label} {shown_target}",
        )

    available_costs = [
        (cost_name, columns)
        for cost_name, columns in COLUMNS_BY_COST.items()
        if all(_has_columns(run, columns) for run in runs)
    ]
    return [make_cost_measure(cost_name, columns) for cost_name, columns in available_costs]


def _has_columns(run: Run, columns: tuple[str, ...]) -> bool:
    return all(name in run.rows[0] for name in columns)


@dataclass
class TableCell:
    """The numbers [R] of a run's replicates, with their seeds if known; statistics are over the finite numbers.

    An unfinished run is marked with a star. With an interval level, ± is half the width of Student's interval of the
    mean; else it is the standard deviation.
    """

    values: np.ndarray
    seeds: list[int] | None = None
    is_unfinished: bool = False
    interval_level: float | None = None

    @property
    def finite_values(self) -> np.ndarray:
        return self.values[np.isfinite(self.values)]

    @property
    def mean(self) -> float:
        """The mean over replicates; NaN if none has a number."""
        return float(self.finite_values.mean()) if len(self.finite_values) else math.nan

    @property
    def std(self) -> float:
        """The sample standard deviation; NaN for fewer than two numbers."""
        return float(self.finite_values.std(ddof=1)) if len(self.finite_values) > 1 else math.nan

    @property
    def standard_error(self) -> float:
        """The standard error of the mean; NaN for fewer than two numbers."""
        return self.std / math.sqrt(len(self.finite_values)) if len(self.finite_values) else math.nan

    @property
    def interval_half_width(self) -> float:
        """Half the width of Student's interval of the mean at the interval level; NaN for fewer than two numbers."""
        count = len(self.finite_values)
        if count < 2 or self.interval_level is None:
            return math.nan
        return student_quantile(0.5 + self.interval_level / 2, count - 1) * self.standard_error

    @property
    def spread(self) -> float:
        """The number after ±."""
        return self.std if self.interval_level is None else self.interval_half_width

    def value_by_column_suffix(self) -> dict[str, float]:
        """Return suffix of the heading → number, for CSV."""
        spread = {" std": self.std} if self.interval_level is None else {" half width": self.interval_half_width}
        return {"": self.mean, **spread, " n": len(self.finite_values)}

    def format_entry(self, measure: TableMeasure) -> PlainAndLatexText:
        """Return the entry as plain text and as LaTeX."""
        if not len(self.finite_values):
            return "–", "--"
        count_note = (
            f" ({len(self.finite_values)} of {len(self.values)})" if len(self.finite_values) < len(self.values) else ""
        )
        mean, unit = measure.format_value(self.mean), " %" if measure.is_percent else ""
        factor = measure.factor
        paper = round_to_error(
            factor * self.mean, factor * self.spread, factor * self.standard_error, measure.significant_digits
        ).latex
        plain_text = mean if len(self.finite_values) == 1 else f"{mean} ± {measure.format_spread(self.spread)}"
        unfinished_mark, latex_unfinished_mark = (" *", "$^{*}$") if self.is_unfinished else ("", "")
        return f"{plain_text}{unit}{unfinished_mark}{count_note}", f"{paper}{latex_unfinished_mark}{count_note}"


@dataclass
class ReferenceDifference:
    """The differences by seed of a run's numbers to those of the reference run."""

    paired_differences: PairedDifference
    higher_is_better: bool

    def value_by_column_suffix(self) -> dict[str, float]:
        low, high = self.paired_differences.confidence_interval
        num_better, num_pairs = (
            self.paired_differences.num_better_pairs(self.higher_is_better),
            self.paired_differences.num_pairs,
        )
        return {
            "": self.paired_differences.mean,
            " low": low,
            " high": high,
            " better": num_better,
            " pairs": num_pairs,
        }

    def format_entry(self, measure: TableMeasure) -> PlainAndLatexText:
        if not self.paired_differences.num_pairs:
            return "–", "--"
        low, high = (measure.format_value(value) for value in self.paired_differences.confidence_interval)
        mean = ("+" if self.paired_differences.mean > 0 else "") + measure.format_value(self.paired_differences.mean)
        count = f"{self.paired_differences.num_better_pairs(self.higher_is_better)}/{self.paired_differences.num_pairs}"
        if self.paired_differences.num_pairs == 1:
            return f"{mean}, {count}", f"${mean}$, {count}"
        return f"{mean} [{low}, {high}], {count}", f"${mean}$ $[{low}, {high}]$, {count}"
