"""Trials as replicates: those that differ only in numbers that rows can hold are one federation."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from fedsim.app.cli import run_as_generator
from fedsim.app.composition import hydra_context
from fedsim.app.config import identifying_settings
from fedsim.app.folding import per_seed_setting_keys
from fedsim.core.errors import ConfigError, DivergenceError
from fedsim.run.branching import write_replicate_subset
from fedsim.run.checkpoint import NAME as CHECKPOINT
from fedsim.run.checkpoint import completed_rounds
from fedsim.run.determinism import numerical_settings
from fedsim.run.simulation import Simulation
from fedsim.run.together import LockstepRunner
from fedsim.run.tracking import Result, Tracking
from fedsim.run.tracking.metrics_csv import METRICS_FILENAME
from fedsim.run.tracking.observer import EvaluationEvent, Observer
from fedsim.run.tracking.result import MetricsRow
from fedsim.studies.reproduce.runner import compose_config, config_digest
from fedsim.studies.results.reading import read_rows
from fedsim.studies.tuning.space import Trial, format_override, is_number
from fedsim.trainer import TaskGenerator

log = logging.getLogger(__name__)

DROP_REASON = "dropped in tuning"


class RungObserver(Observer):
    """Ends a run at a rung, and has it give up the replicates of trials that were dropped.

    Args:
        stop_after: completed rounds of the rung; None: the run goes to its last round.
        dropped_replicates: replicates that were dropped at an earlier rung.
    """

    def __init__(self, stop_after: int | None, dropped_replicates: Sequence[int]) -> None:
        self.stop_after, self.dropped_replicates = stop_after, dropped_replicates

    def evaluated(self, event: EvaluationEvent) -> str | None:
        return "rung" if self.stop_after is not None and event.round >= self.stop_after else None

    def drop_reason_by_replicate(self) -> Mapping[int, str]:
        return dict.fromkeys(self.dropped_replicates, DROP_REASON)


@dataclass
class TrialFederation:
    """Trials that are simulated as one federation, each with all seeds.

    Attributes:
        trials: in the order of their replicates.
        seeds: of each trial.
        config, choices: of the federation.
        folder: of its run.
        trusted: packages that the user named.
        failure_message: why it ended before its last round, with all its trials; None: it did not.
    """

    trials: list[Trial]
    seeds: list[int]
    config: DictConfig
    choices: dict[str, str]
    folder: Path
    trusted: tuple[str, ...] = ()
    failure_message: str | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint of it says that it is."""
        strategy = str(self.config.strategy._target_).rpartition(".")[2]
        return {"seeds": list(self.config.seeds), "strategy": strategy} | identifying_settings(self.config)

    @property
    def completed_rounds(self) -> int:
        """Rounds after which its checkpoint was written."""
        return completed_rounds(self.folder / CHECKPOINT) or 0

    def has_trial_of(self, trials: Sequence[Trial]) -> bool:
        """Whether it has one of these trials."""
        return any(trial in trials for trial in self.trials)

    def replicates_of(self, trials: Sequence[Trial]) -> list[int]:
        """The replicates of these trials, those of other federations left out."""
        count = len(self.seeds)
        positions = [self.trials.index(trial) for trial in trials if trial in self.trials]
        return [replicate for position in positions for replicate in range(position * count, (position + 1) * count)]

    def run_as_generator(
        self, stop_after: int | None, dropped_replicates: Sequence[int], shared: dict[str, Any]
    ) -> TaskGenerator[Result]:
        """Its rounds up to a rung, the local work handed out."""
        config = OmegaConf.merge(self.config, {"out": str(self.folder), "resume": "auto"})
        assert isinstance(config, DictConfig)

        def run_rounds(
            run: Simulation, folder: Path, resume: bool, tracking: Tracking, *arguments: Any
        ) -> TaskGenerator[Result]:
            watching = [*tracking.observers, RungObserver(stop_after, dropped_replicates)]
            return run.run_as_generator(folder, resume, dataclasses.replace(tracking, observers=watching), *arguments)

        return run_as_generator(
            config, self.folder, self.choices, shared=shared, trusted=self.trusted, run_rounds=run_rounds
        )

    def history(self) -> dict[int, list[MetricsRow]]:
        """Completed rounds → one row per replicate, as in metrics.csv."""
        if not (self.folder / METRICS_FILENAME).exists():
            return {}
        rows: dict[int, list[MetricsRow]] = {}
        for row in read_rows(self.folder / METRICS_FILENAME):
            rows.setdefault(int(row["round"]), []).append(row)
        return rows

    def curves(self, metric: str) -> dict[Trial, tuple[np.ndarray, np.ndarray]]:
        """Trial → completed rounds [E] of its evaluations, and the metric [E, R] then."""
        history = self.history()
        rounds = np.array(list(history), dtype=int)
        shape = len(rounds), len(self.trials), len(self.seeds)
        numbers = np.array([[row[metric] for row in rows] for rows in history.values()], dtype=float).reshape(shape)
        return {trial: (rounds, numbers[:, position]) for position, trial in enumerate(self.trials)}

    def values(self, metric: str, completed_rounds: int) -> np.ndarray:
        """[trials, R] a metric after so many rounds; NaN where it was not measured."""
        rows = self.history().get(completed_rounds)
        shape = len(self.trials), len(self.seeds)
        if rows is None:
            return np.full(shape, np.nan)
        return np.array([row[metric] for row in rows], dtype=float).reshape(shape)


