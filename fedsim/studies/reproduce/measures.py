"""Measures of a run: numbers computed from its metrics, one per replicate.

In a recipe the kind of measure is given by the key that only it has: `until`, `ahead_of`, `order` or `bound`; a measure
with none of them is a value at the end of training, or in a window of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedsim.core import checks
from fedsim.run.rules import TARGET_TOLERANCE, reaches_target
from fedsim.studies.results.crossing import rounds_to_target
from fedsim.studies.results.runs import Run


def make_measure(**options: Any) -> RunMeasure:
    """Create a measure from a recipe's options, whose keys determine its kind."""
    kind = next((kind for key, kind in MEASURE_BY_KIND.items() if key in options), MetricMeasure)
    return kind(**options)


@dataclass(kw_only=True)
class RunMeasure(ABC):
    """The base class of measures.

    Attributes:
        metric: a column of metrics.csv; or 'a or b', or 'newcomers a' (see `Run.curve`).
        percent: multiply by 100.
        times: or by this factor: 2 for a paper that does not halve its squared loss.
        unit: unit of the number, in tables and on axes.
        iterations: count local steps wherever the measure counts rounds.
        x: a column that grows, such as virtual_seconds, in the place of rounds wherever the measure counts them.
        absent: the value that a comparison uses for a missing number.
    """

    metric: str
    percent: bool = False
    times: float = 1.0
    unit: str = ""
    iterations: bool = False
    x: str | None = None
    absent: ClassVar[float] = math.nan

    @abstractmethod
    def __call__(self, run: Run, rival_runs: list[Run] | None = None) -> np.ndarray:
        """Return the values [R], or [1] of all replicates together; NaN where there is none.

        Args:
            run: a finished run.
            rival_runs: the recipe's runs that `is_needed_for` selects.
        """

    def is_needed_for(self, first_labels: dict[str, str], second_labels: dict[str, str]) -> bool:
        """Return whether the run at labels `first_labels` (axis → label) is needed to measure the run at
        `second_labels`."""
        return False

    def curve(self, run: Run) -> tuple[np.ndarray, np.ndarray]:
        """Return rounds, local steps or positions along `x` [E], and the metric's values [E, R]."""
        rounds, values = run.curve_along(self.metric, self.x)
        return (rounds * run.settings["local_steps"] if self.iterations else rounds), values

    @property
    def period_text(self) -> str:
        """The rounds over which it is taken, for readers; '' for the last evaluation, and where its name says it."""
        return ""

    @property
    def columns(self) -> list[str]:
        """The columns of metrics.csv that it is computed from."""
        return [self.metric, *([] if self.x is None else [self.x])]

    @property
    def factor(self) -> float:
        """The factor applied to values of the metric."""
        return self.times * (100 if self.percent else 1)


@dataclass(kw_only=True)
class MetricMeasure(RunMeasure):
    """The value of a metric at the end of training, or in a window of rounds.

    Attributes:
        last: number of last rounds over whose evaluations the metric is averaged; 0 takes only the last evaluation.
        window: rounds [first, last] that are used instead of the last ones.
        spread: whether to take the standard deviation over those evaluations instead of their mean.
        largest: whether to take the largest value of all evaluations instead.
        plus: summand for each evaluation, such as 1 for an age that a paper counts from 1.
        square: whether to square the evaluations, for a second moment.
    """

    last: int = 0
    window: tuple[int, int] | None = None
    spread: bool = False
    largest: bool = False
    plus: float = 0.0
    square: bool = False

    @property
    def period_text(self) -> str:
        if self.largest:
            return "the largest value of all evaluations"
        quantity = "standard deviation" if self.spread else "mean"
        if self.window is not None:
            return f"{quantity} over the evaluations in rounds {self.window[0]} to {self.window[1]}"
        return f"{quantity} over the evaluations in the last {self.last} rounds" if self.last else ""

    def __call__(self, run: Run, rival_runs: list[Run] | None = None) -> np.ndarray:
        rounds, values = self.curve(run)
        values = (values + self.plus) ** (2 if self.square else 1)
        if self.largest:
            return values.max(0) * self.factor
        round_mask = rounds > rounds[-1] - self.last if self.last else rounds == rounds[-1]
        if self.window is not None:
            round_mask = (rounds >= self.window[0]) & (rounds <= self.window[1])
        if not round_mask.any():
            return np.full(values.shape[1], math.nan)
        return (values[round_mask].std(0) if self.spread else values[round_mask].mean(0)) * self.factor


