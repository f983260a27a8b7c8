"""Which trial is chosen: the best one, or one that the seeds do not tell apart from it and that a rule prefers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.studies.results.paired import PairedDifference
from fedsim.studies.tuning.space import Trial, is_number

PREFERENCES = ("smallest", "largest", "best")


@dataclass(frozen=True)
class SelectionRule:
    """Which of the trials not distinguishable from the best one is chosen.

    Attributes:
        prefer: 'smallest': the one with the smallest numbers, the first knob's compared first; 'largest': with the
            largest; 'best': the best trial itself.
        confidence: of the intervals of differences; 0.68 is, with many seeds, one standard error to each side.
    """

    prefer: str = "smallest"
    confidence: float = 0.68

    def __post_init__(self) -> None:
        checks.check_choice("prefer", self.prefer, PREFERENCES)
        if not 0 < self.confidence < 1:
            raise ConfigError(f"confidence={self.confidence} must lie between 0 and 1")


@dataclass(frozen=True)
class TrialChoice:
    """The chosen trial.

    Attributes:
        trial: that is chosen.
        best_trial: the trial of the best mean.
        indistinguishable_trials: the trials not distinguishable from the best, itself included.
        values: [R] of the chosen trial.
        loss_against_best: paired differences by which the chosen one is worse than the best.
    """

    trial: Trial
    best_trial: Trial
    indistinguishable_trials: list[Trial]
    values: np.ndarray
    loss_against_best: PairedDifference

    @property
    def mean(self) -> float:
        """Of the chosen trial, over seeds."""
        return float(self.values.mean())

    @property
    def error(self) -> float:
        """Standard error of this mean."""
        return PairedDifference(self.values).standard_error


def choose_trial(
    values: Mapping[Trial, np.ndarray], higher_is_better: bool, rule: SelectionRule | None = None
) -> TrialChoice:
    """Choose among trials that were run on the same seeds.

    A trial is not distinguishable from the best one if the interval of its paired differences (Student's t) contains
    zero. The rule prefers one of these, with the best one's values where they are not numbers.

    Args:
        values: trial → one number for each seed; a trial with a number that is not finite is left out.
        higher_is_better: of these numbers.
        rule: which trial is preferred; None: the default.

    Raises:
        ConfigError: no trial has finite numbers.
    """
    rule = rule or SelectionRule()
    finite = {trial: numbers for trial, numbers in values.items() if np.isfinite(numbers).all()}
    if not finite:
        raise ConfigError("no trial ended with finite values for all seeds; lower the rates")
    sign = 1.0 if higher_is_better else -1.0
    best = max(finite, key=lambda trial: sign * float(finite[trial].mean()))
    losses = {
        trial: PairedDifference(sign * (finite[best] - numbers), rule.confidence) for trial, numbers in finite.items()
    }
    indistinguishable_trials = [trial for trial in finite if trial == best or _contains_zero(losses[trial])]
    candidates = [trial for trial in indistinguishable_trials if _sort_key(trial) == _sort_key(best)]
    if rule.prefer == "best":
        chosen_trial = best
    else:
        chosen_trial = (min if rule.prefer == "smallest" else max)(candidates, key=_numeric_values)
    return TrialChoice(chosen_trial, best, indistinguishable_trials, finite[chosen_trial], losses[chosen_trial])


def _contains_zero(difference: PairedDifference) -> bool:
    low, high = difference.confidence_interval
    return not math.isnan(low) and low <= 0 <= high


def _sort_key(trial: Trial) -> list[Any]:
    return [value for _, value in trial if not is_number(value)]


def _numeric_values(trial: Trial) -> list[float]:
    return [float(value) for _, value in trial if is_number(value)]
