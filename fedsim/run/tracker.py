"""Watches a run: counts, evaluates when it is time, and passes the results on to every view."""

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

from fedsim.core.errors import PeerError, RunError, first_line
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
from fedsim.run.summary import summary
from fedsim.run.tracking import clients
from fedsim.run.tracking.metrics_csv import METRICS_FILENAME, checksum, rows_up_to_round
from fedsim.run.tracking.observer import EvaluationEvent, Observers, RunEnded, RunStarted
from fedsim.run.tracking.progress import facts_line, progress_view
from fedsim.run.tracking.result import MetricsRow, Result
from fedsim.run.tracking.tracking_options import Tracking
from fedsim.strategies import State


class Tracker:
    """One run's bookkeeping; `Simulation.run` drives it. `begin` opens the run folder.

    Args:
        run: what is run.
        folder: the run folder, or None.
        options: what is written and shown.
        checkpoints, guard: see there.
        progress: where the run stands (not zero on resuming).
        settings: named values for TensorBoard's HPARAMS table.
        config: YAML that is kept as config.yaml.
    """

    def __init__(
        self,
        run: Setup,
        folder: Path | None,
        options: Tracking,
        checkpoints: Checkpointer,
        guard: DivergenceGuard,
        progress: Progress,
        settings: dict[str, Any] | None = None,
        config: str | None = None,
    ) -> None:
        self.run, self.folder, self.options, self.config = run, folder, options, config
        self.checkpoints, self.guard, self.progress = checkpoints, guard, progress
        self.seeds, self.ranks = run.federation.seeds, run.federation.ranks
        self.settings = settings or {"strategy": type(run.strategy).__name__, "dataset": run.dataset.name}
        self.history: list[MetricsRow] = []
        self._files: RunFolder | None = None
        self._signals = StopSignals()
        self._stop_requested = False  # had this or another rank seen a signal in the last round?
        self._result: Result | None = None
        style = options.progress if self.ranks.is_first else "none"
        self._view = progress_view(style, run.rounds, progress.rounds)
        self.active, self.num_links = np.zeros(len(self.seeds)), np.zeros(len(self.seeds))
        self.num_unheard = np.zeros(len(self.seeds), dtype=np.int64)
        self._last_evaluation: EvaluationResult | None = None
        self.models: Tensor  # [R, d] that were evaluated last
        self._observers = Observers([])
        self._stop_reason: str | None = None  # why one of them ends the run
        self._metric: str | None = None  # by which the best models are kept
        self._best_models: BestModels | None = None
        self.end_reason: str | None = None  # why, where a rule ends the run before its last round
        self._seconds_before = progress.seconds
        self._samples_before = sum(progress.samples)
        self._start_time = time.monotonic()

    def __enter__(self) -> Self:
        self._view.__enter__()
        self._signals.listen()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._view.__exit__(kind, error, trace)
        try:
            with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
                self._observers.close()
            if self._files is not None:
                self._files.close(quietly=error is not None)
        finally:  # until here a signal waits
            self._signals.restore_handlers(leaving=isinstance(error, PeerError))
        if error is None or (isinstance(error, Exception) and not isinstance(error, PeerError)):
            self._stop_if_asked(error)

    def _stop_if_asked(self, error: BaseException | None) -> None:
        """A signal that no further round of this run could act on is for whoever would go on behind the run."""
        if self._signals.signal is None and not self._stop_requested:
            return
        ending = "ended" if error is None else "failed"
        message = (
            f"stopped by {self._signal_name} after the run {ending} "
            f"in round {self.progress.rounds} of {self.run.rounds}"
        )
        raise Stopped(message, self._result) from error

    @property
    def _signal_name(self) -> str:
        """Its name."""
        return "another rank" if self._signals.signal is None else signal.Signals(self._signals.signal).name

    def begin(self, state: State) -> None:
        """Open the run folder and evaluate the initial model (a resumed run has done so)."""
        self._start_time = time.monotonic()
        self.begin_with(None if self.progress.rounds else self.evaluate(state, 0))

    def begin_with(self, first: EvaluationResult | None) -> None:
        """Open the run folder, given what was measured of the initial model; None for a resumed run."""
        progress, run = self.progress, self.run
        self._metric = run.stop.selection_metric(run.column_descriptions)
        if first is not None:
            self.guard.nonfinite_replicates = {
                r for r, loss in enumerate(first.metrics["train_loss"]) if not math.isfinite(loss)
            }
        if self.folder is not None:
            columns = run.column_descriptions
            self.history = (
                rows_up_to_round(self.folder / METRICS_FILENAME, columns, progress.rounds, progress.rows, progress.crc)
                if progress.rounds
                else []
            )
        self.end_reason = self.reason_to_end() if progress.rounds else None
        if self.folder is not None:
            complete = next(self.rounds(), None) is None
            if self._metric is not None:
                self._best_models = BestModels(
                    self.folder, self._metric, is_higher_better(self._metric, columns), run.model_metadata()
                )
                if progress.rounds:
                    self._best_models.resume()
            files = RunFolder(self.folder, columns, progress, complete)
            files.prepare(
                self.config, self.settings, run.device, self.ranks.count, run.naming.constants, self.checkpoints.path
            )
            self._files, self.history = files, files.kept_rows
        if self.ranks.is_first and not (self._files is not None and self._files.finished):
            self._observers = Observers(self.options.watching)
            run_started = RunStarted(self.folder, self.seeds, run.rounds, progress.rounds, self.settings, self.config)
            self._observers.begin(run_started)
        if first is None:
            self._drop_replicates()
        else:
            self.record(first)

    def rounds(self) -> Iterator[int]:
        """The rounds that are left, until a rule ends the run."""
        while self.progress.rounds < self.run.rounds and self.end_reason is None:
            yield self.progress.rounds

    def reason_to_end(self) -> str | None:
        """What the rules say, which the first rank tells the others: it alone knows earlier rows, and has the clock."""
        stop = self.run.stop
        if not (stop.active or self.options.observers):
            return None
        history = [dict(row) for row in self.history]  # a rule of the user's might write into it
        label, is_own = f"stop={type(stop).__name__}", type(stop).__module__.startswith("fedsim.")
        try:
            arguments = (self.progress.seconds, self._metric, self.run.column_descriptions)
            reason = stop.reason(history, *arguments)
            repeated_reason = reason if is_own else stop.reason([dict(row) for row in self.history], *arguments)
        except Exception as error:
            if is_own:
                raise
            raise RunError(f"{label} raised {type(error).__name__}: {first_line(error)}") from error
        if not (reason is None or isinstance(reason, str)):
            raise RunError(f"{label}: reason must return a sentence or None, and returns {type(reason).__name__}")
        if repeated_reason != reason:
            raise RunError(f"{label}: reason says {reason!r} and then {repeated_reason!r} of the same evaluations")
        return self.ranks.broadcast_object(reason or self._stop_reason)

    @property
    def _replicates_left(self) -> list[int]:
        """The replicates that were not given up."""
        given_up = self.guard.given_up
        return [r for r in range(len(self.seeds)) if r not in given_up]

    def _evaluate_models(self, state: State, deployed: Tensor | None = None) -> EvaluationResult:
        """The models that are to be evaluated; the further ones' numbers stand beside the first's, by other names."""
        run, memory = self.run, self.checkpoints.memory
        first, *further_names = run.evaluation.models
        self.models = run.models(first, state, memory)

        def evaluate(models: Tensor) -> EvaluationResult:
            return self.guard.evaluate(
                lambda rows: run.evaluator(rows, deployed, self.progress.rounds), models, self.progress.rounds
            )

        measured = evaluate(self.models)
        for name in further_names:
            metrics = evaluate(run.models(name, state, memory)).metrics
            column_names = columns_of_other_model(name, metrics)
            measured.metrics |= {column_names[column]: values for column, values in metrics.items()}
        return measured

    def evaluate(self, state: State, completed: int, report: Report | None = None) -> EvaluationResult:
        """The run's models and, where asked for, the clients' own, after so many rounds; `report` is the last's."""
        run = self.run
        measured = self._evaluate_models(state, None if report is None else report.deployed)
        measured.metrics |= run.participation(measured, completed, report) | self.dynamic_regret(completed)
        if run.personal is not None:
            online = None if report is None else report.cohort
            metrics, measured.histograms = run.personal(state, self.checkpoints.memory, completed, online)
            measured.metrics |= metrics
        if self.options.watching:
            self.add_histograms(measured, None if report is None else update_lengths(report))
        return measured

    def dynamic_regret(self, completed: int) -> dict[str, np.ndarray]:
        """The column of the dynamic regret, to which the rounds since the last evaluation are added."""
        progress, references = self.progress, self.run.references
        if not references.has_regret:
            return {}
        excess = references.excess_risk(self.models, completed) * progress.unevaluated
        total = (np.array(progress.regret) if progress.regret else np.zeros(len(self.seeds))) + excess
        progress.regret = np.where(np.isfinite(total), total, 0.0).tolist()
        return {REGRET: total}

    def add_histograms(self, measured: EvaluationResult, lengths: np.ndarray | None) -> None:
        """What observers are shown of the clients; `lengths` [n] of their updates in the last round."""
        if measured.client_accuracy is not None:
            measured.histograms["accuracy"] = measured.client_accuracy[self._replicates_left].reshape(-1)
        for name, values in measured.client_metrics.items():
            remaining_values = values[self._replicates_left].reshape(-1)
            measured.histograms[name] = remaining_values[np.isfinite(remaining_values)]
        if lengths is not None:
            measured.histograms["length of update"] = lengths[np.isfinite(lengths)]

    def round(self, t: int, state: State, report: Report) -> None:
        """Round t is complete."""
        self.guard.update(t, state, report)
        run, progress, cohort = self.run, self.progress, report.cohort
        run.models.receive(self.checkpoints.memory, state, cohort)
        run.participation.update(t, cohort)
        progress.rounds, progress.unevaluated = t + 1, progress.unevaluated + 1
        self.keep_time()
        last, limit = t + 1 == run.rounds, run.stop.seconds
        time_over = limit is not None and self.ranks.is_first and progress.seconds >= limit
        time_over = time_over or (
            self.ranks.is_first and run.stop.is_time_over(run.pace.seconds[self._replicates_left])
        )
        decisions = np.array(
            [self._signals.signal is not None, self.checkpoint_due(t + 1, self._signals.agreed_signal), time_over]
        )
        count = cohort.host.count  # a multiset's client is linked once, however often it counts
        linked = (count > 0) * run.submodels.shares(cohort)
        counts = per_replicate(np.stack([count, linked, report.samples]), cohort.bounds)
        self.active, self.num_links, num_samples, decisions = self.ranks.all_reduce_host(*counts, decisions)
        progress.participants = [float(a + b) for a, b in zip(progress.participants, self.active, strict=True)]
        progress.links = [float(a + b) for a, b in zip(progress.links, self.num_links, strict=True)]
        self.num_unheard = run.pace.num_cut_off + run.delivery.net_delayed
        progress.unanswered = [int(a + b) for a, b in zip(progress.unanswered, self.num_unheard, strict=True)]
        if run.pace.clock.asynchronous:
            staleness_sums = per_replicate(report.rounds_late[None], cohort.bounds)[0]
            progress.staleness = (np.array(progress.staleness or 0.0) + staleness_sums).tolist()
        progress.virtual = run.pace.seconds.tolist() if run.pace.clock.active else []
        progress.samples = [int(a + b) for a, b in zip(progress.samples, num_samples, strict=True)]
        self._view.round(t + 1, float(self.active.mean()))
        stopping, checkpoint_is_due, time_over = (bool(decision) for decision in decisions)
        time_to_evaluate = last or time_over or (t + 1) % run.evaluation.every == 0
        time_to_save = last or stopping or checkpoint_is_due
        if time_to_evaluate or time_to_save or run.device.type == "cpu":
            self.guard.check()
        if time_to_evaluate:
            self.record(self.evaluate(state, t + 1, report))
            self.end_reason = None if last else self.reason_to_end()
        if time_to_save or self.end_reason is not None:
            self.save(state)
        self._stop_requested = stopping
        if stopping and not last and self.end_reason is None:
            raise Stopped(f"stopped by {self._signal_name} after round {t + 1} of {run.rounds}")

    def keep_time(self) -> None:
        """Note how many seconds the run has taken, resumed parts included."""
        self.progress.seconds = self._seconds_before + time.monotonic() - self._start_time

    def checkpoint_due(self, rounds: int, num_runs: int) -> bool:
        """Is it time for a checkpoint after this many rounds? So many runs go on together."""
        return self.checkpoints.due(rounds, num_runs)

    def save(self, state: State) -> None:
        """Write a checkpoint, and before it what it says to be there."""
        if self._files is not None:
            self._files.on_disk()
        if self._best_models is not None:
            self._best_models.write()
        self.checkpoints.write(state, self.progress)

    def record(self, measured: EvaluationResult) -> None:
        """Pass one evaluation on."""
        progress, self._last_evaluation = self.progress, measured
        self.keep_time()
        used = np.array(progress.participants)
        staleness = np.where(used > 0, np.array(progress.staleness or 0.0) / np.maximum(used, 1), np.nan)
        mean_active = np.array(progress.participants) / max(progress.unevaluated, 1)
        progress.participants, progress.staleness, progress.unevaluated = [0.0] * len(self.seeds), [], 0
        rows: list[MetricsRow] = []
        given_up = self.guard.given_up
        for r, seed in enumerate(self.seeds):
            row: MetricsRow = {"round": progress.rounds, "seed": seed}
            row |= {name: math.nan if r in given_up else float(values[r]) for name, values in measured.metrics.items()}
            row |= {"active_clients": int(self.active[r]), "mean_active_clients": float(mean_active[r])}
            num_sent, unanswered, pace = float(self.num_links[r]), progress.unanswered[r], self.run.pace
            link_counts = (
                (num_sent + int(self.num_unheard[r]), num_sent),
                (progress.links[r] + unanswered, progress.links[r]),
            )
            row |= self.run.traffic.columns(*link_counts)
            row |= {"samples": progress.samples[r], "seconds": round(progress.seconds, 3)}
            row |= {"virtual_seconds": float(pace.seconds[r]), "late_clients": int(pace.late_clients[r])}
            row["update_staleness"] = float(staleness[r])
            rows.append({name: row[name] for name in self.run.column_descriptions})
        self.history += rows
        progress.rows = None if progress.rows is None else progress.rows + len(rows)
        progress.crc = None if progress.crc is None else checksum(rows, progress.crc)
        if self._best_models is not None:
            self._best_models.update(
                progress.rounds, self.models, np.array([row[self._best_models.metric] for row in rows])
            )
        if self._files is not None:
            self._files.record(rows)
        models, naming = self.models, self.run.naming
        event = EvaluationEvent(
            progress.rounds, rows, measured.histograms, lambda r: naming.state_dict(models[r].cpu())
        )
        self._stop_reason = self._observers.evaluated(event)
        self._drop_replicates()
        self._view.evaluated(progress.rounds, facts_line(rows, self._samples_per_second()), float(self.active.mean()))

    def _drop_replicates(self) -> None:
        """Give up the replicates that an observer names; the first rank tells the others."""
        if self.options.observers:
            dropped = self.ranks.broadcast_object(self._observers.replicates_to_drop())
            for replicate, reason in dropped.items():
                self.guard.drop(replicate, self.progress.rounds, reason)

    def _samples_per_second(self) -> float | None:
        """Samples a second since the run began or went on; None before the first round."""
        elapsed = self.progress.seconds - self._seconds_before
        num_samples = sum(self.progress.samples) - self._samples_before
        return num_samples / elapsed if elapsed > 0 and self.progress.rounds else None

    def finish(self, state: State) -> Result:
        """Write what is written once, and return everything."""
        progress, run = self.progress, self.run
        folder = None if self.folder is None else str(self.folder)
        extra: dict[str, Any] = (
            {} if run.newcomers is None else {"newcomers": run.newcomers(state, self.checkpoints.memory)}
        )
        if self._best_models is not None:
            self._best_models.write()
            extra["best"] = self._best_models.summary()
        final_models = run.models("global", state, self.checkpoints.memory)
        result = Result(
            self.history,
            state,
            progress.seconds,
            sum(progress.samples),
            folder,
            extra,
            final_models,
            run.naming,
            self.end_reason,
        )
        last = self._last_evaluation or self._evaluate_models(state)
        if self._files is not None:
            accuracy = None if last.client_accuracy is None else last.client_accuracy[self._replicates_left]
            metrics = {name: values[self._replicates_left] for name, values in last.client_metrics.items()}
            held_out = None if last.held_out is None else last.held_out[self._replicates_left]
            client_table = clients.gather_clients(
                run.federation, run.availability, progress.rounds, bool(run.tables), accuracy,
                run.evaluator.everyone, metrics, run.dataset.label_names, held_out,
            )  # fmt: skip
            self._files.write_clients(client_table)
        run_summary = summary(run, result, progress)
        self._observers.finish(
            RunEnded(progress.rounds, run_summary, self._files.pictures if self._files else lambda: iter(()))
        )
        if self._files is not None:
            self._files.finish(run_summary)
        self._result = result
        return result


def update_lengths(report: Report) -> np.ndarray:
    """[n] lengths of the updates of a round's clients, those of all ranks."""
    return report.cohort.all_gather_host(report.innovation.norm(dim=1).cpu().numpy())[0]


def per_replicate(values: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
    """Sums of [k, n] host values over the rows of each replicate, [k, R]."""
    running = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(values, axis=1, out=running[:, 1:])
    edges = running[:, list(bounds)]
    sums: np.ndarray = edges[:, 1:] - edges[:, :-1]
    return sums