@dataclass(kw_only=True)
class RoundsToTarget(RunMeasure):
    """[1] the first evaluated round at which the replicates' mean is on one side of a target; nan where it never is.

    Attributes:
        until: 'above' or 'below' the target.
        each: instead of that of the mean, [R] that of every replicate. One that never gets there counts as if it did at
            the evaluation after the last, which is a lower bound.
        stays: … and from which on it stays there: what only swings through does not count.
        target: a number; or
        share, best_over, last: … this share of the best run along an axis, rounded down to tenths (fedawe Table 8).
        every: only evaluations at multiples of so many rounds count; along `x` all do.
        interpolated: where the best value so far, linear between evaluations, crosses the target (McMahan et al. 2017):
            not a round, but a place between two.
    """

    until: str
    each: bool = False
    stays: bool = False
    interpolated: bool = False
    target: float | None = None
    share: float = 1.0
    best_over: str | None = None
    last: int = 0
    every: int = 1
    absent: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        checks.check_choice("until", self.until, ("above", "below"))
        if (self.target is None) == (self.best_over is None):
            raise ValueError(f"until={self.until} needs either target or best_over")
        if self.interpolated and self.stays:
            raise ValueError("interpolated looks at the best value so far, which stays by itself; leave out stays")

    def __call__(self, run: Run, rival_runs: list[Run] | None = None) -> np.ndarray:
        rounds, values = self.curve(run)
        counted_rounds = self._counted_rounds_mask(rounds)
        times, target = rounds[counted_rounds], self._target_value(rival_runs or [run])
        curves = values[counted_rounds] if self.each else values[counted_rounds].mean(1, keepdims=True)
        never_value = 2 * times[-1] - times[-2] if self.each and len(times) > 1 else math.nan
        if self.interpolated:
            crossings = rounds_to_target(times, curves, target, self.until == "above")
            return np.where(np.isnan(crossings), never_value, crossings)
        return np.array(
            [self._first_time_at_target(times, curve, target, never_value) for curve in curves.T], dtype=float
        )

    def last_counted_time(self, run: Run) -> float:
        """The last evaluated round that counts: what is beyond it was not reached."""
        rounds, _ = self.curve(run)
        return float(rounds[self._counted_rounds_mask(rounds)][-1])

    def _counted_rounds_mask(self, rounds: np.ndarray) -> np.ndarray:
        return rounds % self.every == 0 if self.x is None else rounds >= 0

    def _first_time_at_target(self, times: np.ndarray, curve: np.ndarray, target: float, never_value: float) -> float:
        reached_mask = reaches_target(curve, target, self.until == "above")
        if self.stays:
            reached_mask = np.logical_and.accumulate(reached_mask[::-1])[::-1]
        return float(times[reached_mask][0]) if reached_mask.any() else never_value

    def is_needed_for(self, first_labels: dict[str, str], second_labels: dict[str, str]) -> bool:
        return self.best_over is not None and all(
            first_labels[axis] == second_labels[axis] for axis in first_labels if axis != self.best_over
        )

    def _target_value(self, rival_runs: list[Run]) -> float:
        if self.target is not None:
            return self.target
        best = max(MetricMeasure(metric=self.metric, last=self.last)(run).mean() for run in rival_runs)
        return self.share * math.floor(10 * best + TARGET_TOLERANCE) / 10


