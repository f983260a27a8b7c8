"""Locks of folders: two runs in one folder would each damage the other's files.

The lock is the operating system's, on a file in the folder, so it ends with the process however that ends; Linux passes
it on to an NFS server. Where a file system has no locks the file itself is the lock: it names machine, process and the
moment that process began, and one that is gone does not keep it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from fedsim.core.errors import ConfigError

LOCK_FILE_NAME = ".lock"
NO_LOCK_SUPPORT_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of file systems without locks
LOCK_HELD_ERRNOS = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
MAX_LOCK_FILE_BYTES = 4096  # bytes of the file, which names one process
MAX_LOCK_ATTEMPTS = 100  # between opening the file and locking it another process may have removed it

_held_descriptors: set[int] = (
    set()
)  # descriptors that forked processes close, so that they do not hold the lock of an ended parent


class Lock:
    """The lock of a folder. The folder is created if it does not exist, and removed again if it stays empty.

    Args:
        folder: that belongs to this process from now on, until `release`.

    Raises:
        ConfigError: another process (or another run of this one) has it; the message says who.
        OSError: nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self._created_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK_FILE_NAME
        try:
            self._file = self._acquire()
        except BaseException:
            self._remove_empty()
            raise
        _held_descriptors.add(self._file)

    def release(self) -> None:
        """Release the folder."""
        _held_descriptors.discard(self._file)
        if sys.platform == "win32":  # where an open file cannot be removed
            os.close(self._file)
        with contextlib.suppress(OSError):
            self._path.unlink()
        if sys.platform != "win32":
            os.close(self._file)
        self._remove_empty()

    def _acquire(self) -> int:
        """Return the descriptor of the lock file, once it is locked and still has this name."""
        for _ in range(MAX_LOCK_ATTEMPTS):
            is_new_file, file_descriptor = _open_lock_file(self._path)
            try:
                locks = _try_lock(file_descriptor)
                if not locks and not is_new_file and not self._remove_stale_lock():
                    raise ConfigError(
                        _in_use_message(self._path, f"or delete {self._path} if you know that it has ended")
                    )
                if self._is_same_file(file_descriptor) and (locks or is_new_file):
                    os.ftruncate(file_descriptor, 0)
                    with contextlib.suppress(OSError):  # on a full disk the lock is held without a name in its file
                        os.write(file_descriptor, json.dumps(_process_identity()).encode())
                    return file_descriptor
            except BlockingIOError:
                os.close(file_descriptor)
                raise ConfigError(_in_use_message(self._path, "or choose another out")) from None
            except BaseException:
                os.close(file_descriptor)
                raise
            os.close(file_descriptor)
        raise ConfigError(
            f"out={self._path.parent} is repeatedly locked and released by another process; choose another folder"
        )

    def _is_same_file(self, file: int) -> bool:
        """Return whether the opened file is still the one at this path."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _remove_stale_lock(self) -> bool:
        """On file systems without locks: remove the lock file if its process has ended."""
        if not _owner_is_gone(_read_owner(self._path)):
            return False
        moved_path = self._path.with_name(f"{LOCK_FILE_NAME}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):  # only one of several processes succeeds
            os.rename(self._path, moved_path)
            moved_path.unlink()
        return True

    def _remove_empty(self) -> None:
        for path in self._created_folders:
            with contextlib.suppress(OSError):
                path.rmdir()


def check_folder_unlocked(folder: Path) -> None:
    """Refuse a folder that another process holds now.

    Raises:
        ConfigError: it is another's; the message says whose.
    """
    if (folder / LOCK_FILE_NAME).exists():
        with contextlib.suppress(OSError):  # `Lock` reports the error
            Lock(folder).release()


def is_folder_locked(folder: Path) -> bool:
    """Return whether a process holds the folder, according to its lock file; nothing is locked, written or removed.
    A process of another machine counts as running."""
    path = folder / LOCK_FILE_NAME
    try:
        return path.is_file() and path.stat().st_size <= MAX_LOCK_FILE_BYTES and not _owner_is_gone(_read_owner(path))
    except OSError:
        return False


def _open_lock_file(path: Path) -> tuple[bool, int]:
    """Open the lock file; return whether it was created, and its descriptor."""
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)  # a link may point to a file of another user
    try:
        return True, os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        try:
            return False, os.open(path, flags)
        except FileNotFoundError:
            return _open_lock_file(path)


def _try_lock(file_descriptor: int) -> bool:
    """Lock the file; return False if its file system has no locks. Raise BlockingIOError if another process holds
    it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(file_descriptor, 2**30, os.SEEK_SET)  # a byte far behind the text, which other processes may read
            msvcrt.locking(file_descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(file_descriptor, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in LOCK_HELD_ERRNOS:
            raise BlockingIOError(error.errno, error.strerror) from None
        if error.errno not in NO_LOCK_SUPPORT_ERRNOS:
            raise
        return False
    return True


def _process_identity() -> dict[str, Any]:
    start_ticks, start_text = _process_start_time(os.getpid()), time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": start_ticks, "since": start_text}


def _process_start_time(pid: int) -> str | None:
    """Return when a process began, in ticks since the machine started, since process numbers are reused. None if
    unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _owner_is_gone(lock_owner: dict[str, Any]) -> bool:
    """Return whether the named process has ended. A process of another machine counts as running."""
    if lock_owner.get("host") != socket.gethostname() or not isinstance(lock_owner.get("pid"), int):
        return False
    if sys.platform == "win32":  # where this signal would end the process
        return False
    try:
        os.kill(lock_owner["pid"], 0)
    except (ProcessLookupError, OverflowError):  # no process has this number
        return True
    except OSError:
        return False
    return bool(lock_owner.get("began") != _process_start_time(lock_owner["pid"]))


def _read_owner(path: Path) -> dict[str, Any]:
    """Return the owner named in the file; nothing while it is being written."""
    try:
        owner = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _in_use_message(path: Path, remedy: str) -> str:
    owner = _read_owner(path)
    holder_text = "another process"
    if owner:
        holder_text = f"process {owner.get('pid')} on {owner.get('host')}, which took it at {owner.get('since')}"
    return f"out={path.parent} is in use by {holder_text}; wait until that ends, {remedy}"


def _close_inherited_descriptors() -> None:
    """Close inherited descriptors in a forked child, which does not own them."""
    for file in _held_descriptors:
        with contextlib.suppress(OSError):
            os.close(file)
    _held_descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_descriptors)
