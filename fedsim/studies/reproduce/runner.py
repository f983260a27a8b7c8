"""Execution of a recipe's runs, composed by Hydra; several run at a time, and finished ones are reused."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

import fedsim
from fedsim.app import composition
from fedsim.app.cli import run_as_generator
from fedsim.app.composition import hydra_context
from fedsim.app.config import KEYS_WITHOUT_EFFECT, identifying_settings
from fedsim.app.explain import explain_hydra_error
from fedsim.app.folders import override_key
from fedsim.app.job_progress import (
    FinishedRounds,
    JobProgress,
    LockstepProgress,
    best_metric_text,
    yield_finished_futures,
)
from fedsim.core.errors import ConfigError, DivergenceError, MissingDataError
from fedsim.core.speaking import log_to_stderr
from fedsim.run.determinism import numerical_settings
from fedsim.run.stopping import Stopped, StopSignals, exit_on_sigterm
from fedsim.run.together import LockstepRunner
from fedsim.run.tracking.result import format_spread
from fedsim.studies.reproduce.recipe import RecipeSetting
from fedsim.trainer import TaskGenerator

log = logging.getLogger(__name__)

MAX_JOBS = 8  # every process holds its own copy of the data
RUNS_PER_LOCKSTEP = 16  # runs in lockstep: more share too little to gain, and each has memory of its own

FINISHED_RUN_FILE = "summary.json"  # a run writes it last


@dataclass
class RecipeJob:
    """One run. The folder's name holds a digest of the configuration, so that recipes of one paper share what they have
    in common.

    Attributes:
        setting: its place in the recipe.
        overrides: that make it.
        folder: where it is or will be.
        config: the composed configuration.
        choices: of every group.
        trusted: packages that the user named.
        user_overrides: those of the overrides that the user gave beside the recipe's; None: that is not known.
    """

    setting: RecipeSetting
    overrides: tuple[str, ...]
    folder: Path
    config: DictConfig
    choices: dict[str, str]
    trusted: tuple[str, ...] = ()
    user_overrides: tuple[str, ...] | None = None

    @property
    def seeds(self) -> list[int]:
        """The seeds of its replicates."""
        return list(self.config.seeds)

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished."""
        return (self.folder / FINISHED_RUN_FILE).exists()


@dataclass
class Outcome:
    """The outcome of a run: 'done', 'skipped' (its data are missing), 'diverged' or 'stopped', with a message."""

    status: str
    message: str = ""


def compose_config(overrides: tuple[str, ...]) -> tuple[DictConfig, dict[str, str]]:
    """Compose a configuration like `fedsim.app.composition.compose`, with errors that name the overrides."""
    try:
        return composition.compose(overrides)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{' '.join(overrides)}: {explain_hydra_error(error)}") from error


