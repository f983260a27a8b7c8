"""A sweep's jobs in lockstep: Hydra composes each, then they advance together, round by round. Those that differ only
in numbers that rows can hold are folded into one federation."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, configure_log, filter_overrides, run_job, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from fedsim.app import cli
from fedsim.app.build import build
from fedsim.app.folding import combined, foldable_groups
from fedsim.app.job_progress import JobProgress, LockstepProgress
from fedsim.run.determinism import deterministic
from fedsim.run.fold import Fold, Job, foldable_steps
from fedsim.run.simulation import Simulation
from fedsim.run.together import Lockstep
from fedsim.run.tracking import Result
from fedsim.trainer import TaskGenerator

log = logging.getLogger(__name__)

MAX_CACHED_CONFIGURATIONS = 100  # configurations of jobs that wait for their turn


class CachingConfigLoader:
    """Hydra's loader of configurations, of which a sweep's check and its launcher both ask for every job's: the second
    one that asks gets what was composed for the first.

    Args:
        loader: Hydra's own; all else is left to it.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """A job's configuration, to be changed by none but the second who asks."""
        job = tuple(sweep_overrides)
        if job in self._composed:
            return self._composed.pop(job)
        config: DictConfig = self._loader.load_sweep_config(master_config, sweep_overrides)
        if len(self._composed) < MAX_CACHED_CONFIGURATIONS:
            self._composed[job] = config
        return config


def launch(
    context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int, at_once: int | None
) -> list[JobReturn]:
    """Carry out a sweep's jobs, or those of one batch of a sweeper.

    Args:
        context, config: of the sweep.
        job_overrides: of every job.
        first: number of the first one.
        at_once: how many go together; None: all.

    Returns:
        What Hydra's own launcher returns: of every job its configuration and its objective.
    """
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    log.info("%d jobs in lockstep", len(job_overrides))
    waiting, job_returns, progress = iter(enumerate(job_overrides, first)), [], JobProgress(len(job_overrides))
    while batch := list(itertools.islice(waiting, at_once)):
        shared: dict[str, Any] = {}
        jobs = [ComposedJob(context, config, list(overrides), number, shared) for number, overrides in batch]
        job_returns += [job.returned for job in jobs]
        with deterministic(any(job.config.deterministic is True for job in jobs)):
            failed = run_batch(jobs, progress)
        if failed:  # when all have come to their end: a signal stops each of them after the same round
            raise failed[0]
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    return job_returns


class ComposedJob(Job[Any]):
    """A job of a sweep, composed and not begun.

    Args:
        context, config: of the sweep.
        overrides, number: of the job.
        shared: data sets of the jobs that advance together.

    Attributes:
        returned: what Hydra's own launcher returns of the job, but for its value.
        config: of the job.
        folder: of its run.
        foldable: if this is set before the first step, the steps are `foldable_steps`.
    """

    def __init__(
        self, context: HydraContext, config: DictConfig, overrides: list[str], number: int, shared: dict[str, Any]
    ) -> None:
        log.info("\t#%d : %s", number, " ".join(filter_overrides(overrides)))
        job_config = context.config_loader.load_sweep_config(config, overrides)
        with open_dict(job_config):
            job_config.hydra.job.id = job_config.hydra.job.num = number
        self.foldable = False
        self.returned = run_job(
            hydra_context=context,
            task_function=functools.partial(cli.sweep_run_steps, shared=shared, drive=self._drive),
            config=job_config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        assert self.returned.cfg is not None
        assert self.returned.hydra_cfg is not None
        self.config, self.folder = self.returned.cfg, Path(str(self.returned.hydra_cfg.hydra.runtime.output_dir))
        super().__init__(self.returned.return_value)

    def _drive(self, simulation: Simulation, *arguments: Any) -> TaskGenerator[Result]:
        return foldable_steps(simulation, *arguments) if self.foldable else simulation.steps(*arguments)

    def end(self, outcome: Any) -> None:
        super().end(outcome)
        if not isinstance(outcome, BaseException):
            self.returned.return_value = outcome


def run_batch(jobs: Sequence[ComposedJob], progress: JobProgress) -> list[BaseException]:
    """Run jobs, each to its end: those that can be one federation as such, in lockstep with all others.

    Returns:
        The errors that end the sweep.
    """
    watch = LockstepProgress(progress, [job.folder for job in jobs], [int(job.config.rounds) for job in jobs])
    errors: list[BaseException] = []
    try:
        folds = _foldable_job_groups(jobs)
        in_folds = {job for fold in folds for job in fold.jobs}
        alone = [job for job in jobs if job not in in_folds and not job.ended]
        progress.jobs_finished(sum(job.ended for job in jobs))
        while folds or alone:
            runs = [fold.steps for fold in folds] + [functools.partial(lambda job: job.steps, job) for job in alone]
            counts = [len(fold.jobs) for fold in folds] + [1] * len(alone)
            for number, outcome in Lockstep[Any](watch=watch, counts=counts)(runs):
                if number >= len(folds):
                    alone[number - len(folds)].end(outcome)
                elif isinstance(outcome, BaseException):
                    errors.append(outcome)
                progress.jobs_finished(counts[number])
            errors += [job.outcome for job in jobs if isinstance(job.outcome, BaseException)]
            folds, alone = [], [job for job in jobs if not job.ended and not errors]  # whose federation has failed
    finally:
        for job in jobs:
            job.steps.close()
    return errors


def _foldable_job_groups(jobs: Sequence[ComposedJob]) -> list[Fold[Any]]:
    """Jobs that go together as one federation each."""
    folds = []
    for positions in foldable_groups([job.config for job in jobs], [job.folder for job in jobs]):
        group = [jobs[position] for position in positions]
        for job in group:
            job.foldable = True
            job.begin()
        waiting = [job for job in group if job.run is not None]
        obstacle = waiting[0].run.obstacle() if waiting and waiting[0].run is not None else None
        if len(waiting) > 1 and obstacle is None:
            log.info("%d jobs differ only in numbers of their rows: they run as one federation", len(waiting))
            folds.append(Fold(waiting, functools.partial(_combined_composition, [job.config for job in waiting])))
            continue
        if obstacle is not None:
            log.info("%d jobs are not folded into one federation, because of %s", len(waiting), obstacle)
        for job in waiting:
            job.send(False)
    return folds


def _combined_composition(configs: Sequence[DictConfig]) -> Simulation:
    """What has the replicates of them all."""
    simulation, _, _ = build(combined(configs))
    return simulation
