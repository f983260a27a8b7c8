"""The measures of a row: one number per seed, read from its run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsim.core import checks
from fedsim.evaluation.columns import is_fraction, is_higher_better
from fedsim.studies.results.run_measures import COLUMNS_BY_COST, cost_to_target
from fedsim.studies.results.runs import Run

COLUMNS_BY_BOARD_COST = {**COLUMNS_BY_COST, "samples": ("samples",), "deployments": ("round",)}


@dataclass
class LeaderboardMeasure:
    """A measure of a board: the final value of a metric, or the cost of reaching the track's target.

    Attributes:
        metric: a column of metrics.csv.
        last: number of evaluations at the end over which the metric is averaged.
        until: the cost of reaching the target, instead of the final value: 'rounds', 'bytes', 'samples' or
            'deployments', models to which a client's data react: one per local step, or with shift.deploy=round one
            per round or `redraw`.
        about: a description for readers.
    """

    metric: str
    last: int = 1
    until: str | None = None
    about: str = ""

    def __post_init__(self) -> None:
        if self.until is not None:
            checks.check_choice("until", self.until, COLUMNS_BY_BOARD_COST)

    def __call__(self, run: Run, target: float) -> list[float]:
        """Return one number per replicate [R]; NaN where it diverged or did not reach the target."""
        if self.until is None:
            return [float(value) for value in run.final_values(self.metric, self.last)]
        if not run.has_metric(self.metric):
            return [float("nan")] * run.replicates
        factor = deployed_models_per_round(run) if self.until == "deployments" else 1.0
        return [
            factor * float(value)
            for value in cost_to_target(run, self.metric, target, COLUMNS_BY_BOARD_COST[self.until])
        ]

    @property
    def higher_is_better(self) -> bool:
        """Whether larger values are better."""
        return self.until is None and is_higher_better(self.metric)

    @property
    def is_percent(self) -> bool:
        """Whether it is a fraction that is shown in per cent."""
        return self.until is None and is_fraction(self.metric)


def deployed_models_per_round(run: Run) -> float:
    """Return the number of models per round to which a client's data react."""
    settings = run.settings
    if settings.get("shift.deploy", "step") == "step":
        return float(settings["local.steps"])
    return 1 / float(settings.get("shift.redraw") or 1)


def metric_curve(run: Run, metric: str) -> tuple[list[int], list[float]]:
    """Return rounds and the metric's mean over replicates with finite values; empty if the metric is not measured."""
    if not run.has_metric(metric):
        return [], []
    rounds, values = run.curve(metric)
    with np.errstate(invalid="ignore"):
        finite_mask = np.isfinite(values)
        means = np.where(finite_mask, values, 0).sum(1) / np.maximum(finite_mask.sum(1), 1)
    return [int(t) for t in rounds], [
        float(f"{v:.5g}") if n else float("nan") for v, n in zip(means, finite_mask.any(1), strict=True)
    ]
