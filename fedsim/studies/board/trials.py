"""Tuning: every algorithm of a track gets as many trials, on seeds of their own; the best by held-out data is kept."""

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
    """A setting that is tuned beside the local rate.

    Attributes:
        key: of the configuration.
        values: that are tried.
    """

    key: str
    values: list[Any]

    def set(self, value: Any) -> str:
        """The override that gives it this value."""
        return f"{self.key}={'null' if value is None else value}"


@dataclass(frozen=True)
class Trial:
    """A local rate and a value of the knob; None without one."""

    lr: float
    knob: Any = None


@dataclass
class Tuning:
    """Attributes:

    trials: of every algorithm: so many rates, or for each of a knob's values an equal part of them.
    seeds: of the trials, none of them a row's.
    rounds: of a trial.
    metric: that judges, as a mean over seeds and places.
    last: evaluations at the end of which the mean is taken.
    overrides: of trials alone.
    """

    trials: int
    seeds: list[int]
    rounds: int
    metric: str
    last: int = 1
    overrides: list[str] = field(default_factory=list)

    def check(self, label: str, knob: TunedParameter | None) -> None:
        """Refuse a knob whose values do not share the trials out."""
        checks.whole_number("tuning.trials", self.trials)
        if knob is not None and (not knob.values or self.trials % len(knob.values)):
            raise ConfigError(
                f"{label}: knob.values={knob.values} must be as many as divide tuning.trials={self.trials}"
            )

    def grid(self, knob: TunedParameter | None, rates: tuple[float, float]) -> dict[Any, list[float]]:
        """Value of the knob (None without one) → local rates, evenly spaced on a logarithmic scale."""
        values = [None] if knob is None else knob.values
        return {value: geometric_grid(*rates, self.trials // len(values)) for value in values}

    def seeds_and_rates(self, rates: list[float]) -> tuple[list[int], list[float]]:
        """Of the replicates of one run: all seeds under every rate."""
        return self.seeds * len(rates), [rate for rate in rates for _ in self.seeds]

    def scores(self, run: Run, rates: list[float]) -> list[float]:
        """Of every rate, larger ones better; −∞ where a seed ended as no number."""
        sign = 1 if is_higher_better(self.metric) else -1
        values = sign * run.final_values(self.metric, self.last).reshape(len(rates), len(self.seeds)).mean(1)
        return [float(value) if math.isfinite(value) else -math.inf for value in values]


def geometric_grid(low: float, high: float, count: int) -> list[float]:
    """So many numbers from the low to the high one, each as many times the one before, to two digits."""
    if count == 1:
        return [float(f"{math.sqrt(low * high):.2g}")]
    return [float(f"{rate:.2g}") for rate in np.geomspace(low, high, count)]


def best_trial(scores: dict[Trial, list[float]]) -> Trial | None:
    """The trial of the highest mean score, the first of equal ones; None where all of them failed somewhere."""
    means = {trial: sum(values) / len(values) for trial, values in scores.items()}
    best = max(means, key=lambda trial: means[trial])
    return best if math.isfinite(means[best]) else None
