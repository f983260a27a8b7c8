"""Tuning: each algorithm of a track gets the same number of trials, on separate seeds; the best trial is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.evaluation.columns import is_higher_better
from fedsim.studies.results.runs import Run


@dataclass
class TunedParameter:
    """A parameter that is tuned together with the local rate.

    Attributes:
        key: its key in the configuration.
        values: the values that are tried.
    """

    key: str
    values: list[Any]

    def override(self, value: Any) -> str:
        """Return the override that sets the parameter to this value."""
        return f"{self.key}={'null' if value is None else value}"


@dataclass(frozen=True)
class BoardTrial:
    """A local rate and a value of the tuned parameter, which is None for entries that tune the rate only."""

    lr: float
    tuned_value: Any = None


@dataclass
class TuningBudget:
    """The tuning budget, which is the same for all algorithms.

    Attributes:
        trials: number of trials of each algorithm, shared equally among the values of its tuned parameter.
        seeds: seeds of the trials, none of which a row uses.
        rounds: number of rounds of a trial.
        metric: the metric that scores a trial, as a mean over seeds and cells.
        last: number of evaluations at the end over which the metric is averaged.
        overrides: Hydra overrides of trials only.
    """

    trials: int
    seeds: list[int]
    rounds: int
    metric: str
    last: int = 1
    overrides: list[str] = field(default_factory=list)

    def check(self, finding_label: str, knob: TunedParameter | None) -> None:
        """Refuse a tuned parameter whose number of values does not divide the number of trials."""
        checks.check_whole_number("tuning.trials", self.trials)
        if knob is not None and (not knob.values or self.trials % len(knob.values)):
            raise ConfigError(
                f"{finding_label}: knob.values={knob.values} must be as many as divide tuning.trials={self.trials}"
            )

    def rate_grids(self, knob: TunedParameter | None, rates: tuple[float, float]) -> dict[Any, list[float]]:
        """Return value of the tuned parameter (None without one) → local rates, evenly spaced in their logarithm."""
        values = [None] if knob is None else knob.values
        return {value: geometric_grid(*rates, self.trials // len(values)) for value in values}

    def seeds_and_rates(self, rates: list[float]) -> tuple[list[int], list[float]]:
        """Return the seed and the rate of each replicate of one run, which combines each rate with all seeds."""
        return self.seeds * len(rates), [rate for rate in rates for _ in self.seeds]

    def scores(self, run: Run, rates: list[float]) -> list[float]:
        """Return the score of each rate, larger is better; −∞ where a seed has no finite value."""
        sign = 1 if is_higher_better(self.metric) else -1
        values = sign * run.final_values(self.metric, self.last).reshape(len(rates), len(self.seeds)).mean(1)
        return [float(value) if math.isfinite(value) else -math.inf for value in values]


def geometric_grid(lowest_rate: float, highest_rate: float, count: int) -> list[float]:
    """Return `count` numbers from `lowest_rate` to `highest_rate` in geometric progression, rounded to two digits."""
    if count == 1:
        return [float(f"{math.sqrt(lowest_rate * highest_rate):.2g}")]
    return [float(f"{rate:.2g}") for rate in np.geomspace(lowest_rate, highest_rate, count)]


def best_trial(scores: dict[BoardTrial, list[float]]) -> BoardTrial | None:
    """Return the trial with the highest mean score, the first in a tie; None if each trial failed somewhere."""
    means = {trial: sum(values) / len(values) for trial, values in scores.items()}
    best = max(means, key=lambda trial: means[trial])
    return best if math.isfinite(means[best]) else None
