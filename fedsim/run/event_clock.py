"""The clock of an event-driven run: one queue of events per replicate, and a round is one server update."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from fedsim.availability.clock import Events, Work
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.run.event_queue import EventQueue, StartCandidates, TransferLoads
from fedsim.run.round_clock import RoundClock, RoundDurations
from fedsim.run.shared_links import FINISHED, ClientTask, SharedLinkQueue
from fedsim.run.traffic import Traffic
from fedsim.trainer import Trainer


class EventClock(RoundClock):
    """Under a synchronous server, decides which of the selected clients arrive in time. Under an asynchronous one,
    decides which clients start from the model of the round, and which arrive before the server's next update. The
    queues are in `Memory.queue`, and so in checkpoints.

    Args:
        clock, work_model, trainer, traffic: see `RoundClock`.

    Attributes:
        arrived_clients: [k] virtual clients with whose updates the server steps in this round, sorted.
    """

    clock: Events

    def __init__(self, clock: Events, work_model: Work, trainer: Trainer, traffic: Traffic) -> None:
        super().__init__(clock, work_model, trainer, traffic)

    def start_round(
        self, seconds: list[float] | None = None, memory: Memory | None = None, joules: list[float] | None = None
    ) -> None:
        super().start_round(seconds, memory, joules)
        self.memory = Memory() if memory is None else memory
        self.arrived_clients = np.zeros(0, dtype=np.int64)

    def _participating_cohort(self, requested_cohort: Cohort, client_durations: RoundDurations, t: int) -> Cohort:
        if not self.clock.asynchronous:
            return super()._participating_cohort(requested_cohort, client_durations, t)
        clock, host_index, federation = self.clock, requested_cohort.host_index, requested_cohort.federation
        finishing_positions = np.flatnonzero(np.isfinite(client_durations.needed_seconds))
        order = finishing_positions[self._start_order(t, host_index.virtual_clients[finishing_positions])]
        order = order[
            np.argsort(host_index.virtual_clients[order] // federation.clients, kind="stable")
        ]  # by replicate
        virtual_clients = host_index.virtual_clients[order]
        failure_times = clock.failure_fractions(t, virtual_clients)
        needed_seconds = client_durations.needed_seconds[order] + clock.pause_seconds(t, virtual_clients)
        event_queues = self._restore_queues()
        bounds = np.searchsorted(virtual_clients // federation.clients, np.arange(len(event_queues) + 1))
        started_clients, lost_clients, arrived_clients = list[int](), list[int](), list[int]()
        target = clock.target
        assert target is not None
        for r, (queue, (a, b)) in enumerate(zip(event_queues, itertools.pairwise(bounds), strict=True)):
            transfers = self._transfer_loads(virtual_clients[a:b])
            candidates = StartCandidates(virtual_clients[a:b], needed_seconds[a:b], failure_times[a:b], transfers)
            step = queue.advance_until_update(candidates, target, clock.concurrency, self._deadline)
            queue.current_time += clock.server if step.aggregated_clients else 0.0
            self.seconds[r], self.num_dropped_late[r] = queue.current_time, len(step.failing_clients)
            self.late_clients[r] = len(set(step.started_clients) - set(step.aggregated_clients))
            started_clients += sorted(set(step.started_clients) - set(step.failing_clients))
            lost_clients += step.failing_clients
            arrived_clients += step.aggregated_clients
        self._store_queues(event_queues)
        self.arrived_clients = np.sort(np.array(arrived_clients, dtype=np.int64))
        starting_cohort = Cohort(
            federation, host_index.rows, host_index.multiplicity, host_index.probability, t, client_durations.steps
        )
        started_positions, lost_positions = (
            np.searchsorted(host_index.virtual_clients, np.array(clients, dtype=np.int64))
            for clients in (started_clients, lost_clients)
        )
        for positions, is_sending in ((started_positions, 1.0), (lost_positions, 0.0)):
            self._add_energy(
                starting_cohort.subset(positions),
                client_durations.compute_seconds[positions],
                np.full(len(positions), is_sending),
            )
        return starting_cohort.subset(started_positions)

    def _start_order(self, t: int, virtual_clients: np.ndarray) -> np.ndarray:
        """Return the clock's order of starts, which names each position once."""
        start_positions = self.clock.start_order(t, virtual_clients.copy())
        if not np.array_equal(np.sort(np.asarray(start_positions)), np.arange(len(virtual_clients))):
            raise ConfigError(
                f"clock={type(self.clock).__name__}: start_order({t}, …) must name each of "
                f"{len(virtual_clients)} positions "
                "once; give np.argsort of a number for each client"
            )
        return start_positions

    def _counted_mask(
        self, requested_cohort: Cohort, needed_seconds: np.ndarray, is_waited_for: np.ndarray
    ) -> np.ndarray:
        """Return which clients of a synchronous round count, [n]: the server updates its model once all of them have
        arrived."""
        clock, virtual_clients = self.clock, requested_cohort.host_index.virtual_clients
        failure_times = clock.failure_fractions(requested_cohort.round, virtual_clients)
        needed_seconds = needed_seconds + clock.pause_seconds(requested_cohort.round, virtual_clients)
        counted_mask = np.zeros(len(virtual_clients), dtype=bool)
        for r, (a, b) in enumerate(itertools.pairwise(requested_cohort.replicate_bounds)):
            waiting_positions = a + np.flatnonzero(is_waited_for[a:b])
            event_queue = self._make_empty_queue()
            target_count = min(len(waiting_positions), clock.first or len(waiting_positions))
            transfers = self._transfer_loads(virtual_clients[waiting_positions])
            candidates = StartCandidates(
                waiting_positions, needed_seconds[waiting_positions], failure_times[waiting_positions], transfers
            )
            step = event_queue.advance_until_update(candidates, target_count, deadline=self._deadline)
            arrived_clients = (
                step.aggregated_clients or event_queue.buffered_clients
            )  # if some failed, those that have arrived
            counted_mask[arrived_clients] = True
            self.late_clients[r] = self.num_dropped_late[r] = len(waiting_positions) - len(arrived_clients)
            waits_forever = len(arrived_clients) < target_count and bool(
                np.isinf(needed_seconds[waiting_positions]).any()
            )  # and without a deadline, as Devices
            self.seconds[r] += clock.server + (
                0.0 if waits_forever and math.isinf(self._deadline) else event_queue.current_time
            )
        return counted_mask

    @property
    def _deadline(self) -> float:
        return math.inf if self.clock.deadline is None else self.clock.deadline

    def _transfer_loads(self, virtual_clients: np.ndarray) -> TransferLoads | None:
        """Return what these virtual clients send and receive through shared links."""
        if not self.clock.shares_links:
            return None
        down = 0.0 if self.clock.shared_down is None else float(self.traffic.bytes_down)
        up = 0.0 if self.clock.shared_up is None else float(self.traffic.bytes_up)
        with np.errstate(divide="ignore"):
            return TransferLoads(down, up, *(1 / byte[virtual_clients] for byte in self.clock.byte))

    def _make_empty_queue(self, seconds: float = 0.0) -> EventQueue:
        """Return a queue without clients in flight, at so many virtual seconds."""
        if not self.clock.shares_links:
            return EventQueue(seconds)
        down, up = (math.inf if rate is None else rate for rate in (self.clock.shared_down, self.clock.shared_up))
        return SharedLinkQueue(seconds, download_capacity=down, upload_capacity=up, transfer_time=seconds)

    def _restore_queues(self) -> list[EventQueue]:
        """Return the queues of all replicates, as they are in the memory."""
        event_queues = [self._make_empty_queue(float(seconds)) for seconds in self.seconds]
        if not self.memory.queue:
            return event_queues
        columns = (self.memory.queue[name].tolist() for name in ("at", "virtual", "fails", "arrived"))
        stages = self.memory.queue.get("stage")
        for k, (event_time, client, has_failed, has_arrived) in enumerate(
            zip(*columns, strict=True)
        ):  # sorted like a heap, replicate by replicate
            event_queue = event_queues[client // self.batches.federation.clients]
            if has_arrived:
                event_queue.buffered_clients.append(client)
            elif stages is not None and stages[k] < FINISHED:
                assert isinstance(event_queue, SharedLinkQueue)
                self._restore_tasks(event_queue, k)
            else:
                event_queue.events.append((event_time, client, has_failed))
        return event_queues

    def _restore_tasks(self, event_queue: SharedLinkQueue, k: int) -> None:
        """Put the task of entry k of the memory back into its queue."""
        queue_entry = {name: value[k].item() for name, value in self.memory.queue.items()}
        client = int(queue_entry["virtual"])
        transfers = self._transfer_loads(np.array([client]))
        assert transfers is not None
        rates = float(transfers.down_rate[0]), float(transfers.up_rate[0])
        sizes = float(queue_entry["down"]), float(queue_entry["seconds"]), float(queue_entry["up"])
        event_queue.transfer_time = float(queue_entry["followed"])
        event_queue.restore(
            client,
            ClientTask(*sizes, *rates, bool(queue_entry["fails"]), int(queue_entry["stage"])),
            float(queue_entry["at"]),
        )

    def _store_queues(self, queues: list[EventQueue]) -> None:
        in_flight = [entry for queue in queues for entry in sorted(queue.events)]
        buffered_entries = [
            (queue.current_time, client, False) for queue in queues for client in queue.buffered_clients
        ]
        unfinished_tasks = [
            entry for queue in queues if isinstance(queue, SharedLinkQueue) for entry in queue.unfinished_tasks()
        ]
        unfinished_entries = [(due_time, client, task.will_fail) for due_time, client, task, _ in unfinished_tasks]
        queue_entries = [*in_flight, *unfinished_entries, *buffered_entries]
        event_time, virtual_clients, has_failed = zip(*queue_entries, strict=True) if queue_entries else ((), (), ())
        self.memory.queue = {
            "at": torch.tensor(event_time, dtype=torch.float64),
            "virtual": torch.tensor(virtual_clients, dtype=torch.int64),
            "fails": torch.tensor(has_failed, dtype=torch.bool),
            "arrived": torch.arange(len(event_time)) >= len(queue_entries) - len(buffered_entries),
        }
        if self.clock.shares_links:
            tasks = slice(len(in_flight), len(in_flight) + len(unfinished_tasks))
            numbers = {
                "stage": [task.stage for _, _, task, _ in unfinished_tasks],
                "down": [task.bytes_down for _, _, task, _ in unfinished_tasks],
                "seconds": [task.compute_seconds for _, _, task, _ in unfinished_tasks],
                "up": [task.bytes_up for _, _, task, _ in unfinished_tasks],
                "followed": [transfer_time for *_, transfer_time in unfinished_tasks],
            }
            for name, values in numbers.items():
                column = torch.full((len(queue_entries),), FINISHED if name == "stage" else 0.0, dtype=torch.float64)
                column[tasks] = torch.tensor(values, dtype=torch.float64)
                self.memory.queue[name] = column
