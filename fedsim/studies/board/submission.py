"""Submissions: a file of the user, with a Python class or with overrides in YAML, adds an entry to a board.

A Python file may set further attributes of the `Entry` in the variable `board`:

    board = {"about": "what it does", "knob": {"key": "strategy.server_lr", "values": [0.5, 1, 2]}, "remembers": True}
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedsim.app.folders import override_key
from fedsim.core.errors import ConfigError
from fedsim.core.files import write_json
from fedsim.local import LocalRule
from fedsim.strategies import Strategy
from fedsim.studies.board.board import BoardEntry, Leaderboard, parse_entry

SUBMISSIONS_FILE = "submitted.json"
CLASS_BY_GROUP = {"strategy": Strategy, "local": LocalRule}


def read_submission(path: Path) -> tuple[dict[str, BoardEntry], str]:
    """Read the entries of a submitted file; return name → entry, and the digest of the file.

    Raises:
        ConfigError: the file holds no entry.
    """
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"--entry {path} cannot be read ({error.strerror})") from error
    entries = _entries_from_python(path) if path.suffix == ".py" else _entries_from_yaml(path)
    return entries, digest


def _entries_from_yaml(path: Path) -> dict[str, BoardEntry]:
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        return {str(name): parse_entry(definition) for name, definition in content.items()}
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--entry {path} must hold NAME: {{overrides: […]}} ({reason})") from error


def _entries_from_python(path: Path) -> dict[str, BoardEntry]:
    """Return an entry for the last strategy or local rule that the file defines."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # workers inherit it
    try:
        module = importlib.import_module(path.stem)
    except Exception as error:
        raise ConfigError(f"--entry {path} cannot be imported ({type(error).__name__}: {error})") from error
    if Path(str(module.__file__)).resolve() != path.resolve():
        raise ConfigError(f"--entry {path}: {path.stem} is the name of another module, {module.__file__}; rename it")
    classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == path.stem]
    candidates = [(group, c) for c in classes for group, kind in CLASS_BY_GROUP.items() if issubclass(c, kind)]
    if not candidates:
        raise ConfigError(f"--entry {path} defines no Strategy and no LocalRule; derive a class from one of them")
    group, kind = candidates[-1]
    board_options = dict(getattr(module, "board", {}))
    name, overrides = board_options.pop("name", kind.__name__), board_options.pop("overrides", [])
    description = board_options.pop("about", (kind.__doc__ or "").split("\n")[0])
    try:
        made_by = [f"{group}=custom", f"{group}._target_={path.stem}.{kind.__name__}"]
        submission = parse_entry({"overrides": [*made_by, *overrides], "about": description, **board_options})
    except TypeError as error:
        raise ConfigError(f"--entry {path}: board={board_options} is not well formed ({error})") from error
    if submission.knob is not None:
        submission.knob.key = f"++{submission.knob.key.lstrip('+')}"  # custom classes have keys of their own
    return {name: submission}


def add_board_entries(folder: Path, board: Leaderboard, new_entries: dict[str, BoardEntry], digest: str) -> None:
    """Add the entries to the board, and to the submissions stored with its results.

    Raises:
        ConfigError: a name is already taken by another entry, or an entry sets `trusted`.
    """
    stored_entries = _stored_submissions(folder)
    for entry_name, new_entry in new_entries.items():
        if any(override_key(override) == "trusted" for override in new_entry.overrides):
            raise ConfigError(
                f"--entry: {entry_name} has trusted=…, which counts on the command line alone; leave it out"
            )
        if entry_name in board.entries and entry_name not in stored_entries:
            raise ConfigError(f"{entry_name} is an entry of board {board.name}; give the submission another name")
        if entry_name in stored_entries and stored_entries[entry_name]["file"] != digest:
            raise ConfigError(
                f"{entry_name} was submitted with another file; give it another name, or --forget {entry_name} first"
            )
        board.tuning.check(f"entry {entry_name}", new_entry.knob)
        stored_entries[entry_name] = {"file": digest, **asdict(new_entry)}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SUBMISSIONS_FILE, stored_entries)
    add_submitted_entries(folder, board)


def add_submitted_entries(folder: Path, board: Leaderboard) -> Leaderboard:
    """Return the board after adding the entries that were submitted to these results."""
    for name, definition in _stored_submissions(folder).items():
        board.entries[name] = parse_entry({key: value for key, value in definition.items() if key != "file"})
    return board


def delete_submission(folder: Path, name: str) -> None:
    """Delete a submission from the stored ones."""
    stored_entries = _stored_submissions(folder)
    if stored_entries.pop(name, None) is not None:
        write_json(folder / SUBMISSIONS_FILE, stored_entries)


def _stored_submissions(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / SUBMISSIONS_FILE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
