"""The files of a run: opened before its first round, appended to at every evaluation, completed at its end."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.core.files import replacing, write_json, written
from fedsim.results.files import BEST, CONFIG, CONSTANTS, ENVIRONMENT, SUMMARY
from fedsim.run.checkpoint import Checkpointer
from fedsim.tracking import clients
from fedsim.tracking.clients import Clients
from fedsim.tracking.environment import environment
from fedsim.tracking.metrics_csv import NAME as METRICS
from fedsim.tracking.metrics_csv import MetricsCSV, kept_rows
from fedsim.tracking.result import Row
from fedsim.tracking.tensorboard import TensorBoard


class RunFolder:
    """What a run writes, but for its checkpoints.

    Args:
        path: of the folder, which is made.
        columns: of metrics.csv, name → what it is.
        completed: rounds that were run before, where the run goes on with them; 0: it starts afresh.
        complete: whether no round is left.
        tensorboard: whether event files are written.
        config: YAML that is kept as config.yaml, or None.
        seeds: of the replicates.
        device, ranks: for environment.json.
        checkpoints: of the run: an older run's is removed.
        constants: entries of the model that no client changes.
        settings: named values, for tables of runs.

    Attributes:
        kept: rows of metrics.csv from before.

    Raises:
        CheckpointError: the folder's metrics.csv is not this run's; nothing was written.
        ConfigError: the folder cannot be written.
    """

    def __init__(
        self,
        path: Path,
        columns: dict[str, str],
        completed: int,
        complete: bool,
        tensorboard: bool,
        config: str | None,
        seeds: tuple[int, ...],
        device: torch.device,
        ranks: int,
        checkpoints: Checkpointer,
        constants: dict[str, Tensor],
        settings: dict[str, Any],
    ) -> None:
        self.path, self._settings, resumed = path, settings, completed > 0
        keep = completed if resumed else -1
        kept_rows(path / METRICS, columns, keep)  # what cannot be kept is refused before anything is written
        self._tensorboard: TensorBoard | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_json(path / ENVIRONMENT, environment(device, ranks) | {"settings": settings})
            if not complete:  # what an older run, or one of fewer rounds, wrote in the end; it goes before the
                for name in (clients.NAME, SUMMARY):  # configuration, since both together say: this was run to its end
                    (path / name).unlink(missing_ok=True)
            if config is not None:
                with replacing(path / CONFIG) as file:
                    file.write(config)
            if not resumed and checkpoints.path is not None:  # of an older run that this one replaces;
                checkpoints.path.unlink(missing_ok=True)  # it goes before its metrics do
                (path / BEST).unlink(missing_ok=True)
            if constants:
                with replacing(path / CONSTANTS, "wb") as file:
                    file.write(save(constants))
            self._csv = MetricsCSV(path / METRICS, columns, keep)
            if tensorboard and not (complete and (path / SUMMARY).exists()):
                with written(path / "event files"):
                    self._tensorboard = TensorBoard(path, seeds, completed + 1 if resumed else 0)
        except OSError as error:
            raise ConfigError(f"out={path}: {error}; choose another folder") from error
        self.kept = list(self._csv.kept)

    def record(self, completed: int, rows: list[Row], histograms: dict[str, np.ndarray]) -> None:
        """One evaluation: a row per replicate, and what was measured of every client."""
        self._csv.append(rows)
        if self._tensorboard is not None:
            with written(self.path / "event files"):
                self._tensorboard.write(completed, rows, histograms)

    def on_disk(self) -> None:
        """Wait until all rows are on the disk: a checkpoint says that they are there."""
        self._csv.on_disk()

    def finish(self, known: Clients, completed: int, summary: dict[str, Any]) -> None:
        """What is written once: clients, pictures and the table of settings, and last the summary."""
        from fedsim.plots.compare import pictures  # here: no run need wait for matplotlib before its first round
        from fedsim.results import load

        clients.write(self.path / clients.NAME, known)
        if self._tensorboard is not None:
            with written(self.path / "event files"):
                for picture in pictures([load(self.path)]):
                    self._tensorboard.figure(f"figures/{picture.heading}", picture.figure, completed)
                self._tensorboard.hparams(self._settings)
                self._tensorboard.flush()
        write_json(self.path / SUMMARY, summary)

    def close(self, quietly: bool) -> None:
        """No more is written; `quietly`: whatever goes wrong now, since something went wrong before."""
        for sink in (self._csv, self._tensorboard):
            if sink is not None:
                with contextlib.suppress(OSError) if quietly else contextlib.nullcontext():
                    sink.close()
