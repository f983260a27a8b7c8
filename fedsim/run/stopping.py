"""Stop signals of a run: Ctrl-C, SIGTERM and SIGHUP take effect at the end of a round, after its checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from fedsim.run.tracking import Result

HANGUP_SIGNAL = getattr(signal, "SIGHUP", None)  # Windows has none
STOP_SIGNAL_NUMBERS = tuple(number for number in (signal.SIGINT, signal.SIGTERM, HANGUP_SIGNAL) if number is not None)


class Stopped(KeyboardInterrupt):
    """Raised if a run was stopped by a signal; it ended after a round, with a checkpoint.

    Args:
        message: which signal, and after which round.
        result: of the run, where its last round was over before it could stop; None where rounds are left. Where the
            run failed after the signal, the failure is this exception's `__cause__`.
    """

    def __init__(self, message: str = "", result: Result | None = None) -> None:
        super().__init__(message)
        self.result = result


class StopSignals:
    """Records the first signal between `install_handlers` and `restore_handlers`; a second one ends the process at
    once.

    Runs that go on together all see it.
    """

    _listening: ClassVar[list[StopSignals]] = []
    _handlers: ClassVar[dict[int, Any]] = {}  # handlers before the first listener
    _first_signal: ClassVar[int | None] = None  # the first signal since the first listener started
    _visible_signal: ClassVar[int | None] = None  # what all listeners see while a signal is held back
    _is_postponed: ClassVar[bool] = False

    def __init__(self) -> None:
        self._last_seen_signal: int | None = None  # what it had seen when it stopped listening

    @property
    def received_signal_number(self) -> int | None:
        """The number of the first signal; None before it."""
        if self not in self._listening:
            return self._last_seen_signal
        return StopSignals._visible_signal if self._is_postponed else StopSignals._first_signal

    @property
    def num_running_runs(self) -> int:
        """The number of runs that are running in this process, at least 1."""
        return max(1, len(self._listening))

    @classmethod
    def is_stop_pending(cls) -> bool:
        """Return whether a signal was received for which the current runs will stop."""
        return bool(cls._listening) and cls._first_signal is not None

    @classmethod
    @contextlib.contextmanager
    def delay_signals(cls) -> Iterator[None]:
        """Within the block a new signal is recorded but hidden from the runs until the end of the block, so that runs
        whose rounds end one after another in the block all see the same signals."""
        StopSignals._visible_signal, StopSignals._is_postponed = cls._first_signal, True
        try:
            yield
        finally:
            StopSignals._is_postponed = False

    def install_handlers(self) -> None:
        """Install the handlers, so that signals wait for the end of a round. Only the main thread may do this."""
        if threading.current_thread() is threading.main_thread():
            if not self._listening:
                self._handlers.clear()
                StopSignals._first_signal = StopSignals._visible_signal = None
                for number in STOP_SIGNAL_NUMBERS:
                    if number == HANGUP_SIGNAL and signal.getsignal(number) == signal.SIG_IGN:
                        continue  # nohup: the run is meant to outlive its terminal
                    self._handlers[number] = signal.signal(number, self._record_signal)
            self._listening.append(self)

    def restore_handlers(self, ignore_sigterm: bool) -> None:
        """Restore the previous handlers after the last run. With `ignore_sigterm`, SIGTERM is ignored afterwards: a
        launcher sends it to ranks that are still reporting why they end."""
        if self not in self._listening:
            return
        if self._listening == [self]:  # a signal that arrives now is recorded, and is not a second one
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_IGN if ignore_sigterm and number == signal.SIGTERM else handler)
        self._last_seen_signal = (
            StopSignals._first_signal
        )  # also a signal that is held back, which must not be lost with the last listener
        self._listening.remove(self)

    @classmethod
    def _record_signal(cls, number: int, frame: FrameType | None) -> None:
        if StopSignals._first_signal is not None and cls._listening:  # asked twice: at once
            raise KeyboardInterrupt
        StopSignals._first_signal = number


@contextlib.contextmanager
def exit_on_sigterm(command_name: str) -> Iterator[None]:
    """Within the block SIGTERM ends a command that starts several runs, with one sentence. During a run in this process
    `StopSignals` handles it instead; worker processes end by themselves when the command does."""

    def exit_now(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{command_name}: stopped by SIGTERM; the same command continues the runs\n".encode())
        os._exit(128 + number)  # not by an exception, after which a pool of processes waits for all of its tasks

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGTERM, exit_now)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
