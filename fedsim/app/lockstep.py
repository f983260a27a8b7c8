"""Run a sweep's jobs in lockstep: Hydra composes each, then they advance together, round by round. Jobs that differ
only in numbers that rows can hold are folded into one federation."""

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
from fedsim.app.folding import combined_config, foldable_job_groups
from fedsim.app.job_progress import JobProgress, LockstepProgress
from fedsim.run.determinism import numerical_settings
from fedsim.run.fold import FoldedJobs, FoldJob, foldable_run_steps
from fedsim.run.simulation import Simulation
from fedsim.run.together import LockstepRunner
from fedsim.run.tracking import Result
from fedsim.trainer import TaskGenerator

log = logging.getLogger(__name__)

MAX_CACHED_CONFIGURATIONS = 100  # configurations of jobs that have not started


class CachingConfigLoader:
    """Hydra's configuration loader with a cache: both a sweep's check and its launcher load each job's configuration,
    and the second request is answered from the first.

    Args:
        loader: Hydra's own; all else is left to it.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Return a job's configuration; only the second caller may change it."""
        job = tuple(sweep_overrides)
        if job in self._composed:
            return self._composed.pop(job)
        config: DictConfig = self._loader.load_sweep_config(master_config, sweep_overrides)
        if len(self._composed) < MAX_CACHED_CONFIGURATIONS:
            self._composed[job] = config
        return config


def launch(
    context: HydraContext,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first_job_number: int,
    at_once: int | None,
) -> list[JobReturn]:
    """Run a sweep's jobs, or those of one batch of a sweeper.

    Args:
        context, config: of the sweep.
        job_overrides: of every job.
        first_job_number: number of the first one.
        at_once: how many go together; None: all.

    Returns:
        What Hydra's own launcher returns: of every job its configuration and its objective.
    """
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    log.info("%d jobs in lockstep", len(job_overrides))
    pending_overrides, job_returns, progress = (
        iter(enumerate(job_overrides, first_job_number)),
        [],
        JobProgress(len(job_overrides)),
    )
    while batch := list(itertools.islice(pending_overrides, at_once)):
        shared: dict[str, Any] = {}
        jobs = [ComposedJob(context, config, list(overrides), number, shared) for number, overrides in batch]
        job_returns += [job.job_return for job in jobs]
        with numerical_settings(any(job.config.deterministic is True for job in jobs)):
            failed_job = run_batch(jobs, progress)
        if failed_job:  # after all have ended: a signal stops each of them after the same round
            raise failed_job[0]
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    return job_returns


class ComposedJob(FoldJob[Any]):
    """A job of a sweep that is composed and not started.

    Args:
        context, config: of the sweep.
        overrides, number: of the job.
        shared: data sets of the jobs that advance together.

    Attributes:
        job_return: what Hydra's own launcher returns of the job, but for its value.
        config: of the job.
        folder: of its run.
        foldable: if this is set before the first step, the steps are `foldable_run_steps`.
    """

    def __init__(
        self, context: HydraContext, config: DictConfig, overrides: list[str], number: int, shared: dict[str, Any]
    ) -> None:
        log.info("\t#%d : %s", number, " ".join(filter_overrides(overrides)))
        job_config = context.config_loader.load_sweep_config(config, overrides)
        with open_dict(job_config):
            job_config.hydra.job.id = job_config.hydra.job.num = number
        self.foldable = False
        self.job_return = run_job(
            hydra_context=context,
            task_function=functools.partial(
                cli.sweep_run_local_tasks, shared=shared, run_rounds=self._simulation_steps
            ),
            config=job_config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        assert self.job_return.cfg is not None
        assert self.job_return.hydra_cfg is not None
        self.config, self.folder = self.job_return.cfg, Path(str(self.job_return.hydra_cfg.hydra.runtime.output_dir))
        super().__init__(self.job_return.return_value)

    def _simulation_steps(self, simulation: Simulation, *arguments: Any) -> TaskGenerator[Result]:
        return foldable_run_steps(simulation, *arguments) if self.foldable else simulation.run_as_generator(*arguments)

    def record_outcome(self, outcome: Any) -> None:
        super().record_outcome(outcome)
        if not isinstance(outcome, BaseException):
            self.job_return.return_value = outcome


def run_batch(jobs: Sequence[ComposedJob], progress: JobProgress) -> list[BaseException]:
    """Run jobs to their ends in lockstep; those that fit into one federation are folded.

    Returns:
        The errors that end the sweep.
    """
    lockstep_progress = LockstepProgress(
        progress, [job.folder for job in jobs], [int(job.config.rounds) for job in jobs]
    )
    errors: list[BaseException] = []
    try:
        folds = _foldable_job_groups(jobs)
        in_folds = {job for fold in folds for job in fold.jobs}
        unfolded_jobs = [job for job in jobs if job not in in_folds and not job.has_ended]
        progress.record_finished_jobs(sum(job.has_ended for job in jobs))
        while folds or unfolded_jobs:
            runs = [fold.generate_round_tasks for fold in folds] + [
                functools.partial(lambda job: job.steps, job) for job in unfolded_jobs
            ]
            counts = [len(fold.jobs) for fold in folds] + [1] * len(unfolded_jobs)
            for number, outcome in LockstepRunner[Any](report_progress=lockstep_progress, counts=counts)(runs):
                if number >= len(folds):
                    unfolded_jobs[number - len(folds)].record_outcome(outcome)
                elif isinstance(outcome, BaseException):
                    errors.append(outcome)
                progress.record_finished_jobs(counts[number])
            errors += [job.outcome for job in jobs if isinstance(job.outcome, BaseException)]
            folds, unfolded_jobs = (
                [],
                [job for job in jobs if not job.has_ended and not errors],
            )  # whose federation has failed
    finally:
        for job in jobs:
            job.steps.close()
    return errors


def _foldable_job_groups(jobs: Sequence[ComposedJob]) -> list[FoldedJobs[Any]]:
    """Return the groups of jobs that are folded into one federation each."""
    folds = []
    for positions in foldable_job_groups([job.config for job in jobs], [job.folder for job in jobs]):
        group = [jobs[position] for position in positions]
        for job in group:
            job.foldable = True
            job.start()
        waiting_jobs = [job for job in group if job.waiting_run is not None]
        obstacle = (
            waiting_jobs[0].waiting_run.unfoldable_reason()
            if waiting_jobs and waiting_jobs[0].waiting_run is not None
            else None
        )
        if len(waiting_jobs) > 1 and obstacle is None:
            log.info(
                "%d jobs differ only in settings with one value per seed: they run as one federation", len(waiting_jobs)
            )
            folds.append(
                FoldedJobs(
                    waiting_jobs, functools.partial(_build_combined_simulation, [job.config for job in waiting_jobs])
                )
            )
            continue
        if obstacle is not None:
            log.info("%d jobs are not folded into one federation, because of %s", len(waiting_jobs), obstacle)
        for job in waiting_jobs:
            job.resume(False)
    return folds


def _build_combined_simulation(configs: Sequence[DictConfig]) -> Simulation:
    """Return the composition whose replicates are those of all jobs."""
    simulation, _, _ = build(combined_config(configs))
    return simulation
