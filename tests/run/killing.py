"""Processes that are killed on purpose: forked from a warmed-up parent, so that one costs what its rounds cost."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import fedsim

WRITERS = (
    "core/files",
    "run/checkpoint",
    "run/folder",
    "run/tracker",
    "run/tracking/metrics_csv",
    "run/tracking/tensorboard",
)
WRITING = {str(Path(fedsim.__file__).parent / f"{name}.py"): name for name in WRITERS}
assert all(Path(file).exists() for file in WRITING)  # a module that moved would never be seen


@dataclass
class Ended:
    """How a child ended: `killed` by SIGKILL, or of itself; `seconds` it took; what it told."""

    killed: bool
    seconds: float
    told: str


def child(work: Callable[[Callable[[str], None]], Any], kill_after: float | None = None) -> Ended:
    """Run `work` in a forked child; it may tell its parent something. SIGKILL reaches it after so many seconds.

    An exception in the child is one here.
    """
    ear, mouth = os.pipe()
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_the_child(work, ear, mouth)
    os.close(mouth)
    with open(ear) as heard:
        if kill_after is not None:
            select.select([heard], [], [], kill_after)  # a child that ends, or tells something, ends the wait
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        told = heard.read()
    status = os.waitpid(pid, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and status:
        raise AssertionError(f"the child ended with status {status}:\n{told}")
    return Ended(killed, time.monotonic() - begin, told)


def _be_the_child(work: Callable[[Callable[[str], None]], Any], ear: int, mouth: int) -> NoReturn:
    code = 1
    os.close(ear)
    try:
        work(lambda text: os.write(mouth, text.encode()) and None)
        code = 0
    except BaseException:
        os.write(mouth, traceback.format_exc().encode())
    finally:
        os._exit(code)


@contextlib.contextmanager
def at_every_line(visit: Callable[[str], None]) -> Iterator[None]:
    """Call `visit` with 'module:function' at every line that is executed in the modules that write files."""

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            visit(f"{WRITING[frame.f_code.co_filename]}:{frame.f_code.co_name}")
        return line

    sys.settrace(lambda frame, *_: line if frame.f_code.co_filename in WRITING else None)
    try:
        yield
    finally:
        sys.settrace(None)
