"""Files that are complete at every moment: written under another name, and renamed when they are complete.

A run folder may come from somebody else, so that links in it are not followed: a file is made anew, whatever had its
name, and a link in the place of a folder is refused.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fedsim.core.errors import OutputError

PARTIAL_SUFFIX = ".partial"


@contextlib.contextmanager
def replacement_file(path: Path, file_mode: str = "w", durable: bool = False) -> Iterator[IO[Any]]:
    """Open a file that replaces `path` when the block ends; an error leaves the old file unchanged.

    Args:
        path: of the file.
        file_mode: 'w' (UTF-8, no translation of line ends) or 'wb'.
        durable: come through a power failure too: the content is on the disk before the name is, and the name before
            the block ends. A file that is not durable comes through the end of the process, however it ends.

    Raises:
        OutputError: the file cannot be written; the message names it.
    """
    partial_path = path.with_suffix(PARTIAL_SUFFIX)
    text = {} if "b" in file_mode else {"encoding": "utf-8", "newline": ""}
    try:
        with name_write_errors(path):
            with open(partial_path, file_mode, opener=_new_file_opener, **text) as file:  # type: ignore[call-overload]
                yield file
                if durable:
                    flush_to_disk(file)
            os.replace(partial_path, path)
            if durable:
                _flush_folder_to_disk(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial_path.unlink(missing_ok=True)
        raise


def _new_file_opener(path: str, flags: int) -> int:
    """Return an opener that creates a new file and removes what had the name, such as a link to another file."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)


def no_follow_opener(path: str, flags: int) -> int:
    """Return an opener that refuses links."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def create_real_folder(path: Path) -> Path:
    """Create a folder inside a run folder if it does not exist; refuse a link.

    Raises:
        OutputError: it is a link, by which files would be written elsewhere.
    """
    if path.is_symlink():
        raise OutputError(f"{path} is a link, and runs write inside their own folder alone; remove it")
    with name_write_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def check_regular_path(path: Path) -> Path:
    """Check that a path names a regular file, a folder, or nothing: reading a pipe might wait for ever.

    Raises:
        OSError: it is a pipe, a socket or a device.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is a pipe or a device; write what it gives to a file")
    return path


@contextlib.contextmanager
def name_write_errors(path: Path) -> Iterator[None]:
    """Within the block errors of the operating system name `path`."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror or error})") from error


def flush_to_disk(file: IO[Any]) -> None:
    """Wait until the file's content is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _flush_folder_to_disk(folder: Path) -> None:
    """Wait until the names in the folder are on the disk; Windows has no such operation."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON atomically; NaN, which JSON lacks, becomes null."""
    with replacement_file(path) as file:
        file.write(json.dumps(nan_to_none(content), indent=2) + "\n")


def nan_to_none(content: Any) -> Any:
    """Return the same content with None in place of NaN."""
    if isinstance(content, dict):
        return {name: nan_to_none(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [nan_to_none(value) for value in content]
    return None if isinstance(content, float) and math.isnan(content) else content
