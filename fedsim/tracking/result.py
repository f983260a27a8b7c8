"""What a finished run leaves behind."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsim.evaluation.columns import PLACE, WORK
from fedsim.strategies import State

Row = dict[str, Any]


@dataclass
class Result:
    """Attributes:

    history: one row per evaluated round and replicate; the keys are those of `fedsim.evaluation.COLUMNS`.
    state: the strategy's last state; `state.model` is [R, d].
    seconds: wall time, resumed parts included.
    samples: training samples processed.
    extra: what else summary.json holds: 'newcomers', one entry per epoch of theirs (`fedsim.personal.Newcomers`).
    """

    history: list[Row]
    state: State
    seconds: float
    samples: int
    folder: str | None = None
    extra: Row = field(default_factory=dict)

    @property
    def metrics(self) -> list[str]:
        """Names of the measured columns."""
        return measured(self.history)

    @property
    def final(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of every metric after the last round, over the replicates not given up."""
        last = [row for row in self.history if row["round"] == self.history[-1]["round"]]
        return {name: mean_std([row[name] for row in last]) for name in self.metrics}


def measured(history: list[Row]) -> list[str]:
    """The columns of a history that are results rather than bookkeeping."""
    return [name for name in history[0] if name not in PLACE | WORK]


def mean_std(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for a single value) of those that are numbers; NaN where none is."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan, math.nan
    return float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
