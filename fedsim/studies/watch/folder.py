"""The runs below a folder as they are now: read again where a file has changed, and nothing else is done with them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from fedsim.app.sweep import RECORDS_FOLDER
from fedsim.core.errors import ConfigError
from fedsim.core.speaking import escape_unprintable
from fedsim.run.run_files import CONFIG_FILE, ENVIRONMENT_FILE, SUMMARY_FILE
from fedsim.run.tracking.metrics_csv import METRICS_FILENAME
from fedsim.studies.results.differences import label_runs
from fedsim.studies.results.run_state import (
    RUNNING_STATUS,
    STOPPED_STATUS,
    RunStatus,
    SweepRunRecord,
    num_planned_runs,
    run_state,
    sweep_records,
)
from fedsim.studies.results.runs import Run, load

MAX_RUNS = 200  # that the page shows
MAX_NAME_LENGTH = 120  # characters of a run's name
WATCHED_FILES = (METRICS_FILENAME, CONFIG_FILE, ENVIRONMENT_FILE, SUMMARY_FILE)
UNREADABLE_STATE = "unreadable"  # the state of a run whose files are damaged

Fingerprint = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class WatchedRun:
    """A run on the page.

    Attributes:
        folder: the folder of the run.
        label: what distinguishes it from the others.
        state: finished, running, stopped, failed or unreadable.
        message: why it is not finished, if known.
        run: its measurements; None before the first evaluation.
        last_change_time: seconds since the epoch when its metrics were last written; None before.
    """

    folder: Path
    label: str
    state: str
    message: str = ""
    run: Run | None = None
    last_change_time: float | None = None


@dataclass(frozen=True)
class FolderSnapshot:
    """The state of the runs in a folder at one moment.

    Attributes:
        runs: the runs that are shown, in the order of their folders.
        num_runs: number of all runs.
        read_time: seconds since the epoch.
        num_planned: number of runs that the sweep in this folder will have; None if unknown.
    """

    runs: list[WatchedRun]
    num_runs: int
    read_time: float
    num_planned: int | None = None

    @property
    def measured_runs(self) -> list[Run]:
        """The runs with at least one evaluation."""
        return [watched_run.run for watched_run in self.runs if watched_run.run is not None]


class WatchedFolder:
    """A folder with runs at any depth below it.

    Args:
        folder: the folder of a run, of a sweep, or of several.
        seconds: largest age of a snapshot, which several pages share.

    Raises:
        ConfigError: there is no such folder.
    """

    def __init__(self, folder: Path, seconds: float = 2.0) -> None:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder; give the folder of a run or a sweep")
        self.folder, self.seconds = folder, seconds
        self._read_runs: dict[Path, tuple[Fingerprint, Run | None, str]] = {}
        self._snapshot: FolderSnapshot | None = None

    def snapshot(self) -> FolderSnapshot:
        """Return the state of the runs, at most `seconds` old."""
        if self._snapshot is None or time.time() - self._snapshot.read_time >= self.seconds:
            self._snapshot = self._read()
        return self._snapshot

    def _read(self) -> FolderSnapshot:
        records: dict[Path, SweepRunRecord] = {}
        for sweep in self._sweep_folders():
            records |= {record.folder: record for record in sweep_records(sweep).values()}
        folders = sorted({*self._run_folders(), *records})
        visible = folders[:MAX_RUNS]
        for removed_folder in self._read_runs.keys() - set(visible):
            del self._read_runs[removed_folder]
        watched_run = [self._read_watched_run(folder, records.get(folder)) for folder in visible]
        runs = [entry.run for entry in watched_run if entry.run is not None]
        label_runs(runs)
        labels = {id(run): run.label for run in runs}
        displayable_runs = [_displayable_run(entry, labels.get(id(entry.run), entry.label)) for entry in watched_run]
        return FolderSnapshot(displayable_runs, len(folders), time.time(), num_planned_runs(self.folder))

    def _sweep_folders(self) -> set[Path]:
        """Return the folders that may have records of a sweep: this one, its parent, and those below."""
        return {self.folder, self.folder.parent, *(path.parent for path in self.folder.rglob(RECORDS_FOLDER))}

    def _run_folders(self) -> set[Path]:
        return {path.parent for name in (METRICS_FILENAME, ENVIRONMENT_FILE) for path in self.folder.rglob(name)}

    def _read_watched_run(self, folder: Path, record: SweepRunRecord | None) -> WatchedRun:
        name = " ".join(record.overrides) if record is not None and not folder.is_dir() else folder.name
        run, problem = self._read_run(folder)
        if problem:
            return WatchedRun(folder, name, UNREADABLE_STATE, problem)
        state = run_state(folder, record)
        if not folder.is_dir() and record is not None and record.status == RUNNING_STATUS:
            state = RunStatus(STOPPED_STATUS, "its folder is gone")
        return WatchedRun(folder, name, state.name, state.message, run, _last_change_time(folder))

    def _read_run(self, folder: Path) -> tuple[Run | None, str]:
        """Return the run, or why it cannot be read; it is read again if one of its files has changed."""
        fingerprint = _file_stats(folder)
        cached = self._read_runs.get(folder)
        if cached is not None and cached[0] == fingerprint:
            return cached[1], cached[2]
        run, problem = None, ""
        try:
            if fingerprint[0] is not None:
                run = load(folder)
        except ConfigError as error:
            problem = "" if str(error).endswith("has no rows yet") else str(error)
        self._read_runs[folder] = fingerprint, run, problem
        return run, problem


def _displayable_run(watched_run: WatchedRun, name: str) -> WatchedRun:
    """Return the run with names and messages on one line, without control characters, and of limited length."""
    return WatchedRun(
        watched_run.folder,
        single_line(name) or "run",
        watched_run.state,
        single_line(watched_run.message),
        watched_run.run,
        watched_run.last_change_time,
    )


def single_line(text: str) -> str:
    """Escape and shorten untrusted text for one line of the page."""
    text = escape_unprintable(" ".join(text.split()))
    return text if len(text) <= MAX_NAME_LENGTH else f"{text[: MAX_NAME_LENGTH - 1]}…"


def _file_stats(folder: Path) -> Fingerprint:
    """Return the modification time and size of each of the run's files; None for a missing one."""
    fingerprint: list[tuple[int, int] | None] = []
    for name in WATCHED_FILES:
        try:
            stat = (folder / name).stat()
            fingerprint.append((stat.st_mtime_ns, stat.st_size))
        except OSError:
            fingerprint.append(None)
    return tuple(fingerprint)


def _last_change_time(folder: Path) -> float | None:
    try:
        return (folder / METRICS_FILENAME).stat().st_mtime
    except OSError:
        return None
