"""How a run is asked to end: Ctrl-C, SIGTERM and a closed terminal (SIGHUP) wait for the end of a round, and for its
checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, ClassVar

HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none
ASKING = tuple(number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None)


class Stopped(KeyboardInterrupt):
    """The run ended after a round because it was asked to (Ctrl-C, SIGTERM, SIGHUP); a checkpoint was written."""


class StopSignals:
    """Notes the first signal, between `listen` and `let_go`; the second ends at once. Runs that go on together all
    note it.

    Attributes:
        seen: the first signal's number, None before it.
    """

    _listening: ClassVar[list[StopSignals]] = []
    _handlers: ClassVar[dict[int, Any]] = {}  # what was there before the first of them

    def __init__(self) -> None:
        self.seen: int | None = None

    @property
    def together(self) -> int:
        """How many runs of this process are under way."""
        return max(1, len(self._listening))

    def listen(self) -> None:
        """From now on signals wait. Only the main thread may ask for them."""
        if threading.current_thread() is threading.main_thread():
            if not self._listening:
                self._handlers.clear()
                for number in ASKING:
                    if number == HANGUP and signal.getsignal(number) == signal.SIG_IGN:
                        continue  # nohup: the run is meant to outlive its terminal
                    self._handlers[number] = signal.signal(number, self._note)
            self._listening.append(self)

    def let_go(self, leaving: bool) -> None:
        """What was there before the first listens again behind the last; `leaving`: but SIGTERM is ignored, by which a
        launcher ends ranks that are still saying why they end."""
        if self not in self._listening:
            return
        if self._listening == [self]:  # still listening: a signal on the way is noted, and does not count as a second
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_IGN if leaving and number == signal.SIGTERM else handler)
        self._listening.remove(self)

    @classmethod
    def _note(cls, number: int, frame: FrameType | None) -> None:
        if all(one.seen is not None for one in cls._listening):  # asked twice: at once
            raise KeyboardInterrupt
        for one in cls._listening:
            one.seen = number if one.seen is None else one.seen
