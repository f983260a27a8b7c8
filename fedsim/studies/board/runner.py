"""Computation of a board: tune missing rates, compute missing rows in parallel processes, and time the algorithms."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedsim.app.job_progress import JobProgress, best_so_far, metric_text, yield_finished_futures
from fedsim.run.stopping import Stopped
from fedsim.run.tracking.metrics_csv import METRICS_FILENAME
from fedsim.studies.board.board import Board, Cell
from fedsim.studies.board.costs import RoundTimes
from fedsim.studies.board.rows import CellRows, Rates, read
from fedsim.studies.board.tasks import FillCell, TimeTrack, TuneTrack
from fedsim.studies.reproduce.runner import end_with_parent, leave_if_alone

ALGORITHMS_TUNED_AT_ONCE = 4  # algorithms per tuning task, whose run folders exist at the same time

T = TypeVar("T")


def compute_rows(
    board: Board,
    cells: list[Cell],
    entries: list[str],
    folder: Path,
    runs: Path,
    jobs: int,
    provenance: dict[str, Any],
    say: Callable[[str], None] = print,
) -> None:
    """Compute the missing rates, rows and times of these cells and entries.

    Args:
        board: the board.
        cells, entries: the cells and names of entries to compute.
        folder: folder of the board's results: rates.json, times.json and one file per cell.
        runs: folder of unfinished runs; the next command resumes them if this one is killed.
        jobs: number of processes.
        provenance: command, commit and versions that rows record.
        say: called with a message for each finished task.

    Raises:
        Stopped: the user asked to stop.
    """
    rates = Rates.read(folder)
    tracks = list(dict.fromkeys(cell.track for cell in cells))
    tunings = []
    for track in tracks:
        missing = [name for name in entries if rates.of(track, name) is None]
        for name in entries:
            rates.check(board, track, name)
        batches = [
            missing[first : first + ALGORITHMS_TUNED_AT_ONCE]
            for first in range(0, len(missing), ALGORITHMS_TUNED_AT_ONCE)
        ]
        tunings += [TuneTrack(board, batch, runs, folder, provenance, track) for batch in batches]
    for number, (tune, results) in enumerate(_finished_tasks(tunings, jobs, runs), 1):
        rates.update(tune.track, results)
        rates.write(folder)
        say(f"[{number}/{len(tunings)}] tuned in {tune.track}: {', '.join(tune.entries)}")
    fillings = []
    for cell in cells:
        rows = read(folder, cell, board).rows
        if missing := [name for name in entries if name not in rows]:
            fillings.append(FillCell(board, missing, runs, folder, provenance, cell, rates.by_track[cell.track]))
    for number, (fill, name) in enumerate(_finished_tasks(fillings, jobs, runs), 1):
        best = best_row_text(read(folder, fill.cell, board), board)
        say(f"[{number}/{len(fillings)}] {name}: {len(fill.entries)} rows{best}")
    times = RoundTimes.read(folder)
    for track in tracks:
        if missing := [name for name in entries if times.of(track, name) is None]:
            results = TimeTrack(board, missing, runs, folder, provenance, track, rates.by_track[track])()
            times.update(track, results)
            times.write(folder)
            say(f"timed in {track}: {', '.join(results)}")


def best_row_text(cells: CellRows, board: Board) -> str:
    """Return '; best so far: accuracy 0.83 (FedAWE)' for the cell's best row by the main measure; '' if it has none."""
    means = {
        name: float(row.of(board.main_measure).mean())
        for name, row in cells.rows.items()
        if row.of(board.main_measure).size
    }
    means = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    if not means:
        return ""
    best = (max if board.measures[board.main_measure].higher_is_better else min)(means, key=lambda name: means[name])
    return f"; best so far: {metric_text(board.main_measure, means[best])} ({best})"


def _finished_tasks(tasks: list[Any], jobs: int, runs: Path | None = None) -> Iterator[tuple[Any, Any]]:
    """Run the tasks and yield each with its result when it ends; `runs` is the folder of the unfinished runs."""
    if jobs == 1 or len(tasks) < 2:
        for task in tasks:
            yield task, task()
        return
    process_pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_start_worker)
    try:
        waiting = {process_pool.submit(_run_task, task): task for task in tasks}
        progress = JobProgress(len(tasks), "pieces of work")
        for future in yield_finished_futures(list(waiting), progress, lambda: _best_running_metric(runs)):
            progress.jobs_finished()
            stopped, result = future.result()
            if stopped is not None:
                raise Stopped(stopped)
            yield waiting[future], result
    except BaseException:
        process_pool.shutdown(wait=True, cancel_futures=True)
        raise
    process_pool.shutdown()


def _best_running_metric(runs: Path | None) -> str:
    """Return the best leading metric of the unfinished runs."""
    return "" if runs is None else best_so_far(sorted(path.parent for path in runs.rglob(METRICS_FILENAME)))


def _run_task(task: Callable[[], T]) -> tuple[str | None, T | None]:
    """Run a task in a worker process; return the reason why it was stopped, or its result."""
    try:
        outcome: tuple[str | None, T | None] = None, task()
    except Stopped as stop:
        outcome = str(stop), None
    leave_if_alone()
    return outcome


def _start_worker() -> None:
    """Prepare a worker process: one thread, and end when the command ends."""
    torch.set_num_threads(1)
    end_with_parent()
