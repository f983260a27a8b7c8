"""The result of a finished run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.evaluation.columns import RUN_POSITION_COLUMNS, TIME_COLUMNS, WORK_COLUMNS
from fedsim.models.naming import StateDictLayout
from fedsim.strategies import State

MetricsRow = dict[str, Any]


@dataclass
class Result:
    """Attributes:

    history: one row per evaluated round and replicate; the keys are those of `fedsim.evaluation.COLUMN_DESCRIPTIONS`.
    state: the strategy's last state; `state.model` is [R, d].
    seconds: wall time, resumed parts included.
    samples: training samples processed.
    extra: what else summary.json holds: 'newcomers', one entry per epoch of theirs
        (`fedsim.evaluation.personal.NewcomerEvaluator`).
    final_models: [R, d] the server's models, with whatever of a row the strategy does not see.
    naming: what the module calls a row's parts.
    stopped: why the run ended before its last round; None where it did not.
    """

    history: list[MetricsRow]
    state: State
    seconds: float
    samples: int
    folder: str | None = None
    extra: MetricsRow = field(default_factory=dict)
    final_models: Tensor | None = None
    naming: StateDictLayout | None = None
    stopped: str | None = None

    @property
    def metric_names(self) -> list[str]:
        """The names of the measured columns."""
        return result_columns(self.history)

    @property
    def final(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of each metric after the last round, over the replicates that were not dropped.
        For a single replicate the standard deviation is NaN."""
        last_rows = [row for row in self.history if row["round"] == self.history[-1]["round"]]
        return {name: mean_std([row[name] for row in last_rows]) for name in self.metric_names}

    def model(self, seed: int | None = None, replicate: int | None = None) -> dict[str, Tensor]:
        """Return the last model of a replicate as a `state_dict` for the module's `load_state_dict`.

        Args:
            seed: of the replicate; it may be left out where there is one.
            replicate: its number, where several have the same seed.
        """
        assert self.naming is not None
        assert self.final_models is not None
        seeds = [row["seed"] for row in self.history[: len(self.final_models)]]
        return self.naming.state_dict(self.final_models[find_replicate(seeds, seed, replicate, "the run")].cpu())


def find_replicate(seeds: list[int], seed: int | None, replicate: int | None, run_name: str) -> int:
    """Return the number of the replicate that has this seed, or this number.

    Raises:
        ConfigError: there is none, or there are several.
    """
    if replicate is not None:
        if not 0 <= replicate < len(seeds):
            raise ConfigError(f"replicate={replicate}, but {run_name} has {len(seeds)}")
        return replicate
    if seed is None and len(seeds) > 1:
        are_seeds_distinct = len(set(seeds)) == len(seeds)
        example = f"seed={seeds[0]}" if are_seeds_distinct else "replicate=0"
        choices_text = (
            f"the seeds {', '.join(map(str, seeds))}" if are_seeds_distinct else f"replicates 0 to {len(seeds) - 1}"
        )
        raise ConfigError(f"{run_name} has {choices_text}: say which model is meant, such as model({example})")
    if seed is not None and seeds.count(seed) != 1:
        hint = f"; give replicate=0 to {len(seeds) - 1}" if len(set(seeds)) < len(seeds) else ""
        raise ConfigError(f"seed={seed}, but {run_name} has the seeds {', '.join(map(str, seeds))}{hint}")
    return 0 if seed is None else seeds.index(seed)


def result_columns(history: list[MetricsRow]) -> list[str]:
    """Return the columns of a history that are results rather than bookkeeping."""
    return [name for name in history[0] if name not in RUN_POSITION_COLUMNS | WORK_COLUMNS | TIME_COLUMNS]


def mean_std(values: list[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation without NaN; NaN if no number is left, the latter also for a single
    one."""
    valid_values = [value for value in values if not math.isnan(value)]
    if not valid_values:
        return math.nan, math.nan
    return float(np.mean(valid_values)), float(np.std(valid_values, ddof=1)) if len(valid_values) > 1 else math.nan


def format_spread(std: float) -> str:
    """Format a standard deviation to follow its mean; '' if there is none."""
    return "" if math.isnan(std) else f" ± {std:.2g}"
