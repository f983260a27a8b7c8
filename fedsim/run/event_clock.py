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
from fedsim.run.event_queue import Candidates, EventQueue
from fedsim.run.round_clock import Durations, RoundClock
from fedsim.run.traffic import Traffic
from fedsim.trainer import Trainer


class EventClock(RoundClock):
    """Under a synchronous server, who of the selected clients arrives in time. Under an asynchronous one, who starts
    from the model of the round, and who arrives before the server's next step; the queues are in `Memory.queue`, and
    so in the checkpoint.

    Args:
        clock, work, trainer, traffic: see `RoundClock`.

    Attributes:
        arrived: [k] virtual clients with whose updates the server steps in this round, sorted.
    """

    clock: Events

    def __init__(self, clock: Events, work: Work, trainer: Trainer, traffic: Traffic) -> None:
        super().__init__(clock, work, trainer, traffic)

    def begin(self, seconds: list[float] | None = None, memory: Memory | None = None) -> None:
        super().begin(seconds, memory)
        self.memory = Memory() if memory is None else memory
        self.arrived_clients = np.zeros(0, dtype=np.int64)

    def _participating_cohort(self, requested: Cohort, durations: Durations, t: int) -> Cohort:
        if not self.clock.asynchronous:
            return super()._participating_cohort(requested, durations, t)
        clock, host, federation = self.clock, requested.host, requested.federation
        finishing_positions = np.flatnonzero(np.isfinite(durations.needed))
        order = finishing_positions[self._start_order(t, host.virtual[finishing_positions])]
        order = order[np.argsort(host.virtual[order] // federation.clients, kind="stable")]  # by replicate
        virtual = host.virtual[order]
        failure = clock.failure_times(t, virtual)
        queues = self._queues()
        bounds = np.searchsorted(virtual // federation.clients, np.arange(len(queues) + 1))
        started, arrived, target = list[int](), list[int](), clock.target
        assert target is not None
        for r, (queue, (a, b)) in enumerate(zip(queues, itertools.pairwise(bounds), strict=True)):
            candidates = Candidates(virtual[a:b], durations.needed[order[a:b]], failure[a:b])
            step = queue.until_update(candidates, target, clock.concurrency, self._deadline)
            queue.current_time += clock.server if step.used else 0.0
            self.seconds[r], self.num_cut_off[r] = queue.current_time, len(step.will_fail)
            self.late_clients[r] = len(set(step.started) - set(step.used))
            started += sorted(set(step.started) - set(step.will_fail))
            arrived += step.used
        self._remember(queues)
        self.arrived_clients = np.sort(np.array(arrived, dtype=np.int64))
        starting = Cohort(federation, host.rows, host.count, host.probability, t, durations.steps)
        return starting.subset(np.searchsorted(host.virtual, np.array(started, dtype=np.int64)))

    def _start_order(self, t: int, virtual: np.ndarray) -> np.ndarray:
        """The clock's order, which names each position once."""
        order = self.clock.start_order(t, virtual.copy())
        if not np.array_equal(np.sort(np.asarray(order)), np.arange(len(virtual))):
            raise ConfigError(
                f"clock={type(self.clock).__name__}: start_order({t}, …) must name each of {len(virtual)} positions "
                "once; give np.argsort of a number for each client"
            )
        return order

    def _wait(self, requested: Cohort, needed: np.ndarray, waited: np.ndarray) -> np.ndarray:
        """[n] who of a synchronous round counts: the server's step is the event that all have arrived."""
        clock, virtual = self.clock, requested.host.virtual
        failure = clock.failure_times(requested.round, virtual)
        counts = np.zeros(len(virtual), dtype=bool)
        for r, (a, b) in enumerate(itertools.pairwise(requested.bounds)):
            positions = a + np.flatnonzero(waited[a:b])
            queue = EventQueue()
            target = min(len(positions), clock.first or len(positions))
            candidates = Candidates(positions, needed[positions], failure[positions])
            step = queue.until_update(candidates, target, deadline=self._deadline)
            arrived = step.used or queue.buffer  # where some failed, those that have arrived
            counts[arrived] = True
            self.late_clients[r] = self.num_cut_off[r] = len(positions) - len(arrived)
            waits_forever = len(arrived) < target and bool(
                np.isinf(needed[positions]).any()
            )  # and without a deadline, as Devices
            self.seconds[r] += clock.server + (
                0.0 if waits_forever and math.isinf(self._deadline) else queue.current_time
            )
        return counts

    @property
    def _deadline(self) -> float:
        return math.inf if self.clock.deadline is None else self.clock.deadline

    def _queues(self) -> list[EventQueue]:
        """One for each replicate, as the memory has them."""
        queues = [EventQueue(float(seconds)) for seconds in self.seconds]
        if not self.memory.queue:
            return queues
        columns = (self.memory.queue[name].tolist() for name in ("at", "virtual", "fails", "arrived"))
        for event_time, client, fails, arrived in zip(
            *columns, strict=True
        ):  # in the order of a heap, replicate by replicate
            queue = queues[client // self.batches.federation.clients]
            if arrived:
                queue.buffer.append(client)
            else:
                queue.heap.append((event_time, client, fails))
        return queues

    def _remember(self, queues: list[EventQueue]) -> None:
        in_flight = [entry for queue in queues for entry in sorted(queue.heap)]
        waiting = [(queue.current_time, client, False) for queue in queues for client in queue.buffer]
        event_time, virtual, fails = zip(*in_flight, *waiting, strict=True) if in_flight or waiting else ((), (), ())
        self.memory.queue = {
            "at": torch.tensor(event_time, dtype=torch.float64),
            "virtual": torch.tensor(virtual, dtype=torch.int64),
            "fails": torch.tensor(fails, dtype=torch.bool),
            "arrived": torch.arange(len(event_time)) >= len(in_flight),
        }
