"""The progress of several jobs: how many are done, the remaining time, the leading metric; logged every ten seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import TypeVar

from fedsim.core.errors import ConfigError

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LOG_LINES = 10.0  # seconds between two log lines
MIN_SHARE_FOR_ESTIMATES = 0.05  # of all work; before, the remaining time would count the start of the processes
LEADING_METRICS = (
    "performative_risk",  # preferred to metrics on test samples, which do not react to the model
    "test_accuracy",
    "test_loss",
    "distance_to_optimum",
    "train_loss",
)  # the first there is

T = TypeVar("T")


def duration_text(seconds: float) -> str:
    """Format a duration in a suitable unit."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def leading_metric(values: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the metric that compares runs, on validation samples if there are some, and its value."""
    from fedsim.evaluation.columns import validation_metric

    name = validation_metric(values) or next((name for name in LEADING_METRICS if name in values), None)
    return None if name is None else (name, values[name])


def metric_text(name: str, value: float) -> str:
    """Format a metric for a log line."""
    return f"{name} {value:.4g}"


class JobProgress:
    """Logs the progress of jobs if the last message is ten seconds old.

    Args:
        total: how many jobs there are.
        job_noun: what they are called.
        clock, log_line: for tests.
    """

    def __init__(
        self,
        total: int,
        job_noun: str = "jobs",
        clock: Callable[[], float] = time.monotonic,
        log_line: Callable[[str], None] = log.info,
    ) -> None:
        self.total, self.noun, self.done_jobs = total, job_noun, 0
        self._clock, self._log_line = clock, log_line
        self._start_time = self._last_log_time = clock()

    def remaining_time_text(self, share: float) -> str:
        """Return the remaining time, given the completed share of all work; '' while the start dominates the time."""
        if not MIN_SHARE_FOR_ESTIMATES <= share < 1:
            return ""
        return f", about {duration_text((self._clock() - self._start_time) * (1 - share) / share)} left"

    def record_finished_jobs(self, count: int = 1) -> None:
        """Record that so many more jobs have ended; the caller has logged it."""
        self.done_jobs += count
        self._last_log_time = self._clock()

    def log_heartbeat(
        self, work_share: Callable[[], float | None] = lambda: None, detail: Callable[[], str] = lambda: ""
    ) -> None:
        """Log a line, unless the last one is less than ten seconds old. The functions are called only if it is.

        Args:
            work_share: returns the share of all work that is done; None: that of the jobs.
            detail: returns what else is known, such as the leading metric.
        """
        if self._clock() - self._last_log_time < SECONDS_BETWEEN_LOG_LINES:
            return
        self._last_log_time = self._clock()
        share = work_share()
        share = self.done_jobs / max(self.total, 1) if share is None else share
        elapsed_text = duration_text(self._clock() - self._start_time)
        line = f"{self.done_jobs}/{self.total} {self.noun} done after {elapsed_text}{self.remaining_time_text(share)}"
        self._log_line("; ".join(filter(None, [line, detail()])))


class LockstepProgress:
    """The progress callback that `LockstepRunner` calls after every round.

    Args:
        progress: of the jobs.
        folders, rounds: where each job is, and how many rounds it has.
        names: of the jobs, for readers; those of their folders unless given.
    """

    def __init__(
        self,
        progress: JobProgress,
        folders: Sequence[Path],
        rounds: Sequence[int],
        names: Sequence[str] | None = None,
    ) -> None:
        self.progress, self.folders, self.rounds, self.names = progress, folders, rounds, names

    def __call__(self, t: int, runs: int) -> None:
        last_round = max(self.rounds, default=t + 1)
        share = (self.progress.done_jobs + runs * min(1.0, (t + 1) / last_round)) / max(self.progress.total, 1)

        def progress_detail() -> str:
            best_text = best_metric_text(self.folders, self.names)
            return "; ".join(filter(None, [f"round {t + 1}/{last_round}, {runs} together", best_text]))

        self.progress.log_heartbeat(lambda: share, progress_detail)


def best_metric_text(folders: Sequence[Path], names: Sequence[str] | None = None) -> str:
    """Return the best leading metric among the last evaluations of runs, and the run; '' without one.

    Args:
        folders: of the runs.
        names: of the runs, for readers; those of their folders unless given.
    """
    from fedsim.evaluation.columns import is_higher_better

    evaluated: list[tuple[str, float, str]] = []
    for folder, run_name in zip(folders, names or [folder.name for folder in folders], strict=True):
        last_rows = _last_rows(folder)
        if last_rows and (metric := leading_metric(last_rows[0])):
            name = metric[0]
            evaluated.append((name, sum(row[name] for row in last_rows) / len(last_rows), run_name))
    evaluated = [entry for entry in evaluated if entry[0] == evaluated[0][0] and entry[1] == entry[1]]
    if not evaluated:
        return ""
    higher_is_better = is_higher_better(evaluated[0][0])
    name, value, run_name = (max if higher_is_better else min)(evaluated, key=lambda entry: entry[1])
    return f"{'highest' if higher_is_better else 'lowest'} at present: {metric_text(name, value)} ({run_name})"


def _last_rows(folder: Path) -> list[dict[str, float]]:
    """Return the rows of a run's last evaluation, one for each seed; none if they cannot be read yet."""
    from fedsim.run.tracking.metrics_csv import METRICS_FILENAME, read_metrics

    try:
        rows = read_metrics(folder / METRICS_FILENAME)
    except (OSError, ConfigError):
        return []
    return [row for row in rows if row["round"] == rows[-1]["round"]]


class FinishedRounds:
    """Measures which share of the rounds of runs has been computed since it was made, by reading their metrics.

    Args:
        folders, rounds: where each run is, and how many rounds it has.
    """

    def __init__(self, folders: Sequence[Path], rounds: Sequence[int]) -> None:
        self.folders, self.rounds = folders, rounds
        self._start_count = self._count_finished_rounds()  # of runs that are resumed

    def share(self) -> float:
        """Return the finished share of the rounds that had not been computed at the start."""
        remaining_count = sum(self.rounds) - self._start_count
        return (self._count_finished_rounds() - self._start_count) / max(remaining_count, 1)

    def _count_finished_rounds(self) -> float:
        last_evaluations = [_last_rows(folder) for folder in self.folders]
        return sum(rows[-1]["round"] for rows in last_evaluations if rows)


def yield_finished_futures(
    futures: Sequence[Future[T]],
    progress: JobProgress,
    detail: Callable[[], str] = lambda: "",
    share: Callable[[], float | None] = lambda: None,
) -> Iterator[Future[T]]:
    """Yield futures as they end, and log the progress of the others every ten seconds.

    Args:
        futures: of the jobs.
        progress: of the jobs.
        detail, share: see `JobProgress.log_heartbeat`.
    """
    pending_futures = set(futures)
    while pending_futures:
        finished_futures, pending_futures = wait(
            pending_futures, timeout=SECONDS_BETWEEN_LOG_LINES / 4, return_when=FIRST_COMPLETED
        )
        yield from finished_futures
        if not finished_futures:
            progress.log_heartbeat(share, detail)
