"""The tasks of a board: tune algorithms in a track, compute the missing rows of a cell, time rounds."""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.app.build import build
from fedsim.app.job_progress import JobProgress, LockstepProgress
from fedsim.core.errors import ConfigError, OutputError, RunError
from fedsim.run.stopping import Stopped
from fedsim.run.together import LockstepRunner
from fedsim.studies.board.board import BoardCell, Leaderboard
from fedsim.studies.board.costs import TIMED_ROUNDS, client_memory_bytes, milliseconds_per_round
from fedsim.studies.board.digests import digest_inputs
from fedsim.studies.board.measured import metric_curve
from fedsim.studies.board.rows import (
    DONE_STATUS,
    FAILED_STATUS,
    REFUSED_STATUS,
    Row,
    make_tuning_record,
    read_cell_rows,
    tuned_overrides,
    write_cell_rows,
)
from fedsim.studies.board.trials import BoardTrial, best_trial
from fedsim.studies.reproduce.recipe import RecipeSetting
from fedsim.studies.reproduce.runner import Outcome, RecipeJob, batch_jobs, job_local_tasks, plan_jobs
from fedsim.studies.results.runs import load


@dataclass(frozen=True)
class BoardTask:
    """A task of a board for some of its entries.

    Attributes:
        board: the board.
        entries: names of the entries.
        runs_folder: folder of unfinished runs, which are deleted once their numbers are stored.
        results_folder: folder of the board's results.
        provenance: command, commit and versions that rows record.
    """

    board: Leaderboard
    entries: list[str]
    runs_folder: Path
    results_folder: Path
    provenance: dict[str, Any]


@dataclass(frozen=True)
class TuneTrackTask(BoardTask):
    """A task that tunes some algorithms in a track."""

    track: str = ""

    def __call__(self) -> dict[str, dict[str, Any]]:
        """Tune the entries and return entry → record for `Rates`."""
        board, track = self.board, self.board.tracks[self.track]
        planned_jobs: list[tuple[str, Any, list[float], RecipeJob]] = []
        for cell_labels in track.tuned_at:
            cell = board.cell(self.track, cell_labels)
            for entry_name in self.entries:
                entry = board.entries[entry_name]
                low, high = (entry.rates * rate for rate in track.rates)
                for knob_value, entry_rates in board.tuning.rate_grids(entry.knob, (low, high)).items():
                    knob = [] if entry.knob is None else [entry.knob.override(knob_value)]
                    overrides = (*entry.overrides, *self._trial_overrides(entry_rates), *knob)
                    planned_jobs.append(
                        (
                            entry_name,
                            knob_value,
                            entry_rates,
                            _leaderboard_job(board, cell, entry_name, overrides, self.runs_folder),
                        )
                    )
        outcomes = dict(_run_jobs([job for *_, job in planned_jobs]))
        scores_by_entry: dict[str, dict[BoardTrial, list[float]]] = {entry_name: {} for entry_name in self.entries}
        refusal_reasons: dict[str, str] = {}
        for entry_name, knob_value, entry_rates, job in planned_jobs:
            outcome = outcomes[job.folder]
            rate_scores = [-math.inf] * len(entry_rates)
            if outcome.status == REFUSED_STATUS:
                refusal_reasons[entry_name] = outcome.message
                continue
            if outcome.status == DONE_STATUS:
                rate_scores = board.tuning.scores(load(job.folder), entry_rates)
            for rate, score in zip(entry_rates, rate_scores, strict=True):
                scores_by_entry[entry_name].setdefault(BoardTrial(rate, knob_value), []).append(score)
        tuned_records = {}
        for entry_name, entry_scores in scores_by_entry.items():
            tuned_records[entry_name] = make_tuning_record(
                best_trial(entry_scores) if entry_scores else None, entry_scores, board.tuning, track
            )
            tuned_records[entry_name] |= {} if entry_scores else {"message": refusal_reasons[entry_name]}
        _delete_run_folders(job for *_, job in planned_jobs)
        return tuned_records

    def _trial_overrides(self, rates: list[float]) -> list[str]:
        """Return the overrides of one run that combines each rate with each seed as replicates."""
        seeds, lr = self.board.tuning.seeds_and_rates(rates)
        return [f"rounds={self.board.tuning.rounds}", f"seeds={seeds}", f"lr={lr}", *self.board.tuning.overrides]


