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
from fedsim.run.together import Lockstep
from fedsim.studies.board.board import Board, Cell
from fedsim.studies.board.costs import TIMED_ROUNDS, milliseconds, remembered_bytes
from fedsim.studies.board.digests import digests
from fedsim.studies.board.measured import metric_curve
from fedsim.studies.board.rows import DONE, FAILED, REFUSED, Row, overrides_of, read, tuned_record, write
from fedsim.studies.board.trials import Trial, best_trial
from fedsim.studies.reproduce.recipe import Setting
from fedsim.studies.reproduce.runner import Job, Outcome, carry_out, in_company, plan
from fedsim.studies.results.runs import load


@dataclass(frozen=True)
class BoardJob:
    """A task of a board for some of its entries.

    Attributes:
        board: the board.
        entries: names of the entries.
        runs: folder of unfinished runs, which are deleted once their numbers are stored.
        folder: folder of the board's results.
        provenance: command, commit and versions that rows record.
    """

    board: Board
    entries: list[str]
    runs: Path
    folder: Path
    provenance: dict[str, Any]


@dataclass(frozen=True)
class TuneTrack(BoardJob):
    """A task that tunes some algorithms in a track."""

    track: str = ""

    def __call__(self) -> dict[str, dict[str, Any]]:
        """Tune the entries and return entry → record for `Rates`."""
        board, track = self.board, self.board.tracks[self.track]
        planned_jobs: list[tuple[str, Any, list[float], Job]] = []
        for cell_labels in track.tuned_at:
            cell = board.cell(self.track, cell_labels)
            for name in self.entries:
                entry = board.entries[name]
                low, high = (entry.rates * rate for rate in track.rates)
                for value, rates in board.tuning.grid(entry.knob, (low, high)).items():
                    knob = [] if entry.knob is None else [entry.knob.set(value)]
                    overrides = (*entry.overrides, *self._trial(rates), *knob)
                    planned_jobs.append((name, value, rates, _board_job(board, cell, name, overrides, self.runs)))
        outcomes = dict(_run_jobs([job for *_, job in planned_jobs]))
        scores: dict[str, dict[Trial, list[float]]] = {name: {} for name in self.entries}
        refusal_reasons: dict[str, str] = {}
        for name, value, rates, job in planned_jobs:
            outcome = outcomes[job.folder]
            rate_scores = [-math.inf] * len(rates)
            if outcome.status == REFUSED:
                refusal_reasons[name] = outcome.message
                continue
            if outcome.status == DONE:
                rate_scores = board.tuning.scores(load(job.folder), rates)
            for rate, score in zip(rates, rate_scores, strict=True):
                scores[name].setdefault(Trial(rate, value), []).append(score)
        records = {}
        for name, entry_scores in scores.items():
            records[name] = tuned_record(
                best_trial(entry_scores) if entry_scores else None, entry_scores, board.tuning, track
            )
            records[name] |= {} if entry_scores else {"message": refusal_reasons[name]}
        _delete_run_folders(job for *_, job in planned_jobs)
        return records

    def _trial(self, rates: list[float]) -> list[str]:
        """Return the overrides of one run that combines each rate with each seed as replicates."""
        seeds, lr = self.board.tuning.seeds_and_rates(rates)
        return [f"rounds={self.board.tuning.rounds}", f"seeds={seeds}", f"lr={lr}", *self.board.tuning.overrides]


