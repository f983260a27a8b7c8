"""What was there before a run listens again once it has ended, whatever arrives meanwhile."""

from __future__ import annotations

import signal

import pytest

from fedsim.run import stopping
from fedsim.run.stopping import STOP_SIGNAL_NUMBERS, StopSignals


@pytest.mark.parametrize("leaving", [True, False])
def test_a_signal_while_a_run_lets_go_does_not_count_as_a_second(
    leaving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM just before the first handler is put back, as a launcher sends it to ranks that have lost another."""
    before = [signal.getsignal(number) for number in STOP_SIGNAL_NUMBERS]
    put_back, arrived = signal.signal, []

    def slowly(number, handler):
        if not arrived:
            arrived.append(number)
            signal.raise_signal(signal.SIGTERM)
        return put_back(number, handler)

    signals = StopSignals()
    signals.install_handlers()
    monkeypatch.setattr(stopping.signal, "signal", slowly)
    try:
        signals.restore_handlers(leaving)
        assert signals.received_signal_number == signal.SIGTERM
        after = [signal.getsignal(number) for number in STOP_SIGNAL_NUMBERS]
        assert after[0] == before[0]
        assert after[1] == (signal.SIG_IGN if leaving else before[1])
    finally:
        for number, handler in zip(STOP_SIGNAL_NUMBERS, before, strict=True):
            put_back(number, handler)


def test_the_last_of_several_runs_puts_back_what_was_there() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNAL_NUMBERS]
    one, other = StopSignals(), StopSignals()
    one.install_handlers()
    other.install_handlers()
    one.restore_handlers(ignore_sigterm=False)
    signal.raise_signal(signal.SIGTERM)
    assert (one.received_signal_number, other.received_signal_number) == (None, signal.SIGTERM)
    other.restore_handlers(ignore_sigterm=False)
    assert [signal.getsignal(number) for number in STOP_SIGNAL_NUMBERS] == before
