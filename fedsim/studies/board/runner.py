"""Computation of a board: tune missing rates, compute missing rows in parallel processes, and time the algorithms."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedsim.app.job_progress import JobProgress, best_metric_text, metric_text, yield_finished_futures
from fedsim.run.stopping import Stopped
from fedsim.run.tracking.metrics_csv import METRICS_FILENAME
from fedsim.studies.board.board import BoardCell, Leaderboard
from fedsim.studies.board.costs import AlgorithmRoundTimes
from fedsim.studies.board.rows import CellRows, TunedRates, read_cell_rows
from fedsim.studies.board.tasks import FillCellTask, TrackTimingTask, TuneTrackTask
from fedsim.studies.reproduce.runner import exit_if_orphaned, terminate_with_parent

ALGORITHMS_TUNED_AT_ONCE = 4  # algorithms per tuning task, whose run folders exist at the same time

T = TypeVar("T")


def compute_missing_rows(
    board: Leaderboard,
    cells: list[BoardCell],
    entry_names: list[str],
    folder: Path,
    runs: Path,
    jobs: int,
    provenance_facts: dict[str, Any],
    print_line: Callable[[str], None] = print,
) -> None:
    """Compute the missing rates, rows and times of these cells and entries.

    Args:
        board: the board.
        cells, entry_names: the cells and names of entries to compute.
        folder: folder of the board's results: rates.json, times.json and one file per cell.
        runs: folder of unfinished runs; the next command resumes them if this one is killed.
        jobs: number of processes.
        provenance_facts: command, commit and versions that rows record.
        print_line: called with a message for each finished task.

    Raises:
        Stopped: the user asked to stop.
    """
    rates = TunedRates.read(folder)
    track_names = list(dict.fromkeys(cell.track for cell in cells))
    tune_tasks = []
    for track in track_names:
        missing_entries = [entry_name for entry_name in entry_names if rates.record_of(track, entry_name) is None]
        for entry_name in entry_names:
            rates.check(board, track, entry_name)
        batches = [
            missing_entries[first_entry : first_entry + ALGORITHMS_TUNED_AT_ONCE]
            for first_entry in range(0, len(missing_entries), ALGORITHMS_TUNED_AT_ONCE)
        ]
        tune_tasks += [TuneTrackTask(board, batch, runs, folder, provenance_facts, track) for batch in batches]
    for task_number, (tune, task_results) in enumerate(_yield_task_results(tune_tasks, jobs, runs), 1):
        rates.update(tune.track, task_results)
        rates.write(folder)
        print_line(f"[{task_number}/{len(tune_tasks)}] tuned in {tune.track}: {', '.join(tune.entries)}")
    fill_tasks = []
    for cell in cells:
        rows = read_cell_rows(folder, cell, board).rows
        if missing_entries := [entry_name for entry_name in entry_names if entry_name not in rows]:
            fill_tasks.append(
                FillCellTask(board, missing_entries, runs, folder, provenance_facts, cell, rates.by_track[cell.track])
            )
    for task_number, (fill_task, entry_name) in enumerate(_yield_task_results(fill_tasks, jobs, runs), 1):
        best = best_row_text(read_cell_rows(folder, fill_task.cell, board), board)
        print_line(f"[{task_number}/{len(fill_tasks)}] {entry_name}: {len(fill_task.entries)} rows{best}")
    times = AlgorithmRoundTimes.read(folder)
    for track in track_names:
        if missing_entries := [entry_name for entry_name in entry_names if times.record_of(track, entry_name) is None]:
            task_results = TrackTimingTask(
                board, missing_entries, runs, folder, provenance_facts, track, rates.by_track[track]
            )()
            times.update(track, task_results)
            times.write(folder)
            print_line(f"timed in {track}: {', '.join(task_results)}")


def best_row_text(cells: CellRows, board: Leaderboard) -> str:
    """Return '; best so far: accuracy 0.83 (FedAWE)' for the cell's best row by the main measure; '' if it has none."""
    measure_means = {
        name: float(row.values_of(board.main_measure).mean())
        for name, row in cells.rows.items()
        if row.values_of(board.main_measure).size
    }
    measure_means = {name: mean for name, mean in measure_means.items() if math.isfinite(mean)}
    if not measure_means:
        return ""
    best = (max if board.measures[board.main_measure].higher_is_better else min)(
        measure_means, key=lambda name: measure_means[name]
    )
    return f"; best so far: {metric_text(board.main_measure, measure_means[best])} ({best})"


def _yield_task_results(tasks: list[Any], jobs: int, runs: Path | None = None) -> Iterator[tuple[Any, Any]]:
    """Run the tasks and yield each with its result when it ends; `runs` is the folder of the unfinished runs."""
    if jobs == 1 or len(tasks) < 2:
        for task in tasks:
            yield task, task()
        return
    process_pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_initialise_worker)
    try:
        task_by_future = {process_pool.submit(_run_task, task): task for task in tasks}
        progress = JobProgress(len(tasks), "pieces of work")
        for future in yield_finished_futures(list(task_by_future), progress, lambda: _best_metric_text(runs)):
            progress.record_finished_jobs()
            was_stopped, result = future.result()
            if was_stopped is not None:
                raise Stopped(was_stopped)
            yield task_by_future[future], result
    except BaseException:
        process_pool.shutdown(wait=True, cancel_futures=True)
        raise
    process_pool.shutdown()


def _best_metric_text(runs: Path | None) -> str:
    """Return the best leading metric of the unfinished runs."""
    return "" if runs is None else best_metric_text(sorted(path.parent for path in runs.rglob(METRICS_FILENAME)))


def _run_task(task: Callable[[], T]) -> tuple[str | None, T | None]:
    """Run a task in a worker process; return the reason why it was stopped, or its result."""
    try:
        outcome: tuple[str | None, T | None] = None, task()
    except Stopped as stop:
        outcome = str(stop), None
    finally:
        exit_if_orphaned()
    return outcome


def _initialise_worker() -> None:
    """Prepare a worker process: one thread, and end when the command ends."""
    torch.set_num_threads(1)
    terminate_with_parent()
