"""The events of one replicate whose clients share the server's links: transfers slow each other down.

A task is a download, a time that does not depend on others, and an upload. Transfers in one direction share the
capacity of the server's link by max–min fairness: each has the same rate, unless its client's own link is slower, and
what such clients leave is divided among the others (processor sharing).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace

import numpy as np

from fedsim.run.event_queue import EventQueue, ServerStepEvents, StartCandidates

DOWNLOADING, COMPUTING, UPLOADING, FINISHED = range(4)  # stages of a task
SIMULTANEITY_FACTOR = 1 + 1e-12  # transfers that need this much more time than the first one end with it


@dataclass
class ClientTask:
    """The remaining work of a client in flight.

    Attributes:
        bytes_down, bytes_up: bytes.
        down_rate, up_rate: of its own links.
        compute_seconds: between the transfers.
        will_fail: whether its work is lost at the end of what is described here.
        stage: which of these it is at.
    """

    bytes_down: float
    compute_seconds: float
    bytes_up: float
    down_rate: float
    up_rate: float
    will_fail: bool = False
    stage: int = DOWNLOADING

    @classmethod
    def from_candidate(cls, task_candidates: StartCandidates, candidate_position: int) -> ClientTask:
        """The task of the candidate at this position, which ends where the client fails."""
        transfers, fraction = task_candidates.transfers, float(task_candidates.failure_fraction[candidate_position])
        assert transfers is not None
        link_rates = float(transfers.down_rate[candidate_position]), float(transfers.up_rate[candidate_position])
        down_seconds, up_seconds = transfers.bytes_down / link_rates[0], transfers.bytes_up / link_rates[1]  # seconds
        duration = float(task_candidates.duration_seconds[candidate_position])
        seconds = max(duration - down_seconds - up_seconds, 0.0)
        if not math.isfinite(fraction):
            return cls(transfers.bytes_down, seconds, transfers.bytes_up, *link_rates)
        until_failure = fraction * (down_seconds + seconds + up_seconds)
        down_seconds = min(down_seconds, until_failure)
        seconds = min(seconds, until_failure - down_seconds)
        up_seconds = max(until_failure - down_seconds - seconds, 0.0)
        return cls(
            down_seconds * link_rates[0] if down_seconds else 0.0,
            seconds,
            up_seconds * link_rates[1] if up_seconds else 0.0,
            *link_rates,
            will_fail=True,
        )


def max_min_fair_rates(client_rates: np.ndarray, capacity: float) -> np.ndarray:
    """Return the max–min fair rates [n] of transfers whose clients' links have these rates, on a link of this
    capacity."""
    order = np.argsort(client_rates)
    rates, available = np.empty(len(client_rates)), capacity
    for position, k in enumerate(order):
        rates[k] = min(client_rates[k], available / (len(order) - position))
        available -= rates[k]
    return rates


@dataclass
class SharedLink:
    """The server's link in one direction.

    Attributes:
        capacity: bytes per second.
        remaining_bytes: client → bytes of its transfer.
        client_rates: client → bytes per second of its own link.
    """

    capacity: float
    remaining_bytes: dict[int, float] = field(default_factory=dict)
    client_rates: dict[int, float] = field(default_factory=dict)
    fair_rates: dict[int, float] | None = None

    def begin(self, client: int, size: float, own_rate: float) -> None:
        """Start a transfer."""
        self.remaining_bytes[client], self.client_rates[client], self.fair_rates = size, own_rate, None

    def _transfer_rates(self) -> dict[int, float]:
        if self.fair_rates is None:
            clients = list(self.remaining_bytes)
            client_rates = np.array([self.client_rates[client] for client in clients])
            self.fair_rates = dict(zip(clients, max_min_fair_rates(client_rates, self.capacity).tolist(), strict=True))
        return self.fair_rates

    def seconds_to_next_completion(self) -> float:
        """Return the seconds until the next transfer is complete if no other starts; inf without transfers."""
        rates = self._transfer_rates()
        return min((size / rates[client] for client, size in self.remaining_bytes.items()), default=math.inf)

    def advance(self, seconds: float, to_next_end: bool) -> list[int]:
        """Advance time, at most until the next transfer is complete; return the clients whose transfers are complete.

        Args:
            seconds: how much.
            to_next_end: that is when the next transfer is complete, but for rounding.
        """
        current_rates = self._transfer_rates()
        bound = max(seconds, self.seconds_to_next_completion()) * SIMULTANEITY_FACTOR if to_next_end else -1.0
        ended_clients = [
            client for client, size in self.remaining_bytes.items() if size <= current_rates[client] * bound
        ]
        for client in ended_clients:
            del self.remaining_bytes[client], self.client_rates[client]
        for client in self.remaining_bytes:
            self.remaining_bytes[client] -= current_rates[client] * seconds
        if ended_clients:
            self.fair_rates = None
        return sorted(ended_clients)


@dataclass
class SharedLinkQueue(EventQueue):
    """An `EventQueue` in which the end of a task depends on concurrent transfers.

    Attributes:
        download_capacity, upload_capacity: bytes per second of the server's links; inf: not shared.
        transfer_time: virtual seconds up to which transfers have been followed.
        tasks: client → what it still has to do. The heap holds those that are done, until the server notices.
        computing_clients: (when, client) of those that are between their transfers.
    """

    download_capacity: float = math.inf
    upload_capacity: float = math.inf
    transfer_time: float = 0.0
    tasks: dict[int, ClientTask] = field(default_factory=dict)
    computing_clients: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.links = {DOWNLOADING: SharedLink(self.download_capacity), UPLOADING: SharedLink(self.upload_capacity)}

    @property
    def num_in_flight(self) -> int:
        return len(self.events) + len(self.tasks)

    def remaining_task(self, client: int) -> ClientTask:
        """Return the remaining work of a client, the rest of its transfer included."""
        task = self.tasks[client]
        if task.stage == DOWNLOADING:
            return replace(task, bytes_down=self.links[DOWNLOADING].remaining_bytes[client])
        return (
            replace(task, bytes_up=self.links[UPLOADING].remaining_bytes[client]) if task.stage == UPLOADING else task
        )

    def unfinished_tasks(self) -> list[tuple[float, int, ClientTask, float]]:
        """Return, of each task between transfers: when it ends, the client, its remaining work, and the time that this
        refers to."""
        due = {client: time for time, client in self.computing_clients}
        return [
            (due.get(client, self.transfer_time), client, self.remaining_task(client), self.transfer_time)
            for client in sorted(self.tasks)
        ]

    def restore(self, client: int, task: ClientTask, due: float) -> None:
        """Put a task back into the queue; `due` is when its time between transfers ends."""
        self.tasks[client] = task
        if task.stage == COMPUTING:
            heapq.heappush(self.computing_clients, (due, client))
        else:
            self._start_transfer(client, task)

    def advance_until_update(
        self,
        task_candidates: StartCandidates,
        target_count: int,
        max_events: int | None = None,
        deadline: float = math.inf,
    ) -> ServerStepEvents:
        self._advance_until(self.current_time)
        step = super().advance_until_update(task_candidates, target_count, max_events, deadline)
        self._advance_until(self.current_time)
        return step

    def _start_task(self, client: int, candidates: StartCandidates, position: int) -> bool:
        task = self.tasks[client] = ClientTask.from_candidate(candidates, position)
        if task.bytes_down:
            self._start_transfer(client, task)
        else:
            self._advance_stage(client)
        return task.will_fail

    def _follow_transfers(self, until: float) -> None:
        while not self.events and self._advance_transfers(until):
            pass

    def _advance_until(self, time: float) -> None:
        while self._advance_transfers(time):
            pass

    def _advance_transfers(self, until: float) -> bool:
        """Advance to the next change of a task, or to `until` if that is earlier; return whether there was a change."""
        end_times = {
            stage: self.transfer_time + link.seconds_to_next_completion() for stage, link in self.links.items()
        }
        event_time = min(*end_times.values(), self.computing_clients[0][0] if self.computing_clients else math.inf)
        event_happens = event_time <= until and math.isfinite(event_time)
        time = event_time if event_happens else until
        if math.isinf(time):
            return False
        seconds = max(time - self.transfer_time, 0.0)
        ended_transfers = [
            client
            for stage, link in self.links.items()
            for client in link.advance(seconds, to_next_end=event_happens and end_times[stage] == event_time)
        ]
        self.transfer_time = max(self.transfer_time, time)
        if event_happens:
            while self.computing_clients and self.computing_clients[0][0] <= self.transfer_time:
                ended_transfers.append(heapq.heappop(self.computing_clients)[1])
        for client in ended_transfers:
            self._advance_stage(client)
        return event_happens

    def _advance_stage(self, client: int) -> None:
        """Complete one stage of a task."""
        task = self.tasks[client]
        task.stage += 1
        if task.stage == COMPUTING:
            heapq.heappush(self.computing_clients, (self.transfer_time + task.compute_seconds, client))
        elif task.stage == UPLOADING and task.bytes_up:
            self._start_transfer(client, task)
        else:  # a shared link transfers nothing or everything
            del self.tasks[client]
            heapq.heappush(self.events, (self.transfer_time, client, task.will_fail))

    def _start_transfer(self, client: int, task: ClientTask) -> None:
        size, rate = (task.bytes_down, task.down_rate) if task.stage == DOWNLOADING else (task.bytes_up, task.up_rate)
        self.links[task.stage].begin(client, size, rate)
