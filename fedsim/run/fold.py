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
from fedsim.run.tracker import Tracker, update_norms
from fedsim.run.tracking import Result, RunConfig, Tracking
from fedsim.strategies import State
from fedsim.trainer import TaskGenerator
from fedsim.trainer.device_memory import raise_malloc_thresholds

T = TypeVar("T")

log = logging.getLogger(__name__)

PROGRESS_COUNTS = ("samples", "participants", "links", "unanswered")  # of `Progress`, one number for each replicate


class FoldFailedError(Exception):
    """Raised if the federation of a folded run fails; the run continues alone."""


class FoldMember:
    """A run that can be folded, and what it was asked to write.

    Args:
        simulation, out, resume, tracking, config: as `Simulation.run_as_generator` takes them.

    Attributes:
        replicates: of the fold, that are the run's.
        tracker: of the run, while the fold does its rounds.
    """

    def __init__(
        self,
        simulation: Simulation,
        out: str | Path | None = None,
        resume: bool = False,
        tracking: Tracking | None = None,
        config: RunConfig | None = None,
    ) -> None:
        self.resume = resume
        self.simulation, self.folder, self.tracking = (
            simulation,
            None if out is None else Path(out),
            tracking or Tracking(),
        )
        self.config = config or RunConfig()
        self.replicates = slice(0, 0)
        self.tracker: Tracker

    def unfoldable_reason(self) -> str | None:
        """Return why the run cannot be folded, or None if it can."""
        simulation = self.simulation
        obstacle_by_setting = {
            "several ranks": simulation.federation.ranks.num_ranks > 1,
            "a clock": simulation.round_clock.clock.active,
            "delayed updates": simulation.delayed_updates.active,
            "personal models": simulation.personal is not None or simulation.newcomers is not None,
            "on_nonfinite=drop_client": simulation.on_nonfinite == "drop_client",
            "stop.seconds": simulation.stop.seconds is not None,
            f"start={simulation.start}": simulation.start != "random",
            "a drift of the data": simulation.data.drift.active,
            "the reference points of a shift": simulation.shift.active
            and getattr(simulation.shift, "references", "auto") != "none",
        }
        return next((name for name, is_present in obstacle_by_setting.items() if is_present), None)

    def open_tracker(self, fold: FoldTracker, replicates: slice, state: State, memory: Memory) -> None:
        """Make the run's tracker for these replicates of the fold. State and memory are those of the fold before its
        first round; if the run has a checkpoint to resume from, they are filled from there."""
        self.replicates, simulation = replicates, self.simulation
        own_state, own_memory = self.state_of_run(state, fold), self.select_run_memory(memory, fold)
        checkpoints = simulation.checkpointer(self.folder, self.tracking, self.config.identity, own_state, own_memory)
        resumed_state, progress = simulation.load_checkpoint(checkpoints, own_state, self.resume)
        for entry in dataclasses.fields(own_state):
            getattr(own_state, entry.name).copy_(getattr(resumed_state, entry.name))
        fold.simulation.training.trainer_factory.executor_cache.update(progress.executors)
        progress.executors = fold.progress.executors
        divergence_guard = simulation.make_divergence_guard(progress)
        divergence_guard.first_nonfinite_round_of_rows, divergence_guard.first_nonfinite_round_of_models = (
            self.own_entries(fold.divergence_guard.first_nonfinite_round_of_rows, fold),
            self.own_entries(fold.divergence_guard.first_nonfinite_round_of_models, fold),
        )
        simulation.participation.view_memory_of(fold.simulation.participation, replicates)
        simulation.log_privacy()
        self.tracker = Tracker(
            simulation, self.folder, self.tracking, checkpoints, divergence_guard, progress, self.config
        )

    def own_entries(self, values: Any, fold: FoldTracker) -> Any:
        """Return a view of the run's entries of an array or tensor [R·k, …] of the fold's replicates."""
        width = len(values) // len(fold.seeds)
        return values[self.replicates.start * width : self.replicates.stop * width]

    def state_of_run(self, state: State, fold: FoldTracker) -> State:
        """Return the part of the fold's strategy state that is the run's."""
        return type(state)(
            **{f.name: self.own_entries(getattr(state, f.name), fold) for f in dataclasses.fields(state)}
        )

    def select_run_memory(self, memory: Memory, fold: FoldTracker) -> Memory:
        """Return the part of the fold's client memory that is the run's."""

        def select_run_entries(entries: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: self.own_entries(value, fold) for name, value in entries.items()}

        clients, server = select_run_entries(memory.clients), select_run_entries(memory.server)
        return Memory(clients, server, select_run_entries(memory.evaluated), select_run_entries(memory.uplink))

    def select_evaluation_result(self, evaluation_result: EvaluationResult, fold: FoldTracker) -> EvaluationResult:
        """Return the part of the fold's measurements that is the run's."""

        def values_of_run(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: self.own_entries(value, fold) for name, value in values.items()}

        def select_or_none(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else self.own_entries(values, fold)

        return EvaluationResult(
            values_of_run(evaluation_result.metrics),
            select_or_none(evaluation_result.client_accuracy),
            values_of_run(evaluation_result.client_metrics),
            by_client=values_of_run(evaluation_result.by_client),
            client_loss=select_or_none(evaluation_result.client_loss),
        )

    def copy_progress(self, fold: FoldTracker) -> None:
        """Copy the fold's progress into the run's."""
        tracker, progress = self.tracker, self.tracker.progress
        progress.rounds, progress.unevaluated = fold.progress.rounds, fold.progress.unevaluated
        tracker.update_elapsed_time()
        for name in PROGRESS_COUNTS:
            setattr(progress, name, getattr(fold.progress, name)[self.replicates])
        tracker.num_active, tracker.num_links = fold.num_active[self.replicates], fold.num_links[self.replicates]
        tracker.num_unanswered = fold.num_unanswered[self.replicates]

    def finish(self, state: State, fold: FoldTracker) -> Result:
        """Write the files of the end of a run, and return its result."""
        own_state = self.state_of_run(state, fold)
        self.simulation.trainer.executor_choice = fold.simulation.trainer.executor_choice
        first_model, first_round = fold.initial_models_and_count
        rounds = self.tracker.progress.rounds - first_round
        report_standstill(self.simulation, self.own_entries(first_model, fold), own_state.model, rounds)
        return self.tracker.finish(own_state)


def _unshared_tensor(value: Tensor) -> Tensor:
    """Return a copy that shares memory with no other tensor; memory-mapped tensors are returned as they are."""
    return value if is_memory_mapped(value) else value.clone(memory_format=torch.contiguous_format)


FoldableSteps = Generator[Any, Any, T]  # yields a `FoldMember` where it waits for instructions, otherwise local work


def foldable_run_steps(
    simulation: Simulation,
    out: str | Path | None = None,
    resume: bool = False,
    tracking: Tracking | None = None,
    config: RunConfig | None = None,
) -> FoldableSteps[Result]:
    """`Simulation.run_as_generator` of a run that waits to be folded. It yields a `FoldMember`; sent True, it opens
    that run's tracker and waits for the result. Sent False, or when `FoldFailedError` is thrown, it waits once more
    and goes on.
    """
    folded_run = FoldMember(simulation, out, resume, tracking, config)
    try:
        with locked_folder(folded_run.folder, simulation.federation.ranks):
            if (yield folded_run):
                with folded_run.tracker:
                    return (yield folded_run)  # type: ignore[no-any-return]
    except FoldFailedError:
        pass
    yield folded_run
    return (yield from simulation.run_as_generator(out, resume, tracking, config))


class FoldJob(Generic[T]):
    """A job that runs `foldable_run_steps` at some point.

    Args:
        steps: of the job.

    Attributes:
        waiting_run: that waits to be folded, or to continue alone.
        has_ended: has the job ended?
        outcome: what it ended with, a value or an error.
    """

    def __init__(self, steps: FoldableSteps[T]) -> None:
        self.steps = steps
        self.waiting_run: FoldMember | None = None
        self.has_ended = False
        self.outcome: T | BaseException | None = None

    def start(self) -> None:
        """Run the job until its run waits to be folded, or to its end."""
        self._run_until_wait(lambda: self.steps.send(None))

    def resume(self, message: Any) -> None:
        """Send the job's run a value: True or False (folded or not), a result, or an error that ends it."""
        is_error = isinstance(message, BaseException)
        self._run_until_wait(lambda: self.steps.throw(message) if is_error else self.steps.send(message))

    def _run_until_wait(self, step: Callable[[], Any]) -> None:
        try:
            self.waiting_run = step()
        except StopIteration as end:
            self.record_outcome(end.value)
        except (Exception, Stopped) as error:
            self.record_outcome(error)

    def record_outcome(self, outcome: T | BaseException) -> None:
        """Record the value or error with which the job ended."""
        self.waiting_run, self.has_ended, self.outcome = None, True, outcome


class FoldDivergenceGuard(DivergenceGuard):
    """Checks all replicates for divergence at once, and passes what concerns a run to the guard of that run.

    Args:
        run: the fold's.
        fold: whose runs are looked at.
    """

    def __init__(self, run: Simulation, fold: FoldedJobs[Any]) -> None:
        super().__init__(run.federation, type(run.strategy).__name__)
        self.fold = fold

    def without_dropped_replicates(self, cohort: Cohort, t: int) -> Cohort:
        """Return the rows of replicates whose runs continue and have not dropped them."""
        return self.exclude_replicates(self.fold.excluded_replicates(t), cohort)

    def handle_nonfinite(self) -> None:
        """End the runs that cannot continue after a divergence."""
        rows, models = (
            first_rounds.cpu().numpy()
            for first_rounds in (self.first_nonfinite_round_of_rows, self.first_nonfinite_round_of_models)
        )
        first = np.minimum(rows.reshape(self.federation.num_replicates, -1).min(1), models)
        is_diverged = first != torch.iinfo(torch.int64).max
        if not is_diverged.any():
            return
        for folded in list(self.fold.active_runs):
            if is_diverged[folded.replicates].any():
                self.fold.call_or_end_run(folded, folded.tracker.divergence_guard.handle_nonfinite)


class FoldTracker(Tracker):
    """Counts and evaluates all replicates of a fold, and passes each run its part.

    Args:
        run: the fold's.
        fold: whose runs they are.
        memory: of the fold's clients.
        progress: of the fold, at its start.
    """

    def __init__(self, run: Simulation, fold: FoldedJobs[Any], memory: Memory, progress: Progress) -> None:
        options = Tracking(progress="none", tensorboard=False)
        checkpoints = Checkpointer(None, "auto", {}, memory)
        super().__init__(run, None, options, checkpoints, FoldDivergenceGuard(run, fold), progress)
        self.fold = fold
        self._update_norms: np.ndarray | None = None  # [n] of the last round's updates, if an observer shows them
        self._bounds: Sequence[int] = ()
        self._state: State
        self.initial_models_and_count: tuple[
            Tensor, int
        ]  # the models before the first round of this process, and the number of earlier rounds

    def start(self, state: State) -> None:
        """Open the folders of all runs, and evaluate their initial models, except for resumed runs."""
        self._state, running = state, list(self.fold.active_runs)
        if running:
            self._restore_progress([folded.tracker.progress for folded in running])
        self.initial_models_and_count = state.model.clone(), self.progress.rounds
        initial_result = None if self.progress.rounds else self.evaluate(state, 0)
        for folded in running:
            run_measurement = None
            if initial_result is not None:
                run_measurement, folded.tracker.models = (
                    self._select_run_evaluation(folded, initial_result),
                    folded.own_entries(self.models, self),
                )
            self.fold.call_or_end_run(folded, folded.tracker.start_from_evaluation, run_measurement)
            if folded.tracker.end_reason is not None:
                self._finish(folded)
        self.end_reason = self.fold.end_reason

    def _restore_progress(self, progresses: list[Progress]) -> None:
        """Continue from the progress of the runs."""
        self.progress.rounds, self.progress.unevaluated = progresses[0].rounds, progresses[0].unevaluated
        for folded, progress in zip(self.fold.active_runs, progresses, strict=True):
            for name in PROGRESS_COUNTS:
                getattr(self.progress, name)[folded.replicates] = getattr(progress, name)

    def evaluate(self, state: State, completed_rounds: int, report: Report | None = None) -> EvaluationResult:
        """Evaluate the models of all runs."""
        self._update_norms = None
        if report is not None and any(folded.tracking.all_observers for folded in self.fold.active_runs):
            self._update_norms, self._bounds = update_norms(report), report.cohort.replicate_bounds
        return super().evaluate(state, completed_rounds, report)

    def record_round(self, t: int, state: State, report: Report) -> None:
        """Record that round t is complete."""
        self._state = state
        super().record_round(t, state, report)
        self.end_reason = self.fold.end_reason

    def notify_round_completed(self, completed_rounds: int) -> None:
        """Tell the observers of all runs."""
        for folded in list(self.fold.active_runs):
            self.fold.call_or_end_run(folded, folded.tracker.notify_round_completed, completed_rounds)

    def checkpoint_due(self, rounds: int, num_runs: int) -> bool:
        """Return whether a checkpoint of some run is due."""
        return any(folded.tracker.checkpoints.is_due(rounds, num_runs) for folded in self.fold.active_runs)

    def record_evaluation(self, evaluation_result: EvaluationResult) -> None:
        """Pass an evaluation to the runs."""
        for folded in list(self.fold.active_runs):
            folded.copy_progress(self)
            folded.tracker.models = folded.own_entries(self.models, self)
            self.fold.call_or_end_run(
                folded, folded.tracker.record_evaluation, self._select_run_evaluation(folded, evaluation_result)
            )
        self.progress.participants, self.progress.unevaluated = [0.0] * len(self.seeds), 0

    def _select_run_evaluation(self, folded: FoldMember, evaluation_result: EvaluationResult) -> EvaluationResult:
        """Return a run's part of an evaluation, with what its observers are shown."""
        run_measurement = folded.select_evaluation_result(evaluation_result, self)
        if folded.tracking.all_observers:
            update_norms = self._update_norms
            if update_norms is not None:
                first_bound, end_bound = self._bounds[folded.replicates.start], self._bounds[folded.replicates.stop]
                update_norms = update_norms[first_bound:end_bound]
            folded.tracker.add_histograms(run_measurement, update_norms)
        return run_measurement

    def reason_to_end(self) -> str | None:
        """End the runs whose stopping criteria are met; return a reason if no run is left."""
        for folded in list(self.fold.active_runs):
            reason = self.fold.call_or_end_run(folded, folded.tracker.reason_to_end)
            if reason is not None:
                folded.tracker.end_reason = reason
                self._save_checkpoint(folded)
                self._finish(folded)
        return self.fold.end_reason

    def save_checkpoint(self, state: State) -> None:
        """Write the checkpoints of all runs."""
        for folded in list(self.fold.active_runs):
            self._save_checkpoint(folded)

    def _save_checkpoint(self, folded: FoldMember) -> None:
        folded.copy_progress(self)
        folded.tracker.checkpoints.memory = folded.select_run_memory(self.checkpoints.memory, self)
        self.fold.call_or_end_run(folded, folded.tracker.save_checkpoint, folded.state_of_run(self._state, self))

    def finish_all_runs(self) -> None:
        """Finish all runs that are left."""
        for folded in list(self.fold.active_runs):
            self._finish(folded)

    def _finish(self, folded: FoldMember) -> None:
        if folded in list(self.fold.active_runs):  # its checkpoint could be written
            result = self.fold.call_or_end_run(folded, folded.finish, self._state, self)
            if result is not None:
                self.fold.end_run(folded, result)


class FoldedJobs(Generic[T]):
    """Runs jobs whose runs wait to be folded (`Job.waiting_run`) as one federation.

    Args:
        jobs: of which none has ended. Those that have not ended afterwards are waiting to continue alone.
        federation: builds the simulation whose replicates are those of all the runs, in their order.

    Attributes:
        active_runs: the runs that have not ended.
    """

    def __init__(self, jobs: Sequence[FoldJob[T]], federation: Callable[[], Simulation]) -> None:
        self.jobs, self.make_simulation = jobs, federation
        self.active_runs: list[FoldMember] = []
        self._jobs_by_run: dict[FoldMember, FoldJob[T]] = {}
        self._ended_replicates: list[int] = []

    def generate_round_tasks(self) -> TaskGenerator[None]:
        """The rounds of all jobs, as a generator of their local tasks.

        Raises:
            Stopped: a signal came when all runs had ended.
        """
        try:
            yield from self._run_jobs_folded()
        except Stopped as stop_error:
            if not self.active_runs:
                raise
            for folded in list(self.active_runs):
                self.end_run(folded, Stopped(str(stop_error)))
        except Exception as error:
            self._continue_jobs_separately(f"{type(error).__name__}: {' '.join(str(error).split())}")
        except BaseException:
            for job in self.jobs:
                job.steps.close()
            raise

    def _continue_jobs_separately(self, reason: str) -> None:
        log.info("%d jobs cannot be one federation (%s); each continues alone", len(self.jobs), reason)
        for folded in list(self.active_runs):
            self.end_run(folded, FoldFailedError())
        for job in self.jobs:
            if job.waiting_run is not None and job.waiting_run not in self._jobs_by_run:
                job.resume(False)

    def _run_jobs_folded(self) -> TaskGenerator[None]:
        simulation = self.make_simulation()
        for job in self.jobs:
            assert job.waiting_run is not None
            simulation.check_same_parts(job.waiting_run.simulation)
        raise_malloc_thresholds(simulation.device)
        state = simulation.initial_state()
        memory = simulation.initial_memory(state)
        simulation.rehearse(state, memory)
        entries = {entry.name: getattr(state, entry.name) for entry in dataclasses.fields(state)}
        state = type(state)(**{name: _unshared_tensor(value) for name, value in entries.items()})
        simulation.evaluator.references = simulation.references
        simulation.round_clock.start_round()
        progress = Progress.at_start(simulation.federation.num_replicates)
        progress.executors = simulation.training.trainer_factory.executor_cache
        with FoldTracker(simulation, self, memory, progress) as tracker:
            self._open_trackers(tracker, state, memory)
            tracker.start(state)
            yield from simulation.training_local_tasks(state, memory, tracker)
            tracker.finish_all_runs()

    def _open_trackers(self, tracker: FoldTracker, state: State, memory: Memory) -> None:
        """Open the trackers of all runs."""
        first_replicate = 0
        for job in self.jobs:
            folded = job.waiting_run
            assert folded is not None
            replicates = slice(
                first_replicate, first_replicate := first_replicate + folded.simulation.federation.num_replicates
            )
            self._jobs_by_run[folded] = job
            self.active_runs.append(folded)
            self.call_or_end_run(folded, folded.open_tracker, tracker, replicates, state, memory)
            if not job.has_ended:
                job.resume(True)

    @property
    def end_reason(self) -> str | None:
        """Why no round is left: all runs have ended; None if some have not."""
        return None if self.active_runs else "all runs have ended"

    def excluded_replicates(self, t: int) -> list[int]:
        """Return the replicates that take no part in round t, because their run has ended or has dropped them."""
        given_up = [
            folded.replicates.start + r
            for folded in self.active_runs
            for r in folded.tracker.divergence_guard.excluded_replicates(t)
        ]
        return self._ended_replicates + given_up

    def call_or_end_run(self, folded: FoldMember, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a call; an error ends this run and no other."""
        try:
            return call(*args)
        except (Exception, Stopped) as error:
            self.end_run(folded, error)
        return None

    def end_run(self, folded: FoldMember, outcome: Result | BaseException) -> None:
        """End a run with its result or error."""
        self.active_runs.remove(folded)
        self._ended_replicates += range(folded.replicates.start, folded.replicates.stop)
        self._jobs_by_run[folded].resume(outcome)
