"""Several runs folded into one: their replicates are the replicates of one federation, and the folder, metrics,
checkpoint and end of each run are views of it.

Runs can be folded that differ in nothing but seeds and numbers that may be lists with one value per seed
(`fedsim.core.per_seed`), and have completed equally many rounds. A run that ends early or diverges leaves, and the
others continue. If the federation as a whole fails, each of its runs continues alone from its last checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.core.placement import is_memory_mapped
from fedsim.core.report import Report
from fedsim.evaluation import EvaluationResult
from fedsim.run.checkpoint import Checkpointer
from fedsim.run.divergence import DivergenceGuard
from fedsim.run.folder import locked_folder
from fedsim.run.progress import Progress
from fedsim.run.settings import report_standstill
from fedsim.run.simulation import Simulation
from fedsim.run.stopping import Stopped
from fedsim.run.tracker import Tracker, update_lengths
from fedsim.run.tracking import Result, Tracking
from fedsim.strategies import State
from fedsim.trainer import TaskGenerator
from fedsim.trainer.device_memory import configure_allocator

T = TypeVar("T")

log = logging.getLogger(__name__)

PROGRESS_COUNTS = ("samples", "participants", "links", "unanswered")  # of `Progress`, one number for each replicate


class UnfoldedError(Exception):
    """The federation of a folded run failed; the run continues alone."""


class FoldedRun:
    """A run that a fold may take in, and what it was asked to write.

    Args:
        run, out, resume, tracking, identity, settings, config: as `Simulation.steps` takes them.

    Attributes:
        replicates: of the fold, that are the run's.
        tracker: of the run, while the fold does its rounds.
    """

    def __init__(
        self,
        run: Simulation,
        out: str | Path | None = None,
        resume: bool = False,
        tracking: Tracking | None = None,
        identity: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        config: str | None = None,
    ) -> None:
        self.resume = resume
        self.run, self.folder, self.tracking = run, None if out is None else Path(out), tracking or Tracking()
        self.identity, self.settings, self.config = identity or {}, settings, config
        self.replicates = slice(0, 0)
        self.tracker: Tracker

    def obstacle(self) -> str | None:
        """Why the run cannot be folded; None: it can."""
        run = self.run
        obstacles = {
            "several ranks": run.federation.ranks.count > 1,
            "a clock": run.pace.clock.active,
            "delayed updates": run.delivery.active,
            "personal models": run.personal is not None or run.newcomers is not None,
            "on_nonfinite=drop_client": run.on_nonfinite == "drop_client",
            "stop.seconds": run.stop.seconds is not None,
            f"start={run.start}": run.start != "random",
            "the reference points of a shift": run.shift.active and run.shift.references != "none",
        }
        return next((name for name, applies in obstacles.items() if applies), None)

    def join(self, fold: FoldTracker, replicates: slice, state: State, memory: Memory) -> None:
        """Make the run's tracker, which has these replicates of the fold. State and memory are of the fold before its
        first round; where the run has a checkpoint to resume, they are filled from there.
        """
        self.replicates, run = replicates, self.run
        own_state, own_memory = self.state_of(state, fold), self.memory_of(memory, fold)
        checkpoints = run.checkpointer(self.folder, self.tracking, self.identity, own_state, own_memory)
        resumed_state, progress = run.resumed(checkpoints, own_state, self.resume)
        for entry in dataclasses.fields(own_state):
            getattr(own_state, entry.name).copy_(getattr(resumed_state, entry.name))
        fold.run.training.trainers.executor_cache.update(progress.executors)
        progress.executors = fold.progress.executors
        guard = run.make_guard(progress)
        guard.rows, guard.models = self.run_entries(fold.guard.rows, fold), self.run_entries(fold.guard.models, fold)
        run.participation.follow(fold.run.participation, replicates)
        run.log_privacy()
        self.tracker = Tracker(
            run, self.folder, self.tracking, checkpoints, guard, progress, self.settings, self.config
        )

    def run_entries(self, values: Any, fold: FoldTracker) -> Any:
        """A view of the run's entries of an array or tensor [R·k, …] of the fold's replicates."""
        width = len(values) // len(fold.seeds)
        return values[self.replicates.start * width : self.replicates.stop * width]

    def state_of(self, state: State, fold: FoldTracker) -> State:
        """The run's strategy state, of that of the fold."""
        return type(state)(
            **{f.name: self.run_entries(getattr(state, f.name), fold) for f in dataclasses.fields(state)}
        )

    def memory_of(self, memory: Memory, fold: FoldTracker) -> Memory:
        """What the run's clients remember, of what those of the fold do."""

        def parts(entries: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: self.run_entries(value, fold) for name, value in entries.items()}

        clients, server = parts(memory.clients), parts(memory.server)
        return Memory(clients, server, parts(memory.evaluated), parts(memory.uplink))

    def measured_of(self, measured: EvaluationResult, fold: FoldTracker) -> EvaluationResult:
        """The run's numbers, of what was measured of the fold's replicates."""

        def parts(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: self.run_entries(value, fold) for name, value in values.items()}

        def part_or_none(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else self.run_entries(values, fold)

        return EvaluationResult(
            parts(measured.metrics),
            part_or_none(measured.client_accuracy),
            parts(measured.client_metrics),
            by_client=parts(measured.by_client),
            client_loss=part_or_none(measured.client_loss),
        )

    def count(self, fold: FoldTracker) -> None:
        """Take over how far the fold is."""
        tracker, progress = self.tracker, self.tracker.progress
        progress.rounds, progress.unevaluated = fold.progress.rounds, fold.progress.unevaluated
        tracker.keep_time()
        for name in PROGRESS_COUNTS:
            setattr(progress, name, getattr(fold.progress, name)[self.replicates])
        tracker.active, tracker.num_links = fold.active[self.replicates], fold.num_links[self.replicates]
        tracker.num_unheard = fold.num_unheard[self.replicates]

    def finish(self, state: State, fold: FoldTracker) -> Result:
        """Write what is written in the end, and return the run's result."""
        own_state = self.state_of(state, fold)
        self.run.trainer.choice = fold.run.trainer.choice
        first_model, first_round = fold.first
        rounds = self.tracker.progress.rounds - first_round
        report_standstill(self.run, self.run_entries(first_model, fold), own_state.model, rounds)
        return self.tracker.finish(own_state)


def _own_memory(value: Tensor) -> Tensor:
    """The same numbers, in memory that no other tensor shares; those that lie in a file stay there."""
    return value if is_memory_mapped(value) else value.clone(memory_format=torch.contiguous_format)


FoldableSteps = Generator[Any, Any, T]  # yields a `FoldedRun` whenever it waits to be told what to do, else local work


def foldable_steps(
    simulation: Simulation,
    out: str | Path | None = None,
    resume: bool = False,
    tracking: Tracking | None = None,
    identity: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    config: str | None = None,
) -> FoldableSteps[Result]:
    """`Simulation.steps` of a run that waits to be folded. It yields a `FoldedRun`; sent True, it opens that run's
    tracker and waits for the result. Sent False, or when `UnfoldedError` is thrown, it waits once more and goes on.
    """
    folded = FoldedRun(simulation, out, resume, tracking, identity, settings, config)
    try:
        with locked_folder(folded.folder, simulation.federation.ranks):
            if (yield folded):
                with folded.tracker:
                    return (yield folded)  # type: ignore[no-any-return]
    except UnfoldedError:
        pass
    yield folded
    return (yield from simulation.steps(out, resume, tracking, identity, settings, config))


class Job(Generic[T]):
    """A job that runs `foldable_steps` somewhere inside.

    Args:
        steps: of the job.

    Attributes:
        run: that waits to be folded, or to continue alone.
        ended: has the job ended?
        outcome: what it ended with, a value or an error.
    """

    def __init__(self, steps: FoldableSteps[T]) -> None:
        self.steps = steps
        self.run: FoldedRun | None = None
        self.ended = False
        self.outcome: T | BaseException | None = None

    def begin(self) -> None:
        """To the point where its run waits to be folded, or to its end."""
        self._advance(lambda: self.steps.send(None))

    def send(self, message: Any) -> None:
        """Tell its run something: True or False (folded or not), a result, or an error that ends it."""
        failed = isinstance(message, BaseException)
        self._advance(lambda: self.steps.throw(message) if failed else self.steps.send(message))

    def _advance(self, step: Callable[[], Any]) -> None:
        try:
            self.run = step()
        except StopIteration as end:
            self.end(end.value)
        except (Exception, Stopped) as error:
            self.end(error)

    def end(self, outcome: T | BaseException) -> None:
        """It has ended with this value or error."""
        self.run, self.ended, self.outcome = None, True, outcome


class FoldGuard(DivergenceGuard):
    """Looks for divergence in all replicates at once, and has the guard of a run act on what concerns that run.

    Args:
        run: the fold's.
        fold: whose runs are looked at.
    """

    def __init__(self, run: Simulation, fold: Fold[Any]) -> None:
        super().__init__(run.federation, type(run.strategy).__name__)
        self.fold = fold

    def without_given_up(self, cohort: Cohort, t: int) -> Cohort:
        """The rows of replicates whose run continues, and has not given them up."""
        return self.without(self.fold.replicates_left_out(t), cohort)

    def check(self) -> None:
        """A run that cannot continue ends."""
        rows, models = (first_rounds.cpu().numpy() for first_rounds in (self.rows, self.models))
        first = np.minimum(rows.reshape(self.federation.replicates, -1).min(1), models)
        diverged = first != torch.iinfo(torch.int64).max
        if not diverged.any():
            return
        for folded in list(self.fold.running):
            if diverged[folded.replicates].any():
                self.fold.attempt(folded, folded.tracker.guard.check)


class FoldTracker(Tracker):
    """Counts and evaluates all replicates of a fold, and hands each run its numbers.

    Args:
        run: the fold's.
        fold: whose runs they are.
        memory: of the fold's clients.
        progress: of the fold, at its start.
    """

    def __init__(self, run: Simulation, fold: Fold[Any], memory: Memory, progress: Progress) -> None:
        options = Tracking(progress="none", tensorboard=False)
        checkpoints = Checkpointer(None, "auto", {}, memory)
        super().__init__(run, None, options, checkpoints, FoldGuard(run, fold), progress)
        self.fold = fold
        self._lengths: np.ndarray | None = None  # [n] of the last round's updates, where somebody is shown them
        self._bounds: Sequence[int] = ()
        self._state: State
        self.first: tuple[Tensor, int]  # the models before the first round that is done here, and how many were before

    def begin(self, state: State) -> None:
        """Open the folders of all runs, and evaluate their initial models (resumed runs have done so)."""
        self._state, running = state, list(self.fold.running)
        if running:
            self._resume([folded.tracker.progress for folded in running])
        self.first = state.model.clone(), self.progress.rounds
        first = None if self.progress.rounds else self.evaluate(state, 0)
        for folded in running:
            run_measurement = None
            if first is not None:
                run_measurement, folded.tracker.models = (
                    self._run_evaluation(folded, first),
                    folded.run_entries(self.models, self),
                )
            self.fold.attempt(folded, folded.tracker.begin_with, run_measurement)
            if folded.tracker.end_reason is not None:
                self._finish(folded)
        self.end_reason = self.fold.end_reason

    def _resume(self, progresses: list[Progress]) -> None:
        """Begin where the runs are."""
        self.progress.rounds, self.progress.unevaluated = progresses[0].rounds, progresses[0].unevaluated
        for folded, progress in zip(self.fold.running, progresses, strict=True):
            for name in PROGRESS_COUNTS:
                getattr(self.progress, name)[folded.replicates] = getattr(progress, name)

    def evaluate(self, state: State, completed: int, report: Report | None = None) -> EvaluationResult:
        """All runs' models, after so many rounds."""
        self._lengths = None
        if report is not None and any(folded.tracking.watching for folded in self.fold.running):
            self._lengths, self._bounds = update_lengths(report), report.cohort.bounds
        return super().evaluate(state, completed, report)

    def round(self, t: int, state: State, report: Report) -> None:
        """Round t is complete."""
        self._state = state
        super().round(t, state, report)
        self.end_reason = self.fold.end_reason

    def checkpoint_due(self, rounds: int, num_runs: int) -> bool:
        """Is it time for the checkpoints of all runs?"""
        return any(folded.tracker.checkpoints.due(rounds, num_runs) for folded in self.fold.running)

    def record(self, measured: EvaluationResult) -> None:
        """Pass one evaluation on to the runs."""
        for folded in list(self.fold.running):
            folded.count(self)
            folded.tracker.models = folded.run_entries(self.models, self)
            self.fold.attempt(folded, folded.tracker.record, self._run_evaluation(folded, measured))
        self.progress.participants, self.progress.unevaluated = [0.0] * len(self.seeds), 0

    def _run_evaluation(self, folded: FoldedRun, measured: EvaluationResult) -> EvaluationResult:
        """A run's numbers, with what its observers are shown."""
        run_measurement = folded.measured_of(measured, self)
        if folded.tracking.watching:
            lengths = self._lengths
            if lengths is not None:
                first, last = self._bounds[folded.replicates.start], self._bounds[folded.replicates.stop]
                lengths = lengths[first:last]
            folded.tracker.add_histograms(run_measurement, lengths)
        return run_measurement

    def reason_to_end(self) -> str | None:
        """Ends the runs whose rules say so; a reason when none is left."""
        for folded in list(self.fold.running):
            reason = self.fold.attempt(folded, folded.tracker.reason_to_end)
            if reason is not None:
                folded.tracker.end_reason = reason
                self._save(folded)
                self._finish(folded)
        return self.fold.end_reason

    def save(self, state: State) -> None:
        """Write the checkpoints of all runs."""
        for folded in list(self.fold.running):
            self._save(folded)

    def _save(self, folded: FoldedRun) -> None:
        folded.count(self)
        folded.tracker.checkpoints.memory = folded.memory_of(self.checkpoints.memory, self)
        self.fold.attempt(folded, folded.tracker.save, folded.state_of(self._state, self))

    def finish_all(self) -> None:
        """Every run that is left has come to its end."""
        for folded in list(self.fold.running):
            self._finish(folded)

    def _finish(self, folded: FoldedRun) -> None:
        if folded in list(self.fold.running):  # its checkpoint could be written
            result = self.fold.attempt(folded, folded.finish, self._state, self)
            if result is not None:
                self.fold.end(folded, result)


class Fold(Generic[T]):
    """Runs jobs whose runs wait to be folded (`Job.run`) as one federation.

    Args:
        jobs: of which none has ended. Those that have not ended afterwards are waiting to continue alone.
        federation: builds the simulation whose replicates are those of all the runs, in their order.

    Attributes:
        running: the runs that have not ended.
    """

    def __init__(self, jobs: Sequence[Job[T]], federation: Callable[[], Simulation]) -> None:
        self.jobs, self.federation = jobs, federation
        self.running: list[FoldedRun] = []
        self._jobs_by_run: dict[FoldedRun, Job[T]] = {}
        self._ended_replicates: list[int] = []

    def steps(self) -> TaskGenerator[None]:
        """The rounds of all jobs, their local work handed out.

        Raises:
            Stopped: a signal came when all runs had ended.
        """
        try:
            yield from self._run()
        except Stopped as stopped:
            if not self.running:
                raise
            for folded in list(self.running):
                self.end(folded, Stopped(str(stopped)))
        except Exception as error:
            self._unfold(f"{type(error).__name__}: {' '.join(str(error).split())}")
        except BaseException:
            for job in self.jobs:
                job.steps.close()
            raise

    def _unfold(self, reason: str) -> None:
        log.info("%d jobs cannot be one federation (%s); each continues alone", len(self.jobs), reason)
        for folded in list(self.running):
            self.end(folded, UnfoldedError())
        for job in self.jobs:
            if job.run is not None and job.run not in self._jobs_by_run:
                job.send(False)

    def _run(self) -> TaskGenerator[None]:
        run = self.federation()
        configure_allocator(run.device)
        state = run.initial_state()
        memory = run.memory_at_start(state)
        run.rehearse(state, memory)
        entries = {entry.name: getattr(state, entry.name) for entry in dataclasses.fields(state)}
        state = type(state)(**{name: _own_memory(value) for name, value in entries.items()})
        run.evaluator.references = run.references
        run.pace.begin()
        progress = Progress.at_start(run.federation.replicates)
        progress.executors = run.training.trainers.executor_cache
        with FoldTracker(run, self, memory, progress) as tracker:
            self._join(tracker, state, memory)
            tracker.begin(state)
            yield from run.train(state, memory, tracker)
            tracker.finish_all()

    def _join(self, tracker: FoldTracker, state: State, memory: Memory) -> None:
        """Open the trackers of all runs."""
        first = 0
        for job in self.jobs:
            folded = job.run
            assert folded is not None
            replicates = slice(first, first := first + folded.run.federation.replicates)
            self._jobs_by_run[folded] = job
            self.running.append(folded)
            self.attempt(folded, folded.join, tracker, replicates, state, memory)
            if not job.ended:
                job.send(True)

    @property
    def end_reason(self) -> str | None:
        """Why no round is left to do: all runs have ended; None: some have not."""
        return None if self.running else "all runs have ended"

    def replicates_left_out(self, t: int) -> list[int]:
        """Replicates that take no part in round t: their run has ended, or has given them up."""
        given_up = [
            folded.replicates.start + r for folded in self.running for r in folded.tracker.guard.replicates_left_out(t)
        ]
        return self._ended_replicates + given_up

    def attempt(self, folded: FoldedRun, call: Callable[..., Any], *args: Any) -> Any:
        """What the call returns; an error ends the run, and no other."""
        try:
            return call(*args)
        except (Exception, Stopped) as error:
            self.end(folded, error)
        return None

    def end(self, folded: FoldedRun, outcome: Result | BaseException) -> None:
        """A run has its result, or its error."""
        self.running.remove(folded)
        self._ended_replicates += range(folded.replicates.start, folded.replicates.stop)
        self._jobs_by_run[folded].send(outcome)
