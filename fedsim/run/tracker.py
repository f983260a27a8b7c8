"""Tracks a run: counts rounds and samples, evaluates the models, and passes the results to files, progress and
observers."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import Self

from fedsim.core.errors import PeerError, RunError, first_message_line
from fedsim.core.report import Report
from fedsim.evaluation import EvaluationResult
from fedsim.evaluation.columns import columns_of_other_model, is_higher_better
from fedsim.evaluation.registry import REGRET
from fedsim.run.best import BestModels
from fedsim.run.checkpoint import Checkpointer
from fedsim.run.divergence import DivergenceGuard
from fedsim.run.folder import RunFolder
from fedsim.run.progress import Progress
from fedsim.run.setup import Setup
from fedsim.run.stopping import Stopped, StopSignals
from fedsim.run.summary import summarise_run
from fedsim.run.tracking import clients
from fedsim.run.tracking.metrics_csv import METRICS_FILENAME, metrics_checksum, rows_up_to_round
from fedsim.run.tracking.observer import EvaluationEvent, Observers, RunEnded, RunStarted
from fedsim.run.tracking.progress import evaluation_line, progress_view
from fedsim.run.tracking.result import MetricsRow, Result
from fedsim.run.tracking.run_config import RunConfig
from fedsim.run.tracking.tracking_options import Tracking
from fedsim.strategies import State


class Tracker:
    """The bookkeeping of one run, driven by `Simulation.run`. `start` opens the run folder.

    Args:
        simulation: what is run.
        folder: the run folder, or None.
        tracking_options: what is written and shown.
        checkpoints, divergence_guard: see there.
        progress: where the run stands (not zero on resuming).
        config: what is written down about the configuration.
    """

    def __init__(
        self,
        simulation: Setup,
        folder: Path | None,
        tracking_options: Tracking,
        checkpoints: Checkpointer,
        divergence_guard: DivergenceGuard,
        progress: Progress,
        config: RunConfig | None = None,
    ) -> None:
        self.simulation, self.folder, self.options = simulation, folder, tracking_options
        self.config = config or RunConfig()
        self.checkpoints, self.divergence_guard, self.progress = checkpoints, divergence_guard, progress
        self.seeds, self.ranks = simulation.federation.seeds, simulation.federation.ranks
        named_parts = {"strategy": type(simulation.strategy).__name__, "dataset": simulation.dataset.name}
        self.settings = dict(self.config.settings) or named_parts
        self.history: list[MetricsRow] = []
        self._run_folder: RunFolder | None = None
        self._signals = StopSignals()
        self._stop_requested = False  # had this or another rank seen a signal in the last round?
        self._result: Result | None = None
        style = tracking_options.progress if self.ranks.is_main_rank else "none"
        self._progress_view = progress_view(style, simulation.rounds, progress.rounds)
        self.num_active, self.num_links = np.zeros(len(self.seeds)), np.zeros(len(self.seeds))
        self.num_unanswered = np.zeros(len(self.seeds), dtype=np.int64)
        self._last_evaluation: EvaluationResult | None = None
        self.models: Tensor  # [R, d] models of the last evaluation
        self._observers = Observers([])
        self._stop_reason: str | None = None  # why one of them ends the run
        self._selection_metric: str | None = None  # the metric by which the best models are chosen
        self._best_models: BestModels | None = None
        self.end_reason: str | None = None  # the reason, if a rule ends the run before its last round
        self._seconds_before = progress.seconds
        self._samples_before = sum(progress.samples)
        self._start_time = time.monotonic()

    def __enter__(self) -> Self:
        self._progress_view.__enter__()
        self._signals.install_handlers()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress_view.__exit__(kind, error, trace)
        try:
            with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
                self._observers.close()
            if self._run_folder is not None:
                self._run_folder.close(ignore_errors=error is not None)
        finally:  # a signal is held back until here
            self._signals.restore_handlers(ignore_sigterm=isinstance(error, PeerError))
        if error is None or (isinstance(error, Exception) and not isinstance(error, PeerError)):
            self._raise_pending_stop(error)

    def _raise_pending_stop(self, error: BaseException | None) -> None:
        """Raise `Stopped` for a signal on which this run could not act any more, so that a sweep does not start the
        next run."""
        if self._signals.received_signal_number is None and not self._stop_requested:
            return
        end_verb = "ended" if error is None else "failed"
        message = (
            f"stopped by {self._signal_name} after the run {end_verb} "
            f"in round {self.progress.rounds} of {self.simulation.rounds}"
        )
        raise Stopped(message, self._result) from error

    @property
    def _signal_name(self) -> str:
        """The name of the received signal."""
        return (
            "another rank"
            if self._signals.received_signal_number is None
            else signal.Signals(self._signals.received_signal_number).name
        )

    def start(self, state: State) -> None:
        """Open the run folder and evaluate the initial model (a resumed run has done so)."""
        self._start_time = time.monotonic()
        self.start_from_evaluation(None if self.progress.rounds else self.evaluate(state, 0))

    def start_from_evaluation(self, initial_result: EvaluationResult | None) -> None:
        """Open the run folder, given the evaluation of the initial model; None for a resumed run."""
        progress, simulation = self.progress, self.simulation
        self._selection_metric = simulation.stop.selection_metric(simulation.column_descriptions)
        if initial_result is not None:
            self.divergence_guard.nonfinite_replicates = {
                r for r, loss in enumerate(initial_result.metrics["train_loss"]) if not math.isfinite(loss)
            }
        if self.folder is not None:
            column_descriptions = simulation.column_descriptions
            self.history = (
                rows_up_to_round(
                    self.folder / METRICS_FILENAME, column_descriptions, progress.rounds, progress.rows, progress.crc
                )
                if progress.rounds
                else []
            )
        self.end_reason = self.reason_to_end() if progress.rounds else None
        if self.folder is not None:
            has_no_rounds = next(self.iterate_rounds(), None) is None
            if self._selection_metric is not None:
                self._best_models = BestModels(
                    self.folder,
                    self._selection_metric,
                    is_higher_better(self._selection_metric, column_descriptions),
                    simulation.model_metadata(),
                )
                if progress.rounds:
                    self._best_models.resume()
            files = RunFolder(self.folder, column_descriptions, progress, has_no_rounds)
            files.prepare(
                self.config.yaml,
                self.settings,
                simulation.device,
                self.ranks.num_ranks,
                simulation.parameter_naming.constants,
                self.checkpoints.path,
            )
            self._run_folder, self.history = files, files.kept_rows
        if self.ranks.is_main_rank and not (self._run_folder is not None and self._run_folder.is_finished):
            self._observers = Observers(self.options.all_observers)
            run_started = RunStarted(
                self.folder, self.seeds, simulation.rounds, progress.rounds, self.settings, self.config.yaml
            )
            self._observers.begin(run_started)
        if initial_result is None:
            self._drop_replicates()
        else:
            self.record_evaluation(initial_result)

    def iterate_rounds(self) -> Iterator[int]:
        """Yield the remaining rounds until a criterion ends the run."""
        while self.progress.rounds < self.simulation.rounds and self.end_reason is None:
            yield self.progress.rounds

    def reason_to_end(self) -> str | None:
        """Return why the run ends here, or None. The first rank decides, since it alone has earlier rows and the
        clock."""
        stop = self.simulation.stop
        if not (stop.active or self.options.observers):
            return None
        history = [dict(row) for row in self.history]  # a user's rule might modify it
        stop_label, is_own = f"stop={type(stop).__name__}", type(stop).__module__.startswith("fedsim.")
        try:
            arguments = (self.progress.seconds, self._selection_metric, self.simulation.column_descriptions)
            stop_reason = stop.stop_reason(history, *arguments)
            repeated_reason = (
                stop_reason if is_own else stop.stop_reason([dict(row) for row in self.history], *arguments)
            )
        except Exception as error:
            if is_own:
                raise
            raise RunError(f"{stop_label} raised {type(error).__name__}: {first_message_line(error)}") from error
        if not (stop_reason is None or isinstance(stop_reason, str)):
            raise RunError(
                f"{stop_label}: reason must return a sentence or None, and returns {type(stop_reason).__name__}"
            )
        if repeated_reason != stop_reason:
            raise RunError(
                f"{stop_label}: reason says {stop_reason!r} and then {repeated_reason!r} of the same evaluations"
            )
        return self.ranks.broadcast_object(stop_reason or self._stop_reason)

    @property
    def _active_replicates(self) -> list[int]:
        """The replicates that were not dropped."""
        given_up = self.divergence_guard.round_by_dropped_replicate
        return [r for r in range(len(self.seeds)) if r not in given_up]

    def _evaluate_models(self, state: State, deployed: Tensor | None = None) -> EvaluationResult:
        """Evaluate the models that are asked for; metrics of the further models are added under names of their own."""
        simulation, memory = self.simulation, self.checkpoints.memory
        first_name, *further_names = simulation.evaluation.models
        self.models = simulation.evaluated_models(first_name, state, memory)

        def evaluate(models: Tensor) -> EvaluationResult:
            return self.divergence_guard.evaluate(
                lambda rows: simulation.evaluator(rows, deployed, self.progress.rounds), models, self.progress.rounds
            )

        evaluation_result = evaluate(self.models)
        for name in further_names:
            metrics = evaluate(simulation.evaluated_models(name, state, memory)).metrics
            column_names = columns_of_other_model(name, metrics)
            evaluation_result.metrics |= {column_names[column]: values for column, values in metrics.items()}
        return evaluation_result

    def evaluate(self, state: State, completed_rounds: int, report: Report | None = None) -> EvaluationResult:
        """Evaluate the run's models and, if asked for, the clients' own, after so many rounds; `report` is that of the
        last one."""
        simulation = self.simulation
        evaluation_result = self._evaluate_models(state, None if report is None else report.deployed)
        evaluation_result.metrics |= simulation.participation(
            evaluation_result, completed_rounds, report
        ) | self.dynamic_regret(completed_rounds)
        if simulation.personal is not None:
            online = None if report is None else report.cohort
            metrics, evaluation_result.histograms = simulation.personal(
                state, self.checkpoints.memory, completed_rounds, online
            )
            evaluation_result.metrics |= metrics
        if self.options.all_observers:
            self.add_histograms(evaluation_result, None if report is None else update_norms(report))
        return evaluation_result

    def dynamic_regret(self, completed_rounds: int) -> dict[str, np.ndarray]:
        """Return the column of the dynamic regret, after adding the rounds since the last evaluation."""
        progress, references = self.progress, self.simulation.references
        if not references.has_regret:
            return {}
        excess_risk = references.excess_risk(self.models, completed_rounds) * progress.unevaluated
        total = (np.array(progress.regret) if progress.regret else np.zeros(len(self.seeds))) + excess_risk
        progress.regret = np.where(np.isfinite(total), total, 0.0).tolist()
        return {REGRET: total}

    def add_histograms(self, evaluation_result: EvaluationResult, row_counts: np.ndarray | None) -> None:
        """Add the histograms of clients for observers; `row_counts` [n] are the norms of their updates in the last
        round."""
        if evaluation_result.client_accuracy is not None:
            evaluation_result.histograms["accuracy"] = evaluation_result.client_accuracy[
                self._active_replicates
            ].reshape(-1)
        for name, values in evaluation_result.client_metrics.items():
            remaining_values = values[self._active_replicates].reshape(-1)
            evaluation_result.histograms[name] = remaining_values[np.isfinite(remaining_values)]
        if row_counts is not None:
            evaluation_result.histograms["length of update"] = row_counts[np.isfinite(row_counts)]

    def record_round(self, t: int, state: State, report: Report) -> None:
        """Record that round t is complete: count, evaluate and write a checkpoint if they are due."""
        self.divergence_guard.record_nonfinite(t, state, report)
        simulation, progress, cohort = self.simulation, self.progress, report.cohort
        simulation.evaluated_models.record_received_models(self.checkpoints.memory, state, cohort)
        simulation.participation.update(t, cohort)
        progress.rounds, progress.unevaluated = t + 1, progress.unevaluated + 1
        self.update_elapsed_time()
        is_last_round, limit = t + 1 == simulation.rounds, simulation.stop.seconds
        time_over = limit is not None and self.ranks.is_main_rank and progress.seconds >= limit
        time_over = time_over or (
            self.ranks.is_main_rank
            and simulation.stop.is_time_over(simulation.round_clock.seconds[self._active_replicates])
        )
        replicate_decisions = np.array(
            [
                self._signals.received_signal_number is not None,
                self.checkpoint_due(t + 1, self._signals.num_running_runs),
                time_over,
            ]
        )
        count = cohort.host_index.multiplicity  # a client that is selected several times is linked only once
        linked = (count > 0) * simulation.submodels.held_fractions(cohort)
        counts = per_replicate(np.stack([count, linked, report.samples]), cohort.replicate_bounds)
        self.num_active, self.num_links, num_samples, replicate_decisions = self.ranks.all_reduce_host(
            *counts, replicate_decisions
        )
        progress.participants = [float(a + b) for a, b in zip(progress.participants, self.num_active, strict=True)]
        progress.links = [float(a + b) for a, b in zip(progress.links, self.num_links, strict=True)]
        self.num_unanswered = simulation.round_clock.num_dropped_late + simulation.delayed_updates.net_delayed
        progress.unanswered = [int(a + b) for a, b in zip(progress.unanswered, self.num_unanswered, strict=True)]
        if simulation.round_clock.clock.asynchronous:
            staleness_sums = per_replicate(report.rounds_late[None], cohort.replicate_bounds)[0]
            progress.staleness = (np.array(progress.staleness or 0.0) + staleness_sums).tolist()
        progress.virtual = simulation.round_clock.seconds.tolist() if simulation.round_clock.clock.active else []
        progress.joules = (
            simulation.round_clock.joules.tolist() if simulation.round_clock.clock.knows_energy_needs else []
        )
        progress.samples = [int(a + b) for a, b in zip(progress.samples, num_samples, strict=True)]
        self._progress_view.round(t + 1, float(self.num_active.mean()))
        self.notify_round_completed(t + 1)
        is_stopping, checkpoint_is_due, time_over = (bool(decision) for decision in replicate_decisions)
        time_to_evaluate = is_last_round or time_over or (t + 1) % simulation.evaluation.every == 0
        time_to_save = is_last_round or is_stopping or checkpoint_is_due
        if time_to_evaluate or time_to_save or simulation.device.type == "cpu":
            self.divergence_guard.handle_nonfinite()
        if time_to_evaluate:
            self.record_evaluation(self.evaluate(state, t + 1, report))
            self.end_reason = None if is_last_round else self.reason_to_end()
        if time_to_save or self.end_reason is not None:
            self.save_checkpoint(state)
        self._stop_requested = is_stopping
        if is_stopping and not is_last_round and self.end_reason is None:
            raise Stopped(f"stopped by {self._signal_name} after round {t + 1} of {simulation.rounds}")

    def notify_round_completed(self, completed_rounds: int) -> None:
        """Tell the observers that watch rounds."""
        if self._observers.observes_rounds:
            self._observers.round_completed(completed_rounds)

    def update_elapsed_time(self) -> None:
        """Update the number of seconds that the run has taken, resumed parts included."""
        self.progress.seconds = self._seconds_before + time.monotonic() - self._start_time

    def checkpoint_due(self, rounds: int, num_runs: int) -> bool:
        """Return whether a checkpoint is due after this many rounds, if so many runs advance together."""
        return self.checkpoints.is_due(rounds, num_runs)

    def save_checkpoint(self, state: State) -> None:
        """Write a checkpoint; before it, everything that it refers to."""
        if self._run_folder is not None:
            self._run_folder.flush_to_disk()
        if self._best_models is not None:
            self._best_models.write()
        self.checkpoints.write(state, self.progress)

    def record_evaluation(self, evaluation_result: EvaluationResult) -> None:
        """Write the rows of an evaluation and pass them to the observers."""
        progress, self._last_evaluation = self.progress, evaluation_result
        self.update_elapsed_time()
        participants = np.array(progress.participants)
        staleness = np.where(
            participants > 0, np.array(progress.staleness or 0.0) / np.maximum(participants, 1), np.nan
        )
        mean_active = np.array(progress.participants) / max(progress.unevaluated, 1)
        progress.participants, progress.staleness, progress.unevaluated = [0.0] * len(self.seeds), [], 0
        rows: list[MetricsRow] = []
        given_up = self.divergence_guard.round_by_dropped_replicate
        for r, seed in enumerate(self.seeds):
            row: MetricsRow = {"round": progress.rounds, "seed": seed}
            row |= {
                name: math.nan if r in given_up else float(values[r])
                for name, values in evaluation_result.metrics.items()
            }
            row |= {"active_clients": int(self.num_active[r]), "mean_active_clients": float(mean_active[r])}
            num_sent, num_unanswered, round_clock = (
                float(self.num_links[r]),
                progress.unanswered[r],
                self.simulation.round_clock,
            )
            link_counts = (
                (num_sent + int(self.num_unanswered[r]), num_sent),
                (progress.links[r] + num_unanswered, progress.links[r]),
            )
            row |= self.simulation.traffic.columns(*link_counts)
            row |= {"samples": progress.samples[r], "seconds": round(progress.seconds, 3)}
            row |= {"virtual_seconds": float(round_clock.seconds[r]), "late_clients": int(round_clock.late_clients[r])}
            row["joules"] = float(round_clock.joules[r])
            row["update_staleness"] = float(staleness[r])
            rows.append({name: row[name] for name in self.simulation.column_descriptions})
        self.history += rows
        progress.rows = None if progress.rows is None else progress.rows + len(rows)
        progress.crc = None if progress.crc is None else metrics_checksum(rows, progress.crc)
        if self._best_models is not None:
            self._best_models.update(
                progress.rounds, self.models, np.array([row[self._best_models.metric] for row in rows])
            )
        if self._run_folder is not None:
            self._run_folder.record(rows)
        models, naming = self.models, self.simulation.parameter_naming
        event = EvaluationEvent(
            progress.rounds, rows, evaluation_result.histograms, lambda r: naming.state_dict(models[r].cpu())
        )
        self._stop_reason = self._observers.evaluated(event)
        self._drop_replicates()
        self._progress_view.evaluated(
            progress.rounds, evaluation_line(rows, self._samples_per_second()), float(self.num_active.mean())
        )

    def _drop_replicates(self) -> None:
        """Drop the replicates that an observer names; the first rank tells the others."""
        if self.options.observers:
            dropped_reasons = self.ranks.broadcast_object(self._observers.drop_reason_by_replicate())
            for replicate, reason in dropped_reasons.items():
                self.divergence_guard.drop_replicate(replicate, self.progress.rounds, reason)

    def _samples_per_second(self) -> float | None:
        """Samples per second since the run began or was resumed; None before the first round."""
        elapsed = self.progress.seconds - self._seconds_before
        num_samples = sum(self.progress.samples) - self._samples_before
        return num_samples / elapsed if elapsed > 0 and self.progress.rounds else None

    def finish(self, state: State) -> Result:
        """Write the files of the run's end, and return its result."""
        progress, simulation = self.progress, self.simulation
        folder = None if self.folder is None else str(self.folder)
        extra_results: dict[str, Any] = (
            {} if simulation.newcomers is None else {"newcomers": simulation.newcomers(state, self.checkpoints.memory)}
        )
        if self._best_models is not None:
            self._best_models.write()
            extra_results["best"] = self._best_models.summary()
        final_models = simulation.evaluated_models("global", state, self.checkpoints.memory)
        result = Result(
            self.history,
            state,
            progress.seconds,
            sum(progress.samples),
            folder,
            extra_results,
            final_models,
            simulation.parameter_naming,
            self.end_reason,
        )
        last_result = self._last_evaluation or self._evaluate_models(state)
        if self._run_folder is not None:
            accuracy = (
                None if last_result.client_accuracy is None else last_result.client_accuracy[self._active_replicates]
            )
            metrics = {name: values[self._active_replicates] for name, values in last_result.client_metrics.items()}
            held_out = None if last_result.held_out is None else last_result.held_out[self._active_replicates]
            client_table = clients.gather_client_statistics(
                simulation.federation, simulation.availability, progress.rounds, bool(simulation.partition_tables),
                accuracy, simulation.evaluator.evaluated_clients, metrics, simulation.dataset.label_names, held_out,
            )  # fmt: skip
            self._run_folder.write_clients_npz(client_table)
        run_summary = summarise_run(simulation, result, progress)
        self._observers.finish(
            RunEnded(progress.rounds, run_summary, self._run_folder.pictures if self._run_folder else lambda: iter(()))
        )
        if self._run_folder is not None:
            self._run_folder.finish(run_summary)
        self._result = result
        return result


def update_norms(report: Report) -> np.ndarray:
    """Return the norms of the updates of a round's clients [n], those of all ranks."""
    return report.cohort.all_gather_host(report.innovation.norm(dim=1).cpu().numpy())[0]


def per_replicate(values: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
    """Sums of [k, n] host values over the rows of each replicate, [k, R]."""
    running = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(values, axis=1, out=running[:, 1:])
    edges = running[:, list(bounds)]
    sums: np.ndarray = edges[:, 1:] - edges[:, :-1]
    return sums
