"""The events of one replicate: a heap of the times at which clients in flight finish or fail."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

QueueEntry = tuple[float, int, bool]  # when, which virtual client, whether it fails then


@dataclass
class TransferLoads:
    """The bytes that n clients send and receive through shared links of the server; 0 where a link is not shared.

    Attributes:
        bytes_down, bytes_up: bytes of one transfer.
        down_rate, up_rate: [n] bytes per second without other transfers.
    """

    bytes_down: float
    bytes_up: float
    down_rate: np.ndarray
    up_rate: np.ndarray


@dataclass
class StartCandidates:
    """Attributes (n clients that may start, in the order in which they do):

    virtual_clients: [n] who.
    duration_seconds: [n] seconds from start to arrival; inf where the client would not finish.
    failure_fraction: [n] the fraction of it after which the client fails; inf where it does not.
    transfers: parts of the duration that take longer beside other transfers; None: there are none.
    """

    virtual_clients: np.ndarray
    duration_seconds: np.ndarray
    failure_fraction: np.ndarray
    transfers: TransferLoads | None = None


@dataclass
class ServerStepEvents:
    """The events until the server updated its model; virtual clients in the order of time.

    Attributes:
        started_clients: those that received the model, failing ones included.
        failing_clients: those of them whose work will be lost.
        aggregated_clients: those whose updates the server steps with; none where its buffer is not full yet.
    """

    started_clients: list[int] = field(default_factory=list)
    failing_clients: list[int] = field(default_factory=list)
    aggregated_clients: list[int] = field(default_factory=list)


@dataclass
class EventQueue:
    """Attributes:

    current_time: virtual seconds.
    events: the clients in flight, by the time at which each finishes or fails.
    buffered_clients: clients whose updates wait at the server for others.
    """

    current_time: float = 0.0
    events: list[QueueEntry] = field(default_factory=list)
    buffered_clients: list[int] = field(default_factory=list)

    def advance_until_update(
        self,
        task_candidates: StartCandidates,
        target_count: int,
        max_events: int | None = None,
        deadline: float = math.inf,
    ) -> ServerStepEvents:
        """Advance time until the server updates its model: at the arrival that makes `target_count`, or after
        `deadline` seconds. If all clients in flight finish before, the buffer waits for the next call.

        Args:
            task_candidates: clients that may start, none of which is in flight or in the buffer.
            target_count: number of arrivals.
            max_events: largest number of clients in flight; None: no limit.
            deadline: seconds from now. Arrivals at that time count. A step in which nobody is in flight lasts so long.
        """
        step, deadline_time = ServerStepEvents(), self.current_time + deadline
        waiting_positions = iter(range(len(task_candidates.virtual_clients)))
        has_clients = self._start_clients(step, task_candidates, waiting_positions, max_events) or bool(
            self.num_in_flight
        )
        time_over = not has_clients and math.isfinite(deadline_time)
        while self.num_in_flight and len(self.buffered_clients) < target_count and not time_over:
            self._follow_transfers(deadline_time)
            event_time, client, has_failed = self.events[0] if self.events else (math.inf, -1, False)
            if time_over := event_time > deadline_time or math.isinf(event_time):
                break
            heapq.heappop(self.events)
            self.current_time = max(self.current_time, event_time)
            if not has_failed:
                self.buffered_clients.append(client)
            if len(self.buffered_clients) < target_count:
                self._start_clients(step, task_candidates, waiting_positions, max_events)
        if time_over:
            self.current_time = deadline_time if math.isfinite(deadline_time) else self.current_time
        if time_over or len(self.buffered_clients) >= target_count:
            step.aggregated_clients, self.buffered_clients = self.buffered_clients, []
        return step

    @property
    def num_in_flight(self) -> int:
        """The number of clients in flight."""
        return len(self.events)

    def _follow_transfers(self, end_time: float) -> None:
        """Advance time until it is certain which client in flight is the next to finish, or until this time."""

    def _start_clients(
        self,
        step: ServerStepEvents,
        task_candidates: StartCandidates,
        waiting_positions: Iterator[int],
        limit: int | None,
    ) -> bool:
        """Start candidates at these positions until no place is free; return whether any client started."""
        num_started_before = len(step.started_clients)
        while limit is None or self.num_in_flight < limit:
            position = next(waiting_positions, None)
            if position is None:
                break
            client = int(task_candidates.virtual_clients[position])
            step.started_clients.append(client)
            if self._start_task(client, task_candidates, position):
                step.failing_clients.append(client)
        return len(step.started_clients) > num_started_before

    def _start_task(self, client: int, candidates: StartCandidates, position: int) -> bool:
        """Put the client's task in flight; return whether it will fail."""
        seconds, fraction = float(candidates.duration_seconds[position]), float(candidates.failure_fraction[position])
        will_fail = math.isfinite(fraction)
        end_time = self.current_time + (seconds * fraction if will_fail else seconds)
        heapq.heappush(self.events, (end_time, client, will_fail))
        return will_fail
