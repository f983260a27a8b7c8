"""The events of one replicate: a heap of the times at which clients in flight finish or fail."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

QueueEntry = tuple[float, int, bool]  # when, which virtual client, whether it fails then


@dataclass
class Candidates:
    """Attributes (n clients that may start, in the order in which they do):

    virtual: [n] who.
    duration: [n] seconds from start to arrival; inf where the client would not finish.
    failure: [n] the fraction of it after which the client fails; inf where it does not.
    """

    virtual: np.ndarray
    duration: np.ndarray
    failure: np.ndarray


@dataclass
class Step:
    """What happened until the server updated its model; virtual clients in the order of time.

    Attributes:
        started: those that received the model, failing ones included.
        will_fail: those of them whose work will be lost.
        used: those whose updates the server steps with; none where its buffer is not full yet.
    """

    started: list[int] = field(default_factory=list)
    will_fail: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)


@dataclass
class EventQueue:
    """Attributes:

    now: virtual seconds.
    heap: the clients in flight, by the time at which each finishes or fails.
    buffer: clients whose updates wait at the server for others.
    """

    current_time: float = 0.0
    heap: list[QueueEntry] = field(default_factory=list)
    buffer: list[int] = field(default_factory=list)

    def until_update(
        self, candidates: Candidates, target: int, limit: int | None = None, deadline: float = math.inf
    ) -> Step:
        """Let time pass until the server updates its model: at the arrival that makes `target`, or when `deadline`
        seconds have passed. Where nobody is left in flight before, its buffer waits for the next call.

        Args:
            candidates: clients that may start, none of which is in flight or in the buffer.
            target: number of arrivals.
            limit: largest number of clients in flight; None: no limit.
            deadline: seconds from now. Arrivals at that time count. A step in which nobody is in flight lasts so long.
        """
        step, deadline_time, waiting = Step(), self.current_time + deadline, self._entries(candidates)
        has_clients = self._start(step, waiting, limit) or bool(self.heap)
        time_over = not has_clients and math.isfinite(deadline_time)
        while self.heap and len(self.buffer) < target and not time_over:
            event_time, client, fails = self.heap[0]
            if time_over := event_time > deadline_time or math.isinf(event_time):
                break
            heapq.heappop(self.heap)
            self.current_time = max(self.current_time, event_time)
            if not fails:
                self.buffer.append(client)
            if len(self.buffer) < target:
                self._start(step, waiting, limit)
        if time_over:
            self.current_time = deadline_time if math.isfinite(deadline_time) else self.current_time
        if time_over or len(self.buffer) >= target:
            step.used, self.buffer = self.buffer, []
        return step

    @staticmethod
    def _entries(candidates: Candidates) -> Iterator[QueueEntry]:
        """(seconds from the start, client, whether it fails then) of each."""
        fails = np.isfinite(candidates.failure)
        fraction = np.where(fails, candidates.failure, 1.0)
        seconds = (candidates.duration * fraction).tolist()
        return zip(seconds, candidates.virtual.tolist(), fails.tolist(), strict=True)

    def _start(self, step: Step, waiting: Iterator[QueueEntry], limit: int | None) -> bool:
        """Fill the free places; whether anybody started."""
        num_started_before = len(step.started)
        while limit is None or len(self.heap) < limit:
            entry = next(waiting, None)
            if entry is None:
                break
            seconds, client, fails = entry
            heapq.heappush(self.heap, (self.current_time + seconds, client, fails))
            step.started.append(client)
            if fails:
                step.will_fail.append(client)
        return len(step.started) > num_started_before
