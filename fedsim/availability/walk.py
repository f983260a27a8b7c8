"""Processes with a past: round t follows from round t − 1, and is a function of (seed, t) all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

S = TypeVar("S")


class Walk(Generic[S]):
    """The states of rounds 0, 1, …, walked from where they were last asked for; for an earlier round from the first.

    Args:
        step: the state of round t from that of round t − 1, which is None for t = 0 and must be left as it is. All that
            it draws is keyed by t.
    """

    def __init__(self, step: Callable[[S | None, int], S]) -> None:
        self._step = step
        self._round = -1
        self._state: S | None = None

    def at(self, t: int) -> S:
        """The state of round t."""
        if t < self._round:
            self._round, self._state = -1, None
        while self._round < t:
            self._state = self._step(self._state, self._round + 1)
            self._round += 1
        assert self._state is not None
        return self._state