@dataclass(kw_only=True)
class LeadEndRound(RunMeasure):
    """The round until which the replicate is ahead of that of another run: where its lead, summed over the evaluations,
    is largest; 0 if it never leads.

    Attributes:
        ahead_of: that run is the same recipe's at these labels, axis → label.
    """

    ahead_of: dict[str, str]

    def __call__(self, run: Run, rival_runs: list[Run] | None = None) -> np.ndarray:
        rounds, values = run.curve(self.metric)
        if not rival_runs or rival_runs[0].replicates != values.shape[1]:
            return np.full(values.shape[1], math.nan)
        rival_rounds, rival_values = rival_runs[0].curve(self.metric)
        is_common_round = np.isin(rounds, rival_rounds) & (rounds > 0)
        cumulative_lead = np.cumsum(
            values[is_common_round] - rival_values[np.isin(rival_rounds, rounds[is_common_round])], axis=0
        )
        return np.where(cumulative_lead.max(0) > 0, rounds[is_common_round][cumulative_lead.argmax(0)], 0).astype(float)

    def is_needed_for(self, first_labels: dict[str, str], second_labels: dict[str, str]) -> bool:
        return first_labels != second_labels and first_labels == second_labels | self.ahead_of


@dataclass(kw_only=True)
class ConvergenceOrder(RunMeasure):
    """How the replicates' mean *square* falls: the slope of its logarithm over that of t + γ, −1 for O(1/T).

    t counts local steps and γ is the offset of the rate's schedule, 0 where it has none. The mean of a distance passes
    through zero where its bias changes sign; that of its square does not. The slope is one number of all replicates:
    given are its jackknife values R·s − (R − 1)·s₋ᵣ, whose mean is the slope, corrected for bias, and whose standard
    error is the slope's.

    Attributes:
        order: over this last share of the rounds.
    """

    order: float

    def __post_init__(self) -> None:
        checks.check_positive("order", checks.check_fraction("order", self.order))

    def __call__(self, run: Run, rival_runs: list[Run] | None = None) -> np.ndarray:
        rounds, values = run.curve(self.metric)
        late_mask = (rounds >= (1 - self.order) * rounds[-1]) & (rounds > 0)
        if late_mask.sum() < 2:
            return np.full(values.shape[1], math.nan)
        time, squares = np.log(offset_local_steps(run, rounds[late_mask])), values[late_mask] ** 2

        def slope(squares: np.ndarray) -> float:
            return float(np.polyfit(time, np.log(squares.mean(1)), 1)[0])

        return jackknife(squares, slope)


@dataclass(kw_only=True)
class ConvergenceBoundRatio(RunMeasure):
    """The largest ratio of the replicates' mean square d² to γ d₀² / (γ + t), over all evaluations after round 0.

    p-fedavg's Theorems 3.1 to 3.3 bound d² by v / (γ + t) with v at least γ d₀²: what is at most 1 keeps any of them.
    The ratio is one number of all replicates; given are its jackknife values, as for `ConvergenceOrder`.

    Attributes:
        bound: true.
    """

    bound: bool

    def __call__(self, run: Run, rival_runs: list[Run] | None = None) -> np.ndarray:
        rounds, values = run.curve(self.metric)
        if len(rounds) < 2:
            return np.full(values.shape[1], math.nan)
        time = offset_local_steps(run, rounds)

        def largest_scaled_ratio(squares: np.ndarray) -> float:
            scaled_squares = time * squares.mean(1)
            return float(scaled_squares[1:].max() / scaled_squares[0])

        return jackknife(values**2, largest_scaled_ratio)


MEASURE_BY_KIND: dict[str, type[RunMeasure]] = {
    "until": RoundsToTarget,
    "ahead_of": LeadEndRound,
    "order": ConvergenceOrder,
    "bound": ConvergenceBoundRatio,
}


def offset_local_steps(run: Run, rounds: np.ndarray) -> np.ndarray:
    """Return t + γ of a rate lr / (t + γ) at these rounds, t counting local steps; t alone for another schedule."""
    return rounds * run.settings["local_steps"] + run.settings.get("local.schedule.offset", 0)


def jackknife(values: np.ndarray, statistic: Callable[[np.ndarray], float]) -> np.ndarray:
    """Return the jackknife values [R] of a statistic of replicates [E, R]; for one replicate the statistic [1]."""
    count = values.shape[1]
    full_statistic = statistic(values)
    if count == 1:
        return np.array([full_statistic])
    return np.array(
        [count * full_statistic - (count - 1) * statistic(np.delete(values, r, axis=1)) for r in range(count)]
    )
