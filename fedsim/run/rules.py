"""Criteria that end a run before its last round. They are functions of the evaluations so far, so that a resumed run
ends where the uninterrupted one does."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from fedsim.core import checks
from fedsim.core.constraints import Count, OneOf, Positive, Validated
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.evaluation.columns import is_higher_better, validation_metric
from fedsim.run.tracking.result import MetricsRow, result_columns

STOP_AGGREGATES = ("all", "mean")
VIRTUAL_TIME_COLUMN = "virtual_seconds"
TARGET_TOLERANCE = 1e-9  # a target of 0.7 is reached by 0.7 with rounding error


def reaches_target(values: np.ndarray, target: float, higher_is_better: bool) -> np.ndarray:
    """Return which of the values [E, …] are at the target or on its better side."""
    return np.asarray(values >= target - TARGET_TOLERANCE if higher_is_better else values <= target + TARGET_TOLERANCE)


def first_evaluation_at_target(values: np.ndarray, target: float, higher_is_better: bool) -> np.ndarray:
    """Return the first evaluation of values [E, R] that reaches the target, [R]; −1 if none does."""
    reached_mask = reaches_target(values, target, higher_is_better)
    return np.where(reached_mask.any(0), reached_mask.argmax(0), -1)


@dataclass(frozen=True)
class Stop(Validated):
    """The criteria that end a run: it ends after the first evaluation at which one of them is met. Without criteria, it
    runs to its last round.

    Attributes:
        target: metric → value. The run ends when each was reached; the rounds it took stand in summary.json.
        patience: the run ends after so many evaluations without a better value of `metric`.
        seconds: the run ends after the first round that is over after so many seconds, resumed parts included.
        virtual_seconds: the run ends after the first round by whose end so many went by, by the run's clock.
        metric: what `patience` looks at, and by which each replicate's best model is kept; None is the mean of the
            server's model on validation samples, where there are any.
        over: 'all': each replicate is looked at by itself, and the run goes on until the last one is there, since they
            are simulated together; 'mean': their mean decides.
    """

    effective_if = (
        EffectiveIf(
            "over",
            lambda component, run: any(
                r is not None for r in (component.target, component.patience, component.virtual_seconds)
            ),
            "{at}.target, {at}.patience or {at}.virtual_seconds",
        ),
        EffectiveIf(
            "patience",
            lambda component, run: component.patience < run.num_evaluations,
            "more evaluations: more rounds, or a smaller eval_every",
        ),
    )

    target: dict[str, float] | None = None
    patience: Count | None = None
    seconds: Positive | None = None
    metric: str | None = None
    over: Annotated[str, OneOf(*STOP_AGGREGATES)] = "all"
    virtual_seconds: Positive | None = None

    def __post_init__(self) -> None:
        if self.target is not None and (not isinstance(self.target, dict) or not self.target):
            raise ConfigError(
                f"{{target}}={self.target!r} must be metrics and values, such as {{test_accuracy: 0.9}}",
                mentions=("target",),
            )
        for name, value in (self.target or {}).items():
            checks.check_finite(f"target.{name}", value)
        if self.metric is not None and not isinstance(self.metric, str):
            raise ConfigError(
                f"{{metric}}={self.metric!r} must be the name of a metric, such as test_accuracy", mentions=("metric",)
            )

    @property
    def active(self) -> bool:
        """Whether there is a criterion."""
        return bool(self.target) or any(x is not None for x in (self.patience, self.seconds, self.virtual_seconds))

    def selection_metric(self, column_names: Collection[str]) -> str | None:
        """Return the metric of `patience` and of the best model, among those that the run measures.

        Raises:
            ConfigError: the run does not measure what a rule looks at.
        """
        if self.virtual_seconds is not None and VIRTUAL_TIME_COLUMN not in column_names:
            raise ConfigError(
                f"stop.virtual_seconds={self.virtual_seconds:g}, but no virtual time goes by; add clock=devices "
                "or events"
            )
        metrics = result_columns([dict.fromkeys(column_names)])
        for name in self.target or {}:
            checks.check_choice("stop.target", str(name), metrics)
        if self.metric is not None:
            return checks.check_choice("stop.metric", self.metric, metrics)
        default_metric = validation_metric(column_names)
        if default_metric is None and self.patience is not None:
            raise ConfigError(
                f"stop.patience={self.patience} has no metric to compare, since no validation samples are held out; "
                "give partition.validation=0.2, or a metric by stop.metric"
            )
        return default_metric

    def stop_reason(
        self,
        metrics_history: list[MetricsRow],
        seconds: float,
        metric: str | None,
        column_descriptions: Mapping[str, str] | None = None,
    ) -> str | None:
        """Return why the run ends here, in a sentence, or None if it continues.

        Args:
            metrics_history: all evaluations so far.
            seconds: the run has taken.
            metric: what `patience` looks at.
            column_descriptions: of the columns.
        """
        if not metrics_history or not metrics_history[-1]["round"]:
            return None
        round_text = f"after round {metrics_history[-1]['round']}"
        replicate_scope = "in every replicate" if self.over == "all" else "in the mean over replicates"
        if self.target and all(
            (self._rounds_to_target(metrics_history, *goal, column_descriptions) >= 0).all()
            for goal in self.target.items()
        ):
            goals = " and ".join(f"{name} {value:g}" for name, value in self.target.items())
            return f"stop.target: {goals} was reached {replicate_scope} {round_text}"
        if self.patience is not None and metric is not None:
            best = best_evaluation_index(
                self._metric_values(metrics_history, metric), is_higher_better(metric, column_descriptions)
            )
            if len(self._metric_values(metrics_history, metric)) - 1 - best.max() >= self.patience:
                return (
                    f"stop.patience: {metric} was not better {replicate_scope} for {self.patience} evaluations "
                    f"{round_text}"
                )
        if self.seconds is not None and seconds >= self.seconds:
            return f"stop.seconds: {self.seconds:g} seconds were over {round_text}"
        if self.virtual_seconds is not None and self.is_time_over(self._virtual_times(metrics_history)[-1]):
            return (
                f"stop.virtual_seconds: {self.virtual_seconds:g} virtual seconds were over {replicate_scope} "
                f"{round_text}"
            )
        return None

    def is_time_over(self, times: np.ndarray) -> bool:
        """Return whether the virtual time is over in the remaining replicates, given their times [R']."""
        if self.virtual_seconds is None or not len(times):
            return False
        return bool((times.mean() if self.over == "mean" else times.min()) >= self.virtual_seconds)

    def _virtual_times(self, history: list[MetricsRow]) -> np.ndarray:
        """Return the virtual seconds [E, R'] of the replicates that still have numbers, or of all if none has."""
        count = sum(row["round"] == history[0]["round"] for row in history)
        times = np.array([row[VIRTUAL_TIME_COLUMN] for row in history], dtype=float).reshape(-1, count)
        remaining_mask = np.isfinite([row["train_loss"] for row in history[-count:]])
        return times[:, remaining_mask] if remaining_mask.any() else times

    def target_summary(
        self, metrics_history: list[MetricsRow], column_descriptions: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the entry of summary.json: the value of each target, and the rounds that each replicate needed to
        reach it, None if it has not; under 'mean' those of the mean, and under a clock the virtual seconds as well."""
        target_entries: dict[str, Any] = {}
        for metric_name, value in (self.target or {}).items():
            rounds = sorted({row["round"] for row in metrics_history})
            first_evaluations = self._rounds_to_target(
                metrics_history, metric_name, value, column_descriptions, given_up=True
            )
            target_entries[metric_name] = {
                "value": value,
                "rounds": [rounds[e] if e >= 0 else None for e in first_evaluations],
            }
            if VIRTUAL_TIME_COLUMN in metrics_history[-1]:
                times = self._metric_values(metrics_history, VIRTUAL_TIME_COLUMN, given_up=True)
                target_entries[metric_name][VIRTUAL_TIME_COLUMN] = [
                    float(times[e, r]) if e >= 0 else None for r, e in enumerate(first_evaluations)
                ]
        return {"targets": target_entries} if target_entries else {}

    def _rounds_to_target(
        self,
        metrics_history: list[MetricsRow],
        name: str,
        value: float,
        column_descriptions: Mapping[str, str] | None,
        given_up: bool = False,
    ) -> np.ndarray:
        return first_evaluation_at_target(
            self._metric_values(metrics_history, name, given_up), value, is_higher_better(name, column_descriptions)
        )

    def _metric_values(self, history: list[MetricsRow], name: str, given_up: bool = False) -> np.ndarray:
        """Return the values [E, R'] of the replicates that still have numbers; of all with `given_up`; or [E, 1] their
        mean."""
        count = sum(row["round"] == history[0]["round"] for row in history)
        metric_values = np.array([row[name] for row in history], dtype=float).reshape(-1, count)
        remaining_mask = np.isfinite(metric_values[-1])
        if self.over == "mean":
            return (
                metric_values[:, remaining_mask].mean(1, keepdims=True)
                if remaining_mask.any()
                else metric_values[:, :1] * math.nan
            )
        return metric_values if given_up or not remaining_mask.any() else metric_values[:, remaining_mask]


def best_evaluation_index(values: np.ndarray, higher_is_better: bool) -> np.ndarray:
    """Return the first evaluation at which values [E, R] were best, [R]; NaN is ignored."""
    worst_value = -np.inf if higher_is_better else np.inf
    filled_values = np.where(np.isnan(values), worst_value, values)
    return np.asarray(filled_values.argmax(0) if higher_is_better else filled_values.argmin(0))
