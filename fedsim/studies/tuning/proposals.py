"""Which trials are run: all combinations of grids, or numbers from intervals, proposed by Optuna if it is installed."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.studies.tuning.space import GridKnob, IntervalKnob, Knob, Trial, grid_trials

log = logging.getLogger(__name__)

NUM_GENERATIONS = 2  # Optuna sees the results of the first half of the trials before it proposes the other half
PROPOSAL_SEED = 0  # of proposals: a repeated command proposes the same trials
MAX_PROPOSAL_ATTEMPTS = 50  # proposals of one trial that repeat earlier ones


class TrialProposals:
    """Generations of trials.

    Args:
        knobs: what is tuned.
        count: of trials, needed if a knob is an interval; of grids all combinations are tried.
        higher_is_better: of the metric.
    """

    def __init__(self, knobs: Sequence[Knob], count: int | None, higher_is_better: bool) -> None:
        self.knobs, self.num_trials = list(knobs), count
        self.optuna_study: Any = None
        self._optuna_trials: dict[Trial, Any] = {}
        self._reported_trials: set[Trial] = set()
        if not self.has_interval_knobs:
            if count is not None:
                raise ConfigError(
                    key="trials", value=count, needs="needs an interval; of lists of values all combinations are tried"
                )
            return
        if count is None:
            raise ConfigError("an interval needs the number of trials, such as {trials}=32", mentions=("trials",))
        if importlib.util.find_spec("optuna") is None:
            log.warning("optuna is not installed: trials are drawn at random; pip install 'fedsim-torch[optuna]'")
            return
        import optuna

        optuna.logging.set_verbosity(logging.WARNING)
        direction = "maximize" if higher_is_better else "minimize"
        self.optuna_study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=PROPOSAL_SEED), direction=direction
        )

    @property
    def has_interval_knobs(self) -> bool:
        """Whether trials are proposed, not enumerated."""
        return any(isinstance(knob, IntervalKnob) for knob in self.knobs)

    @property
    def generation_sizes(self) -> list[int]:
        """Trials in each generation."""
        if not self.has_interval_knobs:
            return [math.prod(len(knob.values) for knob in self.knobs if isinstance(knob, GridKnob))]
        assert self.num_trials is not None
        first_size = -(-self.num_trials // NUM_GENERATIONS) if self.optuna_study is not None else self.num_trials
        return [size for size in (first_size, self.num_trials - first_size) if size]

    def propose_generation(self, size: int) -> list[Trial]:
        """The next trials, none of them twice."""
        if not self.has_interval_knobs:
            return grid_trials([knob for knob in self.knobs if isinstance(knob, GridKnob)])
        trials: list[Trial] = []
        for _ in range(size * MAX_PROPOSAL_ATTEMPTS):
            trial = self._propose_randomly() if self.optuna_study is None else self._propose_by_optuna()
            if trial is not None:
                trials.append(trial)
            if len(trials) == size:
                break
        return trials

    def report_to_study(self, values: Mapping[Trial, Sequence[tuple[int, float]]], rounds: int) -> None:
        """Report what was measured.

        Args:
            values: trial → completed rounds and mean of the metric, at each rung that it reached.
            rounds: of a trial that was not dropped.
        """
        if self.optuna_study is None:
            return
        from optuna.trial import TrialState

        for trial, measured in values.items():
            optuna_trial = self._optuna_trials.get(trial)
            if optuna_trial is None or trial in self._reported_trials:
                continue
            self._reported_trials.add(trial)
            finite = [(completed_rounds, value) for completed_rounds, value in measured if math.isfinite(value)]
            for completed_rounds, value in finite:
                optuna_trial.report(value, completed_rounds)
            if not finite or len(finite) < len(measured):
                self.optuna_study.tell(optuna_trial, state=TrialState.FAIL)
            elif finite[-1][0] < rounds:
                self.optuna_study.tell(optuna_trial, state=TrialState.PRUNED)
            else:
                self.optuna_study.tell(optuna_trial, finite[-1][1])

    def _propose_by_optuna(self) -> Trial | None:
        optuna_trial = self.optuna_study.ask()
        trial = tuple(
            (
                knob.key,
                optuna_trial.suggest_float(knob.key, knob.lower_bound, knob.upper_bound, log=knob.is_logarithmic),
            )
            if isinstance(knob, IntervalKnob)
            else (knob.key, optuna_trial.suggest_categorical(knob.key, list(knob.values)))
            for knob in self.knobs
        )
        if trial in self._optuna_trials:
            return None
        self._optuna_trials[trial] = optuna_trial
        return trial

    def _propose_randomly(self) -> Trial | None:
        number = len(self._optuna_trials)
        generator = np.random.default_rng([PROPOSAL_SEED, number])
        trial = tuple((knob.key, _draw_knob_value(knob, generator)) for knob in self.knobs)
        self._optuna_trials[trial] = number
        return trial


def _draw_knob_value(knob: Knob, generator: np.random.Generator) -> Any:
    if isinstance(knob, GridKnob):
        return knob.values[int(generator.integers(len(knob.values)))]
    if knob.is_logarithmic:
        return float(np.exp(generator.uniform(np.log(knob.lower_bound), np.log(knob.upper_bound))))
    return float(generator.uniform(knob.lower_bound, knob.upper_bound))
