"""How a run is asked to end: Ctrl-C, SIGTERM and a closed terminal (SIGHUP) wait for the end of a round, and for its
checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none
ASKING = tuple(number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None)


class Stopped(KeyboardInterrupt):
    """The run ended after a round because it was asked to (Ctrl-C, SIGTERM, SIGHUP); a checkpoint was written."""


class StopSignals:
    """Notes the first signal, between `listen` and `let_go`; the second ends at once.

    Attributes:
        seen: the first signal's number, None before it.
    """

    def __init__(self) -> None:
        self.seen: int | None = None
        self._handlers: dict[int, Any] = {}

    def listen(self) -> None:
        """From now on signals wait. Only the main thread may ask for them."""
        if threading.current_thread() is threading.main_thread():
            for number in ASKING:
                if number == HANGUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # nohup: the run is meant to outlive its terminal
                self._handlers[number] = signal.signal(number, self._note)

    def let_go(self, leaving: bool) -> None:
        """What was there before listens again; `leaving`: but SIGTERM is ignored, by which a launcher ends ranks that
        are still saying why they end."""
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if leaving and number == signal.SIGTERM else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen is not None:  # asked twice: at once
            raise KeyboardInterrupt
        self.seen = number
