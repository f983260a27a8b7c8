"""Watches a run: counts, evaluates when it is time, and passes the results on to every view."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsim.checkpoint import Checkpointer, Progress
from fedsim.divergence import DivergenceGuard
from fedsim.errors import ConfigError, PeerError
from fedsim.evaluation import COLUMNS, Evaluation
from fedsim.personal import PERSONAL_COLUMNS
from fedsim.replacing import replacing, written
from fedsim.strategies import State
from fedsim.tracking import clients
from fedsim.tracking.environment import environment
from fedsim.tracking.metrics_csv import NAME as METRICS
from fedsim.tracking.metrics_csv import MetricsCSV, kept_rows
from fedsim.tracking.options import Tracking
from fedsim.tracking.progress import progress_view
from fedsim.tracking.result import Result, Row, mean_std
from fedsim.tracking.tensorboard import TensorBoard
from fedsim.trainer import Report

if TYPE_CHECKING:
    from fedsim.simulation import Simulation

log = logging.getLogger(__name__)

SUMMARY = "summary.json"  # a run writes it last


class Stopped(KeyboardInterrupt):
    """The run ended after a round because it was asked to (Ctrl-C, SIGTERM); a checkpoint was written."""


class Tracker:
    """One run's bookkeeping; `Simulation.run` drives it.

    Args:
        simulation: what is run.
        folder: the run folder, or None.
        options: what is written and shown.
        checkpoints, guard: see there.
        progress: where the run stands (not zero on resuming).
        settings: named values for TensorBoard's HPARAMS table.
        config: YAML that is kept as config.yaml.
    """

    def __init__(
        self,
        simulation: Simulation,
        folder: Path | None,
        options: Tracking,
        checkpoints: Checkpointer,
        guard: DivergenceGuard,
        progress: Progress,
        settings: dict[str, Any] | None = None,
        config: str | None = None,
    ) -> None:
        self.simulation, self.folder, self.options, self.config = simulation, folder, options, config
        self.checkpoints, self.guard, self.progress = checkpoints, guard, progress
        self.seeds, self.ranks = simulation.federation.seeds, simulation.federation.ranks
        self.history: list[Row] = []
        self.settings = settings or {
            "strategy": type(simulation.strategy).__name__,
            "dataset": simulation.dataset.name,
        }
        self._csv: MetricsCSV | None = None
        self._tensorboard: TensorBoard | None = None
        self._active = np.zeros(len(self.seeds))
        self._last: Evaluation | None = None
        if not progress.rounds:
            progress.samples, progress.heard = [0] * len(self.seeds), [0.0] * len(self.seeds)
        self._before = progress.seconds
        self._samples_before = sum(progress.samples)
        self._stop_signal: int | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Tracker:
        style = self.options.progress if self.ranks.first else "none"
        self._view = progress_view(style, self.simulation.rounds, self.progress.rounds)
        self._view.__enter__()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._ask_to_stop)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._view.__exit__(kind, error, trace)
        try:
            for sink in (self._csv, self._tensorboard):
                if sink is not None:
                    with contextlib.nullcontext() if error is None else contextlib.suppress(OSError):
                        sink.close()
        finally:  # until here a signal waits
            leaving = isinstance(error, PeerError)  # what launched the ranks ends them now: first, they say why
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_IGN if leaving and number == signal.SIGTERM else handler)

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        if self._stop_signal is not None:  # asked twice: at once
            raise KeyboardInterrupt
        self._stop_signal = number

    def begin(self, state: State) -> None:
        """Open the run folder and evaluate the initial model (a resumed run has done so)."""
        self._start = time.monotonic()
        first = None if self.progress.rounds else self._evaluate(state, 0)
        if self.folder is not None:
            self._open(self.folder)
        if first is not None:
            self._record(first)

    def _open(self, folder: Path) -> None:
        resumed = self.progress.rounds > 0
        columns = {name: (COLUMNS | PERSONAL_COLUMNS)[name] for name in self._columns()}
        purge = self.progress.rounds + 1 if resumed else 0
        keep = self.progress.rounds if resumed else -1
        kept_rows(folder / METRICS, columns, keep)  # what cannot be kept is refused before anything is written
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "environment.json", environment(self.simulation.device, self.ranks.count))
            if not self._complete:  # what an older run, or one of fewer rounds, wrote in the end; it goes before the
                for name in (clients.NAME, SUMMARY):  # configuration, since both together say: this was run to its end
                    (folder / name).unlink(missing_ok=True)
            if self.config is not None:
                with replacing(folder / "config.yaml") as file:
                    file.write(self.config)
            if not resumed and self.checkpoints.path is not None:  # of an older run that this one replaces;
                self.checkpoints.path.unlink(missing_ok=True)  # it goes before its metrics do
            self._csv = MetricsCSV(folder / METRICS, columns, keep)
            if self.options.tensorboard and not (self._complete and (folder / SUMMARY).exists()):
                with written(folder / "event files"):
                    self._tensorboard = TensorBoard(folder, self.seeds, purge)
        except OSError as error:
            raise ConfigError(f"out={folder}: {error}; choose another folder") from error
        self.history = list(self._csv.kept)

    @property
    def _going(self) -> list[int]:
        """The replicates that were not given up."""
        return [r for r in range(len(self.seeds)) if r not in self.guard.lost]

    @property
    def _complete(self) -> bool:
        """Is there no round left?"""
        return self.progress.rounds == self.simulation.rounds

    def _columns(self) -> list[str]:
        """Columns of this run, in the order of COLUMNS."""
        data, shifted = self.simulation.dataset, self.simulation.shift.active
        absent = set()
        if data.test_x is None:
            absent |= {"test_loss", "test_accuracy"}
        if not self.simulation.evaluator.labelled:
            absent |= {"test_accuracy", "train_accuracy", "client_accuracy_worst10"}
        if data.optimum is None or shifted:
            absent |= {"distance_to_optimum"}
        if not shifted:
            absent |= {"performative_loss", "performative_risk", "decoupled_loss"}
        absent |= {"distance_to_ps", "distance_to_po"} - self.simulation.evaluator.references.keys()
        personal = self.simulation.personal
        return [name for name in COLUMNS if name not in absent] + (personal.columns if personal else [])

    def _evaluated_model(self, state: State) -> Any:
        simulation = self.simulation
        if simulation.evaluate == "client_mean":
            return simulation.strategy.client_mean(state, simulation.federation)
        return state.model

    def _evaluate(self, state: State, completed: int, report: Report | None = None) -> Evaluation:
        """The server's model and, where asked for, the clients' own, after so many rounds; `report` is the last's."""
        simulation = self.simulation
        found = simulation.evaluator(self._evaluated_model(state), None if report is None else report.deployed)
        if simulation.personal is not None:
            online = None if report is None else report.cohort
            metrics, found.histograms = simulation.personal(state, self.checkpoints.memory, completed, online)
            found.metrics |= metrics
        if self.options.tensorboard:
            if found.client_accuracy is not None:
                found.histograms["accuracy"] = found.client_accuracy[self._going].reshape(-1)
            if report is not None:
                lengths = report.cohort.united(report.innovation.norm(dim=1).cpu().numpy())[0]
                found.histograms["length of update"] = lengths[np.isfinite(lengths)]
        return found

    def round(self, t: int, state: State, report: Report) -> None:
        """Round t is complete."""
        self.guard.see(t, state, report)
        progress, cohort = self.progress, report.cohort
        progress.rounds, progress.unevaluated = t + 1, progress.unevaluated + 1
        progress.seconds = self._before + time.monotonic() - self._start
        last = t + 1 == self.simulation.rounds
        wishes = np.array([self._stop_signal is not None, self.checkpoints.due(t + 1)])
        active, worked = (per_replicate(values, cohort.bounds) for values in (cohort.host_count, report.samples))
        self._active, worked, wishes = self.ranks.totals(active, worked, wishes)
        progress.heard = [float(a + b) for a, b in zip(progress.heard, self._active, strict=True)]
        progress.samples = [int(a + b) for a, b in zip(progress.samples, worked, strict=True)]
        self._view.round(t + 1, float(self._active.mean()))
        simulation = self.simulation
        time_to_evaluate = last or (t + 1) % simulation.eval_every == 0
        stopping, due = (bool(wish) for wish in wishes)
        time_to_save = last or stopping or due
        if time_to_evaluate or time_to_save or simulation.device.type == "cpu":
            self.guard.check()
        if time_to_evaluate:
            self._record(self._evaluate(state, t + 1, report))
        if time_to_save:
            if self._csv is not None:
                self._csv.on_disk()
            self.checkpoints.write(state, progress)
        if stopping and not last:
            name = "another rank" if self._stop_signal is None else signal.Signals(self._stop_signal).name
            raise Stopped(f"stopped by {name} after round {t + 1} of {simulation.rounds}")

    def _record(self, evaluation: Evaluation) -> None:
        """Pass one evaluation on."""
        progress, self._last = self.progress, evaluation
        progress.seconds = self._before + time.monotonic() - self._start
        mean_active = np.array(progress.heard) / max(progress.unevaluated, 1)
        progress.heard, progress.unevaluated = [0.0] * len(self.seeds), 0
        rows: list[Row] = []
        for r, seed in enumerate(self.seeds):
            row: Row = {"round": progress.rounds, "seed": seed}
            given_up = r in self.guard.lost
            row |= {name: math.nan if given_up else float(values[r]) for name, values in evaluation.metrics.items()}
            row |= {"active_clients": int(self._active[r]), "mean_active_clients": float(mean_active[r])}
            row |= {"samples": progress.samples[r], "seconds": round(progress.seconds, 3)}
            rows.append({name: row[name] for name in self._columns()})
        self.history += rows
        if self._csv is not None:
            self._csv.append(rows)
        if self._tensorboard is not None and self.folder is not None:
            with written(self.folder / "event files"):
                self._tensorboard.write(progress.rounds, rows, evaluation.histograms)
        self._view.evaluated(progress.rounds, self._facts(rows), float(self._active.mean()))

    def _facts(self, rows: list[Row]) -> str:
        """The line a person reads."""
        facts = []
        for name, label, scale, form in (
            ("train_loss", "loss", 1, ".3g"),
            ("test_accuracy", "accuracy", 100, ".1f"),
            ("distance_to_optimum", "distance", 1, ".3g"),
            ("distance_to_ps", "to PS", 1, ".3g"),
            ("distance_to_po", "to PO", 1, ".3g"),
        ):
            if name in rows[0]:
                mean, std = mean_std([row[name] * scale for row in rows])
                spread = f" ± {std:.2g}" if len(rows) > 1 else ""
                facts.append(f"{label} {mean:{form}}{spread}" + (" %" if scale == 100 else ""))
        elapsed = self.progress.seconds - self._before
        if elapsed > 0 and self.progress.rounds:
            facts.append(f"{short((sum(self.progress.samples) - self._samples_before) / elapsed)} samples/s")
        return "  ".join(facts)

    def finish(self, state: State) -> Result:
        """Write what is written once, and return everything."""
        progress = self.progress
        folder = None if self.folder is None else str(self.folder)
        newcomers = self.simulation.newcomers
        extra = {} if newcomers is None else {"newcomers": newcomers(state)}
        result = Result(self.history, state, progress.seconds, sum(progress.samples), folder, extra)
        last = self._last or self.simulation.evaluator(self._evaluated_model(state))
        if self.folder is not None:
            accuracy = None if last.client_accuracy is None else last.client_accuracy[self._going]
            clients.write(self.folder / clients.NAME, clients.gather(self.simulation, accuracy))
            if self._tensorboard is not None:
                with written(self.folder / "event files"):
                    self._draw(self._tensorboard, self.folder)
                    self._tensorboard.hparams(self.settings)
                    self._tensorboard.flush()
            write_json(self.folder / SUMMARY, self._summary(result))
        return result

    def _draw(self, view: TensorBoard, folder: Path) -> None:
        """The pictures of `fedsim-plot`, of this run alone."""
        from fedsim.plots.compare import pictures
        from fedsim.plots.runs import load

        for picture in pictures([load(folder)]):
            view.figure(f"figures/{picture.heading}", picture.figure, self.progress.rounds)

    def _summary(self, result: Result) -> dict[str, Any]:
        last = [row for row in result.history if row["round"] == result.history[-1]["round"]]
        return {
            "rounds": self.progress.rounds,
            "seeds": list(self.seeds),
            "final": {name: {"mean": mean, "std": std} for name, (mean, std) in result.final.items()},
            "per_replicate": [{"seed": row["seed"]} | {name: row[name] for name in result.metrics} for row in last],
            "dropped": self.guard.dropped,
            "seconds": round(result.seconds, 3),
            "samples": result.samples,
            "samples_per_second": round(result.samples / max(result.seconds, 1e-9), 1),
            "parameters": self.simulation.model.dimension,
            "executor": self.simulation.trainer.choice.executor,
            "chunk": self.simulation.trainer.choice.chunk,
        } | result.extra


def per_replicate(values: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
    """Sums of [n] host values over the rows of each replicate, [R]."""
    running = np.concatenate([[0], np.cumsum(values)])
    return running[list(bounds[1:])] - running[list(bounds[:-1])]


def short(number: float) -> str:
    """A large number as people say it: 154k."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON so that the file is whole at every moment; NaN, which JSON does not know, is null."""
    with replacing(path) as file:
        file.write(json.dumps(without_nan(content), indent=2) + "\n")


def without_nan(content: Any) -> Any:
    """The same with None in the place of NaN."""
    if isinstance(content, dict):
        return {name: without_nan(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [without_nan(value) for value in content]
    return None if isinstance(content, float) and math.isnan(content) else content
