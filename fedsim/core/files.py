"""Files that are whole at every moment: written beside their place, and renamed when they are complete.

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
    """A file to write, which takes the place of `path` when the block ends; an error leaves the old one as it was.

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
    """An opener of a file that is made now: what had the name goes, were it a link to somebody's file."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)


def no_follow_opener(path: str, flags: int) -> int:
    """An opener of a file that refuses a link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def ensure_real_folder(path: Path) -> Path:
    """The folder inside a run's, which is made where it is absent.

    Raises:
        OutputError: it is a link, by which files would be written elsewhere.
    """
    if path.is_symlink():
        raise OutputError(f"{path} is a link, and runs write inside their own folder alone; remove it")
    with name_write_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def check_regular_path(path: Path) -> Path:
    """The path, which names a file of ordinary content, a folder, or nothing yet: a pipe would be waited for, for ever.

    Raises:
        OSError: it is a pipe, a socket or a device.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is a pipe or a device; write what it gives to a file")
    return path


@contextlib.contextmanager
def name_write_errors(path: Path) -> Iterator[None]:
    """Errors of the operating system, while `path` is written, name it."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror or error})") from error


def flush_to_disk(file: IO[Any]) -> None:
    """Wait until what was written to the file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _flush_folder_to_disk(folder: Path) -> None:
    """Wait until the names in the folder are on the disk; Windows knows no such thing."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON so that the file is whole at every moment; NaN, which JSON does not know, is null."""
    with replacement_file(path) as file:
        file.write(json.dumps(without_nan(content), indent=2) + "\n")


def without_nan(content: Any) -> Any:
    """The same with None in the place of NaN."""
    if isinstance(content, dict):
        return {name: without_nan(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [without_nan(value) for value in content]
    return None if isinstance(content, float) and math.isnan(content) else content
