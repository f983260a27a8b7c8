"""Names of run folders: unnamed runs get unique ones; the runs of a sweep are named by the settings that vary,
inside the sweep's folder."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError
from fedsim.core.settings import abbreviated_keys

DEFAULT_FOLDER_FORMAT = "outputs/%Y-%m-%d/%H-%M-%S"  # of a run or sweep whose folder the user does not name
RESUME_MODES = ("never", "auto", "overwrite")
LONGEST_PART, LONGEST_PATH = 255, 4096 - 300  # largest number of bytes of a name and of a path on common file systems
MAX_NAME_LENGTH = 200  # of a run's folder in a sweep; file systems end at 255 bytes
SINGLE_RUN_FOLDER = "run"  # the run of a sweep in which nothing varies
FORBIDDEN_CHARACTERS = (
    ":" if sys.platform == "win32" else ""
)  # characters that a folder name must not contain on this system
PLAIN_VALUE_PATTERN = re.compile(
    r"[\w.,:()\[\]{}@+-]*(?: [\w.,:()\[\]{}@+-]+)*"
)  # values that are used as folder names unchanged


def run_folder(out: Any, resume: Any) -> Path:
    """Return the folder to which a run writes; `resume` may name the folder itself. A folder with a generated name is
    created now.

    Raises:
        ConfigError: what is given names no folder, or none can be made.
    """
    if resume is not None and resume not in RESUME_MODES:
        return Path(checked_folder_name("resume", resume)).absolute()
    return (new_folder() if out is None else Path(checked_folder_name("out", out))).absolute()


def checked_folder_name(key: str, value: Any) -> str:
    """Return the name of a folder that a user gave under this key.

    Raises:
        ConfigError: it is none.
    """
    text = str(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not text.strip() or "\0" in text:
        remedy = "resume=auto goes on with a run in out" if key == "resume" else "give one, such as out=outputs/first"
        raise ConfigError(f"{key}={value!r} names no folder; {remedy}")
    max_component_bytes = max((len(os.fsencode(component)) for component in Path(text).parts), default=0)
    if max_component_bytes > LONGEST_PART or len(os.fsencode(Path(text).absolute())) > LONGEST_PATH:
        raise ConfigError(f"{key}={text[:20]}…{text[-20:]} is longer than file systems allow; give a shorter folder")
    return text


def new_folder() -> Path:
    """Create a new folder: outputs/DATE/TIME, with a number if several runs begin within one second.

    Raises:
        ConfigError: it cannot be made.
    """
    base = Path(time.strftime(DEFAULT_FOLDER_FORMAT))
    folder = base
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(2):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                break
            folder = base.with_name(f"{base.name}-{number}")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}); set out=FOLDER") from error
    return folder


def run_folder_name(overrides: Iterable[str], fixed_keys: Sequence[str] = ()) -> str:
    """Return the name of a sweep's run: the last words of keys, and digests of values that cannot be part of a name.

    Args:
        overrides: that make the run, KEY=VALUE.
        fixed_keys: keys that are the same in the whole sweep.
    """
    override_values = dict(sorted((override_key(text), text.partition("=")[2]) for text in overrides))
    short_names = abbreviated_keys({key for key in override_values if key not in fixed_keys})
    assignments = [
        f"{short_names[key]}={_folder_name_part(text)}" for key, text in override_values.items() if key in short_names
    ]
    name = ",".join(assignments) or SINGLE_RUN_FOLDER
    if len(name.encode()) <= MAX_NAME_LENGTH:
        return name
    start = name.encode()[: MAX_NAME_LENGTH - 17].decode(errors="ignore")
    return f"{start}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def override_key(override: str) -> str:
    """Return an override's key or group, without the signs that add and remove."""
    return override.partition("=")[0].lstrip("+~")


def _folder_name_part(text: str) -> str:
    """Return a value as a part of a folder's name; for a path the last word, and a digest that keeps values apart."""
    if PLAIN_VALUE_PATTERN.fullmatch(text) and not set(FORBIDDEN_CHARACTERS) & set(text):
        return text
    last_word = re.sub(r"[^\w.,+-]+", "_", re.split(r"[/\\]", text.strip("\"' /\\"))[-1]).strip("_")
    return f"{last_word}-{hashlib.sha256(text.encode()).hexdigest()[:6]}".lstrip("-")
