"""The state of a run (finished, running, stopped or failed), determined from its files without changing them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fedsim.app.sweep import RECORDS_FOLDER
from fedsim.app.sweep_progress import TOTAL_RUNS_FILE
from fedsim.core.errors import ConfigError
from fedsim.core.lock import is_folder_locked
from fedsim.run.run_files import SUMMARY_FILE
from fedsim.studies.results.runs import Run

FINISHED_STATUS, RUNNING_STATUS, STOPPED_STATUS, FAILED_STATUS = "finished", "running", "stopped", "failed"
STATE_BY_STATUS = {"failed": FAILED_STATUS, "stopped": STOPPED_STATUS}  # status in a sweep's record → state
MAX_RECORD_BYTES = 1 << 16  # larger records of a sweep are not read


@dataclass(frozen=True)
class RunStatus:
    """The state of a run.

    Attributes:
        name: finished, running, stopped or failed.
        message: why it stopped or failed, if its sweep recorded the reason.
    """

    name: str
    message: str = ""


@dataclass(frozen=True)
class SweepRunRecord:
    """A sweep's record of one of its runs.

    Attributes:
        folder: folder of the run.
        overrides: Hydra overrides of the run.
        status: done, kept, running, stopped or failed.
        message: the reason.
    """

    folder: Path
    overrides: tuple[str, ...]
    status: str
    message: str


def run_state(folder: Path, record: SweepRunRecord | None = None) -> RunStatus:
    """Return the state of the run in a folder.

    A run is finished once its summary is written, and running while its process locks the folder. Otherwise the sweep's
    record says whether it failed; a run that was killed, or that failed outside a sweep, is stopped.

    Args:
        folder: folder of the run.
        record: its sweep's record; None: it is looked for in the parent folder.
    """
    if (folder / SUMMARY_FILE).is_file():
        return RunStatus(FINISHED_STATUS)
    if is_folder_locked(folder):
        return RunStatus(RUNNING_STATUS)
    if record is None:
        record = sweep_records(folder.parent).get(folder.name)
    if record is not None and record.status in STATE_BY_STATUS:
        return RunStatus(STATE_BY_STATUS[record.status], record.message)
    return RunStatus(STOPPED_STATUS, "its process ended before the last round")


def unfinished_run_text(run: Run) -> str:
    """Return a text such as 'running, round 40 of 300'; '' for a finished run or an unknown number of rounds."""
    rounds, last_round = run.settings.get("rounds"), run.rows[-1]["round"]
    if rounds is None or last_round >= rounds:
        return ""
    state = run_state(run.folder)
    return "" if state.name == FINISHED_STATUS else f"{state.name}, round {last_round} of {rounds}"


def sweep_records(folder: Path) -> dict[str, SweepRunRecord]:
    """Return the records in a sweep's folder by the names of the runs' folders; damaged records are left out."""
    records = {}
    for path in sorted((folder / RECORDS_FOLDER).glob("*.json")):
        try:
            record = _read_sweep_record(folder, path)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ConfigError):
            continue
        records[record.folder.name] = record
    return records


def num_planned_runs(folder: Path) -> int | None:
    """Return the total number of runs of the sweep in this folder; None if unknown."""
    path = folder / RECORDS_FOLDER / TOTAL_RUNS_FILE
    try:
        has_readable_size = path.is_file() and path.stat().st_size <= MAX_RECORD_BYTES
        total = json.loads(path.read_text(encoding="utf-8"))[0] if has_readable_size else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return total if isinstance(total, int) and not isinstance(total, bool) and total > 0 else None


def _read_sweep_record(sweep: Path, path: Path) -> SweepRunRecord:
    """Read one record; only the last component of its folder is used, since the sweep may have been moved.

    Raises:
        ValueError: it is not a file of moderate size, or not a record.
    """
    if not path.is_file() or path.stat().st_size > MAX_RECORD_BYTES:
        raise ValueError(f"{path} is not the record of a sweep")
    content = json.loads(path.read_text(encoding="utf-8"))
    name, overrides = Path(content["folder"]).name, content["overrides"]
    texts = [name, content["status"], content["message"], *overrides]
    if not all(isinstance(text, str) for text in texts) or name in ("", ".."):
        raise ValueError(f"{path} is not the record of a sweep")
    return SweepRunRecord(sweep / name, tuple(overrides), content["status"], content["message"])
