"""Which trials are run: all combinations of grids, or numbers from intervals, proposed by Optuna if it is installed."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.studies.tuning.space import Grid, Interval, Knob, Trial, product

log = logging.getLogger(__name__)

GENERATIONS = 2  # Optuna sees the results of the first half of the trials before it proposes the other half
SEED = 0  # of proposals: a repeated command proposes the same trials
ATTEMPTS = 50  # proposals of one trial that repeat earlier ones


class Proposals:
    """Generations of trials.

    Args:
        knobs: what is tuned.
        count: of trials, needed if a knob is an interval; of grids all combinations are tried.
        higher_is_better: of the metric.
    """

    def __init__(self, knobs: Sequence[Knob], count: int | None, higher_is_better: bool) -> None:
        self.knobs, self.count = list(knobs), count
        self.study: Any = None
        self._optuna_trials: dict[Trial, Any] = {}
        self._reported: set[Trial] = set()
        if not self.has_intervals:
            if count is not None:
                raise ConfigError(f"--trials {count} needs an interval; of lists of values all combinations are tried")
            return
        if count is None:
            raise ConfigError("an interval needs the number of trials, such as --trials 32")
        if importlib.util.find_spec("optuna") is None:
            log.warning("optuna is not installed: trials are drawn at random; pip install 'fedsim-torch[optuna]'")
            return
        import optuna

        optuna.logging.set_verbosity(logging.WARNING)
        direction = "maximize" if higher_is_better else "minimize"
        self.study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=SEED), direction=direction)

    @property
    def has_intervals(self) -> bool:
        """Whether trials are proposed, not enumerated."""
        return any(isinstance(knob, Interval) for knob in self.knobs)

    @property
    def sizes(self) -> list[int]:
        """Trials in each generation."""
        if not self.has_intervals:
            return [math.prod(len(knob.values) for knob in self.knobs if isinstance(knob, Grid))]
        assert self.count is not None
        first = -(-self.count // GENERATIONS) if self.study is not None else self.count
        return [size for size in (first, self.count - first) if size]

    def generation(self, size: int) -> list[Trial]:
        """The next trials, none of them twice."""
        if not self.has_intervals:
            return product([knob for knob in self.knobs if isinstance(knob, Grid)])
        trials: list[Trial] = []
        for _ in range(size * ATTEMPTS):
            trial = self._random() if self.study is None else self._by_optuna()
            if trial is not None:
                trials.append(trial)
            if len(trials) == size:
                break
        return trials

    def tell(self, values: Mapping[Trial, Sequence[tuple[int, float]]], rounds: int) -> None:
        """Report what was measured.

        Args:
            values: trial → completed rounds and mean of the metric, at each rung that it reached.
            rounds: of a trial that was not dropped.
        """
        if self.study is None:
            return
        from optuna.trial import TrialState

        for trial, measured in values.items():
            optuna_trial = self._optuna_trials.get(trial)
            if optuna_trial is None or trial in self._reported:
                continue
            self._reported.add(trial)
            finite = [(completed, value) for completed, value in measured if math.isfinite(value)]
            for completed, value in finite:
                optuna_trial.report(value, completed)
            if not finite or len(finite) < len(measured):
                self.study.tell(optuna_trial, state=TrialState.FAIL)
            elif finite[-1][0] < rounds:
                self.study.tell(optuna_trial, state=TrialState.PRUNED)
            else:
                self.study.tell(optuna_trial, finite[-1][1])

    def _by_optuna(self) -> Trial | None:
        optuna_trial = self.study.ask()
        trial = tuple(
            (knob.key, optuna_trial.suggest_float(knob.key, knob.low, knob.high, log=knob.log))
            if isinstance(knob, Interval)
            else (knob.key, optuna_trial.suggest_categorical(knob.key, list(knob.values)))
            for knob in self.knobs
        )
        if trial in self._optuna_trials:
            return None
        self._optuna_trials[trial] = optuna_trial
        return trial

    def _random(self) -> Trial | None:
        number = len(self._optuna_trials)
        generator = np.random.default_rng([SEED, number])
        trial = tuple((knob.key, _drawn(knob, generator)) for knob in self.knobs)
        self._optuna_trials[trial] = number
        return trial


def _drawn(knob: Knob, generator: np.random.Generator) -> Any:
    if isinstance(knob, Grid):
        return knob.values[int(generator.integers(len(knob.values)))]
    if knob.log:
        return float(np.exp(generator.uniform(np.log(knob.low), np.log(knob.high))))
    return float(generator.uniform(knob.low, knob.high))
