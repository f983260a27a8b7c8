"""Nobody may read what a command says (`| head` has seen enough, a terminal was closed): its work goes on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class Patient:
    """A stream of text whose reader may leave: what is written then goes nowhere, and is no error.

    Args:
        stream: that is written to; all but writing is its own.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """The number of characters, read or not."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Each of them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Let readers see what was written."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Nobody listens any more: the operating system takes the rest. A pipe that is full for a moment and must not
        be waited for loses these words alone."""
        if isinstance(error, BlockingIOError):
            return
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def be_patient() -> None:
    """From now on standard output and standard error may lose their readers."""
    sys.stdout, sys.stderr = (_patient(sys.stdout), _patient(sys.stderr))


def _patient(stream: Any) -> Any:
    return stream if stream is None or isinstance(stream, Patient) else Patient(stream)


@contextlib.contextmanager
def patiently() -> Iterator[None]:
    """The same within the block; what was said is said when it ends, not in Python's own end, which would complain."""
    before = sys.stdout, sys.stderr
    be_patient()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before