def trusted_packages(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the packages that these overrides of the user trust."""
    parsed_overrides = OverridesParser.create().parse_overrides(
        [text for text in overrides if override_key(text) == "trusted"]
    )
    values = [override.value() for override in parsed_overrides]
    return tuple(map(str, values[-1])) if values and isinstance(values[-1], list) else ()


def config_digest(config: DictConfig) -> str:
    """Return a digest of all settings that change results, for the name of a run's folder."""
    settings = [fedsim.__version__, identifying_settings(config, KEYS_WITHOUT_EFFECT)]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def plan_jobs(
    settings: list[RecipeSetting], folder: Path, common_overrides: tuple[str, ...], trusted: tuple[str, ...] = ()
) -> list[RecipeJob]:
    """Return a job for each setting; `common_overrides` overrides follow its own, `trusted` are packages that the user
    trusts."""
    jobs = []
    with hydra_context():
        for setting in settings:
            overrides = (*setting.overrides, *common_overrides)
            config, choices = compose_config((*overrides, "out=unused"))
            name = "-".join([choices["strategy"], choices["dataset"], config_digest(config)])
            jobs.append(
                RecipeJob(setting, overrides, folder / name, config, choices, trusted, common_overrides or None)
            )
    return jobs


def job_local_tasks(
    job: RecipeJob, without_progress: bool = False, shared: dict[str, Any] | None = None
) -> TaskGenerator[Outcome]:
    """Run or resume one job as a generator that yields its local work.

    Args:
        job: the job to run.
        without_progress: whether to show no progress.
        shared: data sets of other jobs, in the form that `fedsim.app.build.build` takes.
    """
    extra_run_settings: dict[str, Any] = {"out": str(job.folder), "resume": "auto", "tracking": {"tensorboard": False}}
    if without_progress:
        extra_run_settings["tracking"]["progress"] = "none"
    try:
        config = OmegaConf.merge(job.config, extra_run_settings)
        assert isinstance(config, DictConfig)
        result = yield from run_as_generator(config, job.folder, job.choices, shared=shared, trusted=job.trusted)
    except MissingDataError as error:
        return Outcome("skipped", str(error))
    except DivergenceError as error:
        return Outcome("diverged", str(error))
    except Stopped as stop:
        return Outcome("stopped", str(stop))
    final_texts = [f"{name} {mean:.4g}{format_spread(std)}" for name, (mean, std) in result.final.items()]
    return Outcome("done", f"{result.seconds:.0f} s, {', '.join(final_texts[:3])}")


def batch_jobs(jobs: list[RecipeJob], num_batches: int = 1) -> list[list[RecipeJob]]:
    """Group jobs whose clients can be trained together into batches of up to `RUNS_PER_LOCKSTEP`.

    There are at least `num_batches` batches if there are enough jobs.
    """

    def batch_key(job: RecipeJob) -> str:
        settings = OmegaConf.to_container(job.config, resolve=True)
        assert isinstance(settings, dict)
        local = {key: value for key, value in settings["local"].items() if key not in ("lr", "schedule")}
        shared = [settings[group] for group in ("dataset", "model", "shift", "contamination", "deterministic")]
        return json.dumps([shared, local, settings["rounds"]], sort_keys=True, default=str)

    kinds: dict[str, list[RecipeJob]] = {}
    for job in jobs:
        kinds.setdefault(batch_key(job), []).append(job)
    batch_size = max(1, min(RUNS_PER_LOCKSTEP, -(-len(jobs) // num_batches)))
    return [
        similar_jobs[batch_start : batch_start + batch_size]
        for similar_jobs in kinds.values()
        for batch_start in range(0, len(similar_jobs), batch_size)
    ]


def run_jobs(jobs: list[RecipeJob], at_once: int) -> Iterator[tuple[RecipeJob, Outcome]]:
    """Run the jobs in `at_once` processes, each with several in lockstep, and yield each job with its outcome.

    No batch starts after a job was stopped.
    """
    companies = batch_jobs(list({job.folder: job for job in jobs}.values()), at_once)
    progress = JobProgress(sum(map(len, companies)), "runs")
    if at_once == 1 or len(companies) == 1:
        for company in companies:
            was_stopped = False
            for job, outcome in run_in_lockstep(company, progress=progress):
                was_stopped = was_stopped or outcome.status == "stopped"
                yield job, outcome
            if was_stopped:
                return
        return
    threads = max(1, (os.cpu_count() or 1) // at_once)
    process_pool = ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn"), initializer=terminate_with_parent)
    try:
        jobs_by_future: dict[Future[list[Outcome]], list[RecipeJob]] = {
            process_pool.submit(_run_in_worker, company, threads): company for company in companies
        }
        all_jobs = [job for company in companies for job in company]
        folders, names = [job.folder for job in all_jobs], [job.setting.name for job in all_jobs]
        finished_rounds = FinishedRounds(folders, [int(job.config.rounds) for job in all_jobs])
        for future in yield_finished_futures(
            list(jobs_by_future), progress, lambda: best_metric_text(folders, names), finished_rounds.share
        ):
            progress.record_finished_jobs(len(jobs_by_future[future]))
            yield from zip(jobs_by_future[future], future.result(), strict=True)
    except BaseException:
        process_pool.shutdown(wait=True, cancel_futures=True)
        raise
    process_pool.shutdown()


def run_in_lockstep(
    company: list[RecipeJob], without_progress: bool = False, progress: JobProgress | None = None
) -> Iterator[tuple[RecipeJob, Outcome]]:
    """Run these jobs in lockstep; a single job shows its own progress, several show that of `progress`."""
    progress = progress or JobProgress(len(company), "runs")
    lockstep_progress = LockstepProgress(
        progress,
        [job.folder for job in company],
        [int(job.config.rounds) for job in company],
        [job.setting.name for job in company],
    )
    without_progress = without_progress or len(company) > 1
    shared: dict[str, Any] = {}
    if len(company) > 1:
        log.info("%d runs in lockstep", len(company))
    runs = [
        functools.partial(job_local_tasks, job, without_progress=without_progress, shared=shared) for job in company
    ]
    run_tasks = (
        None
        if None in (job.user_overrides for job in company)
        else [t for j in company for t in j.user_overrides or ()]
    )
    with (
        numerical_settings(any(job.config.deterministic is True for job in company)),
        filter_settings_warnings(run_tasks),
    ):
        for number, outcome in LockstepRunner[Outcome](report_progress=lockstep_progress)(runs):
            if isinstance(outcome, BaseException):
                raise outcome
            progress.record_finished_jobs()
            yield company[number], outcome


@contextlib.contextmanager
def filter_settings_warnings(overrides: Iterable[str] | None) -> Iterator[None]:
    """Within the block the log says of these overrides alone that they have no effect: the others are the recipe's own,
    which its reader did not write. None: it says so of all settings."""
    if overrides is None:
        yield
        return
    given_keys = {override_key(text) for text in overrides}
    settings_log = logging.getLogger("fedsim.run.settings")

    def concerns_user(record: logging.LogRecord) -> bool:
        key, has_no_effect, _ = record.getMessage().partition(" has no effect ")
        key = key.partition("=")[0]
        return not has_no_effect or any(key == given_key or key.startswith(f"{given_key}.") for given_key in given_keys)

    settings_log.addFilter(concerns_user)
    try:
        yield
    finally:
        settings_log.removeFilter(concerns_user)


def terminate_with_parent() -> None:
    """Stop this worker as on SIGTERM when its parent ends, so that a killed command leaves nothing running.

    A signal to the whole group of processes has reached the worker already; a second one would end its run at once.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_without_parent() -> None:
        parent.join()
        if not StopSignals.is_stop_pending():
            os.kill(os.getpid(), signal.SIGTERM)  # a run ends after its round, an idle worker at once

    threading.Thread(target=exit_without_parent, daemon=True).start()


def _run_in_worker(company: list[RecipeJob], threads: int) -> list[Outcome]:
    """Call `run_in_lockstep` in a process of the pool."""
    torch.set_num_threads(threads)
    logging.getLogger("fedsim").setLevel(logging.WARNING)
    try:
        outcomes = {id(job): outcome for job, outcome in run_in_lockstep(company, without_progress=True)}
    finally:
        exit_if_orphaned()
    return [outcomes[id(job)] for job in company]


def exit_if_orphaned() -> None:
    """End this worker after a task if its parent is gone, so that no further task starts."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


@contextlib.contextmanager
def job_command_context(name: str, level: int) -> Iterator[None]:
    """Set up a command that runs jobs and can be restarted.

    Its output is line-buffered, its log starts at `level`, and an error, Ctrl-C or SIGTERM ends it with one sentence.
    """
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    log_to_stderr()
    logging.getLogger("fedsim").setLevel(level)
    try:
        with exit_on_sigterm(name):
            yield
    except ConfigError as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{name}: stopped; the same command goes on where this one ended")


def num_concurrent_jobs(requested: str, device: str, num_pending: int) -> int:
    """Return the number of processes; 'auto' is one per core on a CPU, and one on a GPU."""
    if requested != "auto":
        if not requested.isdigit() or int(requested) < 1:
            raise ConfigError(f"--jobs {requested} must be 'auto' or a whole number of at least 1")
        return int(requested)
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return 1 if on_gpu else max(1, min(os.cpu_count() or 1, num_pending, MAX_JOBS))
