"""Whether a run is finished, and if not, what became of it: from its files alone, which are only read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fedsim.app.sweep import RECORDS_FOLDER
from fedsim.app.sweep_progress import TOTAL_RUNS_FILE
from fedsim.core.errors import ConfigError
from fedsim.core.lock import is_folder_locked
from fedsim.run.run_files import SUMMARY
from fedsim.studies.results.runs import Run

FINISHED, RUNNING, STOPPED, FAILED = "finished", "running", "stopped", "failed"
STATE_BY_STATUS = {"failed": FAILED, "stopped": STOPPED}  # what a sweep's record calls a run that did not finish
MAX_RECORD_BYTES = 1 << 16  # bytes of a sweep's record


@dataclass(frozen=True)
class RunState:
    """Attributes:

    name: finished, running, stopped or failed.
    message: why it stopped or failed, where its sweep recorded that.
    """

    name: str
    message: str = ""


@dataclass(frozen=True)
class SweepRecord:
    """What a sweep has recorded of one of its runs.

    Attributes:
        folder: of the run.
        overrides: that make the run.
        status: done, kept, running, stopped or failed.
        message: why.
    """

    folder: Path
    overrides: tuple[str, ...]
    status: str
    message: str


def run_state(folder: Path, record: SweepRecord | None = None) -> RunState:
    """The state of the run in a folder.

    A run is finished once its summary is written, and running while its process holds the folder. Of the rest the
    sweep's record says whether it failed; a run that was killed, or that was started alone and failed, is stopped.

    Args:
        folder: of the run.
        record: its sweep's; None: it is looked for in the folder above.
    """
    if (folder / SUMMARY).is_file():
        return RunState(FINISHED)
    if is_folder_locked(folder):
        return RunState(RUNNING)
    if record is None:
        record = sweep_records(folder.parent).get(folder.name)
    if record is not None and record.status in STATE_BY_STATUS:
        return RunState(STATE_BY_STATUS[record.status], record.message)
    return RunState(STOPPED, "its process ended before the last round")


def unfinished(run: Run) -> str:
    """'running, round 40 of 300' of a run that has rounds to go and has not ended; '' of others, and where it is not
    known how many rounds the run has."""
    rounds, last = run.settings.get("rounds"), run.rows[-1]["round"]
    if rounds is None or last >= rounds:
        return ""
    state = run_state(run.folder)
    return "" if state.name == FINISHED else f"{state.name}, round {last} of {rounds}"


def sweep_records(folder: Path) -> dict[str, SweepRecord]:
    """The records in a sweep's folder, by the names of the runs' folders; a damaged record is passed over."""
    records = {}
    for path in sorted((folder / RECORDS_FOLDER).glob("*.json")):
        try:
            record = _read_record(folder, path)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ConfigError):
            continue
        records[record.folder.name] = record
    return records


def planned_runs(folder: Path) -> int | None:
    """How many runs the sweep in this folder has in all; None where that is not known."""
    path = folder / RECORDS_FOLDER / TOTAL_RUNS_FILE
    try:
        moderate = path.is_file() and path.stat().st_size <= MAX_RECORD_BYTES
        total = json.loads(path.read_text(encoding="utf-8"))[0] if moderate else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return total if isinstance(total, int) and not isinstance(total, bool) and total > 0 else None


def _read_record(sweep: Path, path: Path) -> SweepRecord:
    """One record. Only the last word of its folder's name counts: the sweep may have been moved.

    Raises:
        ValueError: it is no file of moderate size, or holds something else.
    """
    if not path.is_file() or path.stat().st_size > MAX_RECORD_BYTES:
        raise ValueError(f"{path} is no sweep's record")
    content = json.loads(path.read_text(encoding="utf-8"))
    name, overrides = Path(content["folder"]).name, content["overrides"]
    texts = [name, content["status"], content["message"], *overrides]
    if not all(isinstance(text, str) for text in texts) or name in ("", ".."):
        raise ValueError(f"{path} is no sweep's record")
    return SweepRecord(sweep / name, tuple(overrides), content["status"], content["message"])