@dataclass(frozen=True)
class FillCellTask(BoardTask):
    """A task that computes the missing rows of a cell.

    Attributes:
        cell: the cell.
        rates: entry → its record in `Rates`.
    """

    cell: BoardCell | None = None
    rates: dict[str, dict[str, Any]] | None = None

    def __call__(self) -> str:
        """Compute the rows, write them to the cell's file after each lockstep batch, and return the cell's name."""
        board, cell, rates_by_entry = self.board, self.cell, self.rates
        assert cell is not None
        assert rates_by_entry is not None
        cells = read_cell_rows(self.results_folder, cell, board)
        rows: dict[Path, tuple[str, Row]] = {}
        jobs = []
        shared_objects: dict[str, Any] = {}
        for entry_name in self.entries:
            entry, entry_rates = board.entries[entry_name], rates_by_entry[entry_name]
            if entry_rates["lr"] is None:
                reason = entry_rates.get("message") or "no trial of its tuning ended well"
                cells.add_row(
                    entry_name, Row(REFUSED_STATUS, reason, entry.overrides, made=self.provenance), board.compared
                )
                continue
            overrides = (*entry.overrides, *tuned_overrides(entry_rates, entry.knob), f"seeds={board.seeds}")
            row = Row(DONE_STATUS, "", list(overrides), made=self.provenance)
            try:
                job = _leaderboard_job(board, cell, entry_name, overrides, self.runs_folder)
                simulation, _, _ = build(job.config, shared=shared_objects)
                row.digests, row.remembered = digest_inputs(simulation), client_memory_bytes(simulation)
            except ConfigError as error:
                cells.add_row(
                    entry_name, Row(REFUSED_STATUS, str(error), list(overrides), made=self.provenance), board.compared
                )
                continue
            rows[job.folder] = entry_name, row
            jobs.append(job)
        for job_batch in batch_jobs(jobs):
            for folder, outcome in _run_jobs(job_batch):
                entry_name, row = rows[folder]
                row.status, row.message = outcome.status, outcome.message if outcome.status != DONE_STATUS else ""
                if outcome.status == DONE_STATUS:
                    run = load(folder)
                    target = board.tracks[cell.track].target
                    row.numbers = {key: measured(run, target) for key, measured in board.measures.items()}
                    row.curve = [
                        list(map(float, series))
                        for series in metric_curve(run, board.measures[board.main_measure].metric)
                    ]
                cells.add_row(entry_name, row, board.compared)
            write_cell_rows(self.results_folder, cells, board)
            _delete_run_folders(job_batch)
        write_cell_rows(self.results_folder, cells, board)
        return cell.name


@dataclass(frozen=True)
class TrackTimingTask(BoardTask):
    """A task that times some algorithms, one after another, in the first cell where their track was tuned.

    Attributes:
        track: name of the track.
        rates: entry → its record in `Rates`.
    """

    track: str = ""
    rates: dict[str, dict[str, Any]] | None = None

    def __call__(self) -> dict[str, dict[str, Any]]:
        """Time the entries and return entry → record for `AlgorithmRoundTimes`."""
        board, rates_by_entry = self.board, self.rates
        assert rates_by_entry is not None
        cell = board.cell(self.track, board.tracks[self.track].tuned_at[0])
        short_overrides = [f"seeds={board.seeds}", f"rounds={TIMED_ROUNDS}", f"eval_every={TIMED_ROUNDS}"]
        timing_by_entry: dict[str, dict[str, Any]] = {}
        shared_objects: dict[str, Any] = {}
        for entry_name in self.entries:
            board_entry, entry_rates = board.entries[entry_name], rates_by_entry[entry_name]
            timing_by_entry[entry_name] = {"ms": None, "made": self.provenance}
            if entry_rates["lr"] is None:
                continue
            job = _leaderboard_job(
                board,
                cell,
                entry_name,
                (*board_entry.overrides, *tuned_overrides(entry_rates, board_entry.knob), *short_overrides),
                self.runs_folder,
            )
            with contextlib.suppress(Exception):  # its rows hold the error
                timing_by_entry[entry_name]["ms"] = float(f"{milliseconds_per_round(job, shared_objects):.3g}")
        return timing_by_entry


def _leaderboard_job(board: Leaderboard, cell: BoardCell, name: str, overrides: Sequence[str], runs: Path) -> RecipeJob:
    """Return the job of one run, in a folder of its own."""
    setting = RecipeSetting((("entry", name), ("cell", cell.name)), (*board.base, *cell.overrides, *overrides))
    return plan_jobs([setting], runs, ())[0]


def _run_jobs(jobs: list[RecipeJob]) -> Iterator[tuple[Path, Outcome]]:
    """Run the jobs in lockstep batches, and yield the folder and outcome of each.

    Raises:
        Stopped: the user asked to stop.
    """
    companies = batch_jobs(list({job.folder: job for job in jobs}.values()))
    progress = JobProgress(sum(map(len, companies)), "runs of this piece of work")
    for job_batch in companies:
        shared: dict[str, Any] = {}
        lockstep_progress = LockstepProgress(
            progress, [job.folder for job in job_batch], [int(job.config.rounds) for job in job_batch]
        )
        runs = [functools.partial(job_local_tasks, job, without_progress=True, shared=shared) for job in job_batch]
        was_stopped = False
        for job_index, job_outcome in LockstepRunner[Outcome](report_progress=lockstep_progress)(runs):
            progress.record_finished_jobs()
            if isinstance(job_outcome, ConfigError):
                job_outcome = Outcome(REFUSED_STATUS, str(job_outcome))
            elif isinstance(job_outcome, Exception) and not isinstance(job_outcome, (OutputError, RunError)):
                job_outcome = Outcome(FAILED_STATUS, f"{type(job_outcome).__name__}: {job_outcome}".splitlines()[0])
            if isinstance(job_outcome, BaseException):
                raise job_outcome
            if job_outcome.status == "skipped":
                raise ConfigError(job_outcome.message)
            was_stopped = was_stopped or job_outcome.status == "stopped"
            yield job_batch[job_index].folder, job_outcome
        if was_stopped:
            raise Stopped("stopped between two rounds")


def _delete_run_folders(jobs: Iterator[RecipeJob] | list[RecipeJob]) -> None:
    """Delete the folders of runs whose numbers are stored."""
    for job in jobs:
        shutil.rmtree(job.folder, ignore_errors=True)