@dataclass(frozen=True)
class FillCell(BoardJob):
    """A task that computes the missing rows of a cell.

    Attributes:
        cell: the cell.
        rates: entry → its record in `Rates`.
    """

    cell: Cell | None = None
    rates: dict[str, dict[str, Any]] | None = None

    def __call__(self) -> str:
        """Compute the rows, write them to the cell's file after each lockstep batch, and return the cell's name."""
        board, cell, rates = self.board, self.cell, self.rates
        assert cell is not None
        assert rates is not None
        cells = read(self.folder, cell, board)
        rows: dict[Path, tuple[str, Row]] = {}
        jobs = []
        shared: dict[str, Any] = {}
        for name in self.entries:
            entry, entry_rates = board.entries[name], rates[name]
            if entry_rates["lr"] is None:
                reason = entry_rates.get("message") or "no trial of its tuning ended well"
                cells.add(name, Row(REFUSED, reason, entry.overrides, made=self.provenance), board.compared)
                continue
            overrides = (*entry.overrides, *overrides_of(entry_rates, entry.knob), f"seeds={board.seeds}")
            row = Row(DONE, "", list(overrides), made=self.provenance)
            try:
                job = _board_job(board, cell, name, overrides, self.runs)
                simulation, _, _ = build(job.config, shared=shared)
                row.digests, row.remembered = digests(simulation), remembered_bytes(simulation)
            except ConfigError as error:
                cells.add(name, Row(REFUSED, str(error), list(overrides), made=self.provenance), board.compared)
                continue
            rows[job.folder] = name, row
            jobs.append(job)
        for company in in_company(jobs):
            for folder, outcome in _run_jobs(company):
                name, row = rows[folder]
                row.status, row.message = outcome.status, outcome.message if outcome.status != DONE else ""
                if outcome.status == DONE:
                    run = load(folder)
                    target = board.tracks[cell.track].target
                    row.numbers = {key: measured(run, target) for key, measured in board.measures.items()}
                    row.curve = [
                        list(map(float, series))
                        for series in metric_curve(run, board.measures[board.main_measure].metric)
                    ]
                cells.add(name, row, board.compared)
            write(self.folder, cells, board)
            _delete_run_folders(company)
        write(self.folder, cells, board)
        return cell.name


@dataclass(frozen=True)
class TimeTrack(BoardJob):
    """A task that times some algorithms, one after another, in the first cell where their track was tuned.

    Attributes:
        track: name of the track.
        rates: entry → its record in `Rates`.
    """

    track: str = ""
    rates: dict[str, dict[str, Any]] | None = None

    def __call__(self) -> dict[str, dict[str, Any]]:
        """Time the entries and return entry → record for `RoundTimes`."""
        board, rates = self.board, self.rates
        assert rates is not None
        cell = board.cell(self.track, board.tracks[self.track].tuned_at[0])
        short = [f"seeds={board.seeds}", f"rounds={TIMED_ROUNDS}", f"eval_every={TIMED_ROUNDS}"]
        timings: dict[str, dict[str, Any]] = {}
        shared: dict[str, Any] = {}
        for name in self.entries:
            entry, entry_rates = board.entries[name], rates[name]
            timings[name] = {"ms": None, "made": self.provenance}
            if entry_rates["lr"] is None:
                continue
            job = _board_job(
                board, cell, name, (*entry.overrides, *overrides_of(entry_rates, entry.knob), *short), self.runs
            )
            with contextlib.suppress(Exception):  # its rows hold the error
                timings[name]["ms"] = float(f"{milliseconds(job, shared):.3g}")
        return timings


def _board_job(board: Board, cell: Cell, name: str, overrides: Sequence[str], runs: Path) -> Job:
    """Return the job of one run, in a folder of its own."""
    setting = Setting((("entry", name), ("cell", cell.name)), (*board.base, *cell.overrides, *overrides))
    return plan([setting], runs, ())[0]


def _run_jobs(jobs: list[Job]) -> Iterator[tuple[Path, Outcome]]:
    """Run the jobs in lockstep batches, and yield the folder and outcome of each.

    Raises:
        Stopped: the user asked to stop.
    """
    companies = in_company(list({job.folder: job for job in jobs}.values()))
    progress = JobProgress(sum(map(len, companies)), "runs of this piece of work")
    for company in companies:
        shared: dict[str, Any] = {}
        watch = LockstepProgress(progress, [job.folder for job in company], [int(job.config.rounds) for job in company])
        runs = [functools.partial(carry_out, job, quiet=True, shared=shared) for job in company]
        stopped = False
        for number, outcome in Lockstep[Outcome](watch=watch)(runs):
            progress.jobs_finished()
            if isinstance(outcome, ConfigError):
                outcome = Outcome(REFUSED, str(outcome))
            elif isinstance(outcome, Exception) and not isinstance(outcome, (OutputError, RunError)):
                outcome = Outcome(FAILED, f"{type(outcome).__name__}: {outcome}".splitlines()[0])
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome.status == "skipped":
                raise ConfigError(outcome.message)
            stopped = stopped or outcome.status == "stopped"
            yield company[number].folder, outcome
        if stopped:
            raise Stopped("stopped between two rounds")


def _delete_run_folders(jobs: Iterator[Job] | list[Job]) -> None:
    """Delete the folders of runs whose numbers are stored."""
    for job in jobs:
        shutil.rmtree(job.folder, ignore_errors=True)