def group_into_federations(
    trials: Sequence[Trial],
    overrides: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    trusted: tuple[str, ...] = (),
    at_most: int | None = None,
) -> list[TrialFederation]:
    """Compose the federations of these trials.

    Args:
        trials: what is tried.
        overrides: of all of them.
        seeds: of each trial.
        folder: of their runs.
        trusted: packages that the user named.
        at_most: trials in one federation, since all their models are in memory; None: no limit.

    Raises:
        ConfigError: a configuration cannot be composed, or trials cannot be replicates.
    """
    federations = []
    with hydra_context():
        for group, config, choices in _group_trials(trials, overrides):
            for first_trial in range(0, len(group), at_most or len(group)):
                batch = group[first_trial : first_trial + (at_most or len(group))]
                federations.append(_make_trial_federation(batch, config, choices, list(seeds), folder, trusted))
    return federations


def _group_trials(
    trials: Sequence[Trial], overrides: Sequence[str]
) -> Iterator[tuple[list[Trial], DictConfig, dict[str, str]]]:
    """Trials that differ only in numbers that rows can hold, with the configuration of the first; inside
    `hydra_context`."""
    by_words: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:  # what is not a number needs a configuration of its own, and decides which numbers are rows
        by_words.setdefault(tuple(entry for entry in trial if not is_number(entry[1])), []).append(trial)
    for same_words in by_words.values():
        config, choices = compose_config(_overrides(same_words[0], overrides))
        row_keys, groups = _per_row_setting_keys(config), dict[tuple[Any, ...], list[Trial]]()
        for trial in same_words:
            common_entries = tuple(entry for entry in trial if not (is_number(entry[1]) and entry[0] in row_keys))
            groups.setdefault(common_entries, []).append(trial)
        for group in groups.values():
            if group[0] != same_words[0]:
                config, choices = compose_config(_overrides(group[0], overrides))
            yield group, config, choices


def _per_row_setting_keys(config: DictConfig) -> set[str]:
    """Keys of numbers that rows can hold."""
    keys = per_seed_setting_keys(config)
    for key in keys.values():
        if OmegaConf.is_list(OmegaConf.select(config, key)):
            raise ConfigError(f"{key}={OmegaConf.select(config, key)} is a list; for a knob write {key}=A,B,C")
    return {*keys, *keys.values()}


def _overrides(trial: Trial, overrides: Sequence[str]) -> tuple[str, ...]:
    return (*overrides, *(format_override(key, value) for key, value in trial), "out=unused")


def _make_trial_federation(
    trials: list[Trial],
    config: DictConfig,
    choices: dict[str, str],
    seeds: list[int],
    folder: Path,
    trusted: tuple[str, ...],
) -> TrialFederation:
    if config.on_nonfinite == "drop_client":
        raise ConfigError("on_nonfinite=drop_client: trials that diverge are dropped in tuning; leave it out")
    joint_config = config.copy()
    for key, value in trials[0]:
        if is_number(value):
            values = [dict(trial)[key] for trial in trials]
            is_varying = any(number != value for number in values)
            OmegaConf.update(joint_config, key, [number for number in values for _ in seeds] if is_varying else value)
    joint_config.seeds = seeds * len(trials)
    joint_config.on_nonfinite = "drop_replicate"
    joint_config.tracking.progress, joint_config.tracking.tensorboard = "none", False
    name = f"{choices['strategy']}-{config_digest(joint_config)}"
    return TrialFederation(trials, seeds, joint_config, choices, folder / name, trusted)


def run_to_rung(
    federations: Sequence[TrialFederation], completed_rounds: int, dropped_trials: Sequence[Trial], is_last_rung: bool
) -> None:
    """Run all federations up to a rung, in lockstep; those that are there already are left alone.

    Args:
        federations: that have a trial which continues.
        completed_rounds: rounds of the rung.
        dropped_trials: trials that were dropped before.
        is_last_rung: whether this is the last rung.

    Raises:
        ConfigError: a configuration cannot be run.
        Stopped: somebody asked for it.
    """
    active_federations = [
        federation
        for federation in federations
        if federation.failure_message is None and federation.completed_rounds < completed_rounds
    ]
    shared: dict[str, Any] = {}
    runs = [
        functools.partial(
            federation.run_as_generator,
            None if is_last_rung else completed_rounds,
            federation.replicates_of(dropped_trials),
            shared,
        )
        for federation in active_federations
    ]
    with numerical_settings(any(federation.config.deterministic is True for federation in active_federations)):
        for number, outcome in LockstepRunner[Result]()(runs):
            if isinstance(outcome, DivergenceError):
                active_federations[number].failure_message = str(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome


def read_values_by_trial(
    federations: Sequence[TrialFederation], metric: str, completed_rounds: int
) -> dict[Trial, np.ndarray]:
    """Trial → [R] the metric after so many rounds, of all trials of these federations."""
    return {
        trial: numbers
        for federation in federations
        for trial, numbers in zip(federation.trials, federation.values(metric, completed_rounds), strict=True)
    }


def federation_of_active_trials(
    federation: TrialFederation, active: Sequence[Trial], completed_rounds: int
) -> TrialFederation:
    """A federation of the trials that continue after a rung; the same one if all do, or if it cannot be divided: then
    the replicates of the others are given up."""
    trials = [trial for trial in federation.trials if trial in active]
    if len(trials) == len(federation.trials) or federation.failure_message is not None:
        return federation
    folder, trusted = federation.folder.parent, federation.trusted
    smaller_federation = _make_trial_federation(
        trials, federation.config, federation.choices, federation.seeds, folder, trusted
    )
    if smaller_federation.completed_rounds < completed_rounds:
        replicates, total = federation.replicates_of(trials), len(federation.config.seeds)
        if not write_replicate_subset(
            federation.folder, smaller_federation.folder, replicates, total, smaller_federation.identity
        ):
            return federation
    return smaller_federation


def plan_digest(plan: Mapping[str, Any]) -> str:
    """Of all that decides which trials are run and dropped, for the name of a folder."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()[:10]
