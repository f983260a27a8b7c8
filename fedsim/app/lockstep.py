"""A sweep's jobs in lockstep: Hydra composes each, then they advance together, round by round."""

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
from fedsim.app.job_progress import JobProgress, LockstepProgress
from fedsim.run.determinism import deterministic
from fedsim.run.together import Lockstep

log = logging.getLogger(__name__)

KEPT = 100  # configurations of jobs that wait for their turn


class ComposedOnce:
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
        if len(self._composed) < KEPT:
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
    waiting, returned, progress = iter(enumerate(job_overrides, first)), [], JobProgress(len(job_overrides))
    while batch := list(itertools.islice(waiting, at_once)):
        shared: dict[str, Any] = {}
        jobs = [_composed(context, config, list(overrides), number, shared) for number, overrides in batch]
        returned += jobs
        with deterministic(any(job.cfg is not None and job.cfg.deterministic is True for job in jobs)):
            configs = [job.cfg for job in jobs if job.cfg is not None]
            folders = [Path(str(job.hydra_cfg.hydra.runtime.output_dir)) for job in jobs if job.hydra_cfg is not None]
            watch = LockstepProgress(progress, folders, [int(config.rounds) for config in configs])
            lockstep = Lockstep[Any](watch=watch)
            failed: list[BaseException] = []
            for index, outcome in lockstep([functools.partial(lambda job: job.return_value, job) for job in jobs]):
                if isinstance(outcome, BaseException):
                    failed.append(outcome)
                else:
                    jobs[index].return_value = outcome
                progress.jobs_finished()
        if failed:  # when all have come to their end: a signal stops each of them after the same round
            raise failed[0]
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    return returned


def _composed(
    context: HydraContext, config: DictConfig, overrides: list[str], number: int, shared: dict[str, Any]
) -> JobReturn:
    """A job whose value is, for now, what is to be driven."""
    log.info("\t#%d : %s", number, " ".join(filter_overrides(overrides)))
    job_config = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(job_config):
        job_config.hydra.job.id = job_config.hydra.job.num = number
    return run_job(
        hydra_context=context,
        task_function=functools.partial(cli.of_sweep, shared=shared),
        config=job_config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
