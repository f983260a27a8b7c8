"""The ledger of judgements: how many strategies were tried, for the correction of intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError
from fedsim.core.lock import Lock


def attempt_number(path: Path, attempt_key: str) -> int:
    """The number of this try: of different keys in the ledger, up to this one's, or one more if it is not there.

    Raises:
        ConfigError: the file is damaged.
    """
    keys = list(dict.fromkeys(entry["key"] for entry in _read_ledger_entries(path)))
    return keys.index(attempt_key) + 1 if attempt_key in keys else len(keys) + 1


def record_attempt(path: Path, attempt_entry: dict[str, Any]) -> None:
    """Append a line; the folder is locked meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(path.parent)
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(attempt_entry) + "\n")
    finally:
        lock.release()


def _read_ledger_entries(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        recorded_entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not all(isinstance(entry.get("key"), str) for entry in recorded_entries):
            raise ValueError("an entry has no key")
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a ledger of judgements ({error}); restore it, or give another --ledger"
        ) from error
    return recorded_entries
