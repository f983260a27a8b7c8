"""The files of a run: opened before its first round, appended to at each evaluation, completed at its end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor

from fedsim.core import checksums
from fedsim.core.errors import ConfigError
from fedsim.core.files import replacement_file, write_json
from fedsim.core.lock import Lock
from fedsim.core.ranks import ProcessRanks
from fedsim.run.progress import Progress
from fedsim.run.run_files import BEST_MODELS_FILE, CONFIG_FILE, CONSTANTS_FILE, ENVIRONMENT_FILE, SUMMARY_FILE
from fedsim.run.tracking import clients
from fedsim.run.tracking.clients import ClientSummary
from fedsim.run.tracking.environment import environment_facts
from fedsim.run.tracking.metrics_csv import METRICS_FILENAME, MetricsCSV, rows_up_to_round
from fedsim.run.tracking.pictures import run_pictures
from fedsim.run.tracking.result import MetricsRow
from fedsim.trainer import TaskGenerator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def locked_folder(path: Path | None, ranks: ProcessRanks) -> Iterator[None]:
    """Within the block the run folder is locked for this run; None if the run has no folder. With several ranks the
    first one locks it for all.

    Raises:
        ConfigError: it is another's, or it cannot be written.
    """
    lock, lock_problem = None, None
    if path is not None and ranks.is_main_rank:
        try:
            lock = Lock(path)
        except ConfigError as error:
            lock_problem = str(error)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", error)
            lock_problem = f"out={_displayed_path(path)} cannot be written ({reason}); choose another folder"
    lock_problem = ranks.broadcast_object(lock_problem)
    if lock_problem is not None:
        raise ConfigError(lock_problem)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _displayed_path(path: Path) -> Path:
    """Return a path relative to the working directory, for messages."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def with_folder_lock(method: Callable[P, TaskGenerator[T]]) -> Callable[P, TaskGenerator[T]]:
    """Decorate steps of an object with a `federation`, so that they hold the lock of the folder `out`, their first
    argument."""

    @functools.wraps(method)
    def locked_steps(*args: P.args, **kwargs: P.kwargs) -> TaskGenerator[T]:
        out: Any = kwargs.get("out", args[1] if len(args) > 1 else None)
        with locked_folder(None if out is None else Path(out), args[0].federation.ranks):  # type: ignore[attr-defined]
            return (yield from method(*args, **kwargs))

    return locked_steps


class RunFolder:
    """Writes the files of a run except for its checkpoints.

    Args:
        path: of the folder.
        columns: of metrics.csv, name → what it is.
        progress: rounds that were run before, and rows they have left, where the run goes on with them.
        is_complete: whether no round is left.

    Attributes:
        kept_rows: rows of metrics.csv from before, once the folder is prepared.
        is_finished: whether nothing is left to do: the summary was there before the folder was prepared.
    """

    def __init__(self, path: Path, columns: dict[str, str], progress: Progress, is_complete: bool) -> None:
        self.path, self.columns, self.progress, self.is_complete = path, columns, progress, is_complete
        self.kept_rows: list[MetricsRow] = []
        self.is_finished = False
        self._csv: MetricsCSV

    def prepare(
        self,
        config: str | None,
        settings: dict[str, Any],
        device: torch.device,
        ranks: int,
        constants: dict[str, Tensor],
        checkpoint: Path | None,
    ) -> None:
        """Prepare the folder for the next round: write what is known before it, and delete files of an older run.

        Args:
            config: YAML that is kept as config.yaml, or None.
            settings: named values, for tables of runs.
            device, ranks: for environment.json.
            constants: entries of the model that no client changes.
            checkpoint: the run's file: an older run's is removed.

        Raises:
            CheckpointError: the folder's metrics.csv is not this run's, or lacks rows; nothing was written.
            ConfigError: the folder cannot be written, or holds what is no run's.
        """
        path, progress, is_resumed = self.path, self.progress, self.progress.rounds > 0
        last_kept_round = progress.rounds if is_resumed else -1
        self.is_finished = self.is_complete and (path / SUMMARY_FILE).exists()
        if (path / CONFIG_FILE).exists() and not (path / ENVIRONMENT_FILE).exists():
            raise ConfigError(
                f"out={_displayed_path(path)} holds a {CONFIG_FILE} that no run wrote; choose another folder"
            )
        # files that cannot be replaced are refused before anything is written
        rows_up_to_round(path / METRICS_FILENAME, self.columns, last_kept_round, progress.rows, progress.crc)
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_json(path / ENVIRONMENT_FILE, environment_facts(device, ranks) | {"settings": settings})
            if not self.is_complete:  # final files of an older or shorter run; they are deleted before the
                for name in (
                    clients.CLIENTS_FILENAME,
                    SUMMARY_FILE,
                ):  # configuration, since both together mean that this run is complete
                    (path / name).unlink(missing_ok=True)
            if config is not None:
                with replacement_file(path / CONFIG_FILE) as config_file:
                    config_file.write(config)
            if not is_resumed and checkpoint is not None:  # of an older run that this one replaces;
                checkpoint.unlink(missing_ok=True)  # deleted before its metrics
                (path / BEST_MODELS_FILE).unlink(missing_ok=True)
            if constants:
                with replacement_file(path / CONSTANTS_FILE, "wb") as config_file:
                    config_file.write(
                        save(constants, metadata=checksums.add_checksums({"format": "fedsim-constants"}, constants))
                    )
            self._csv = MetricsCSV.open(path / METRICS_FILENAME, self.columns, last_kept_round)
        except OSError as error:
            raise ConfigError(f"out={path}: {error}; choose another folder") from error
        self.kept_rows = list(self._csv.kept_rows)

    def record(self, rows: list[MetricsRow]) -> None:
        """Append an evaluation: one row per replicate."""
        self._csv.append(rows)

    def flush_to_disk(self) -> None:
        """Wait until all rows are on the disk, since a checkpoint refers to them."""
        self._csv.flush_to_disk()

    def write_clients_npz(self, known_clients: ClientSummary) -> None:
        """Write clients.npz at the end of a run."""
        clients.write(self.path / clients.CLIENTS_FILENAME, known_clients)

    def pictures(self) -> Iterator[tuple[str, Figure]]:
        """Return headings and figures of the run."""
        yield from run_pictures(self.path)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary at the end of a run."""
        write_json(self.path / SUMMARY_FILE, summary)

    def close(self, ignore_errors: bool) -> None:
        """Close the files; with `ignore_errors` errors are ignored, since an earlier one ended the run."""
        with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
            self._csv.close()
