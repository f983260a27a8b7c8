"""Which of the selected clients answer in time, and with how many local steps; keeps virtual time."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np

from fedsim.availability.clock import Clock, Work
from fedsim.availability.clock.clock import Times
from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort
from fedsim.core.memory import Memory
from fedsim.data.samples import Workload
from fedsim.run.traffic import Traffic
from fedsim.trainer import Trainer


@dataclass
class RoundDurations:
    """How long n clients take for the parts of a round.

    Attributes:
        client_times: of links and samples.
        needed_seconds: [n] seconds from the start to the arrival; inf where a client does no step.
        is_waited_for: [n] bool: does the server wait for the client?
        steps: [n] that it does.
        minimum_samples: [n] those without which it is late.
        compute_seconds: [n] seconds of local steps.
    """

    client_times: Times
    needed_seconds: np.ndarray
    is_waited_for: np.ndarray
    steps: np.ndarray
    minimum_samples: np.ndarray
    compute_seconds: np.ndarray


class RoundClock:
    """Clock and work of a run, round by round; without either, all selected clients answer with all of their steps.

    Args:
        clock, work_model: see there.
        trainer: which knows what a round asks of clients.
        traffic: what a client gets and sends.

    Attributes:
        seconds: [R] virtual ones so far.
        joules: [R] energy that the clients spent so far, if the clock measures it. A client whose update is late or
            lost spends that of its download and of its local steps.
        late_clients: [R] clients that were sent the model in the last round and do not count in it.
        num_dropped_late: [R] those of them that never will.
        arrival_delays: [R·m] how many rounds later they arrive, where the clock delivers what is late.
    """

    def __init__(self, clock: Clock, work_model: Work, trainer: Trainer, traffic: Traffic) -> None:
        self.clock, self.work_model, self.batches, self.traffic = clock, work_model, trainer.batches, traffic
        if trainer.local_rule.indivisible and (
            work_model.active or (clock.deadline is not None and clock.late == "partial")
        ):
            raise ConfigError(
                f"the local steps of local={type(trainer.local_rule).__name__} as configured belong together, and "
                "clients "
                "would do a part of them; set work=all and clock.late=drop, or another rule"
            )
        self.start_round()

    def setup(self) -> None:
        """Set up clock and work for the clients, once before the first round."""
        self.clock.setup(self.batches.federation)
        self.work_model.setup(self.batches.federation, self.batches.local_work)

    def start_round(
        self, seconds: list[float] | None = None, memory: Memory | None = None, joules: list[float] | None = None
    ) -> None:
        """Set the time before the first round, or after so many virtual seconds and joules [R]; `memory` is the
        run's."""
        replicates = self.batches.federation.num_replicates
        self.seconds = np.array(seconds) if seconds else np.zeros(replicates)
        self.joules = np.array(joules) if joules else np.zeros(replicates)
        self.late_clients, self.num_dropped_late = (
            np.zeros(replicates, dtype=np.int64),
            np.zeros(replicates, dtype=np.int64),
        )
        self.arrival_delays = np.zeros(replicates * self.batches.federation.clients, dtype=np.int64)

    def __call__(self, requested_cohort: Cohort, t: int) -> Cohort:
        """Return the selected clients that count, with their numbers of steps."""
        clock, host_index = self.clock, requested_cohort.host_index
        if not (clock.active or self.work_model.active):
            return requested_cohort
        load = self.batches.load(requested_cohort)
        steps = self._steps_of_work(t, host_index.virtual_clients, load) if self.work_model.active else load.steps
        if not clock.active:
            return Cohort(
                requested_cohort.federation, host_index.rows, host_index.multiplicity, host_index.probability, t, steps
            )
        times = self._client_times(t, host_index.virtual_clients)
        steps, samples, minimum_samples = self._work_within_deadline(times, load, steps)
        is_waited_for = host_index.multiplicity > 0  # not for clients that compute without participating
        compute_seconds = samples * times.sample
        needed_seconds = np.where(steps > 0, times.link + compute_seconds, np.inf)
        durations = RoundDurations(times, needed_seconds, is_waited_for, steps, minimum_samples, compute_seconds)
        return self._participating_cohort(requested_cohort, durations, t)

    def _add_energy(self, cohort: Cohort, compute_seconds: np.ndarray, is_sending: np.ndarray) -> None:
        """Add the energy of clients that receive the model, compute for some seconds [n], and send an update [n]."""
        if not self.clock.knows_energy_needs:
            return
        virtual_clients = cohort.host_index.virtual_clients
        joules = self.clock.energy(
            virtual_clients.copy(), compute_seconds, self.traffic.bytes_down, is_sending * self.traffic.bytes_up
        )
        replicate_joules = np.bincount(virtual_clients // cohort.federation.clients, joules, minlength=len(self.joules))
        self.joules += cohort.ranks.all_reduce_host(replicate_joules)[0]

    def _steps_of_work(self, t: int, virtual_clients: np.ndarray, local_workload: Workload) -> np.ndarray:
        """Return the numbers of local steps of clients, [n], at least one where some are planned."""
        planned_load = dataclasses.replace(local_workload, steps=local_workload.steps.copy())
        steps = self.work_model.steps(t, virtual_clients.copy(), planned_load)
        label = f"work={type(self.work_model).__name__}: steps({t}, …)"
        checks.check_number_per_client(
            label, steps, len(virtual_clients), whole_numbers=True, minimum=min(1, local_workload.steps.min(initial=1))
        )
        return steps.astype(np.int64)

    def _client_times(self, t: int, virtual_clients: np.ndarray) -> Times:
        """Return how long clients take in round t."""
        client_times = self.clock.times(t, virtual_clients.copy(), self.traffic.bytes_down, self.traffic.bytes_up)
        label = f"clock={type(self.clock).__name__}: times({t}, …)"
        if not isinstance(client_times, Times):
            raise ConfigError(f"{label} must return Times(link, sample), and returns {type(client_times).__name__}")
        for name, values in (("link", client_times.link), ("sample", client_times.sample)):
            checks.check_number_per_client(f"{label}.{name}", values, len(virtual_clients))
        return client_times

    def _participating_cohort(self, requested_cohort: Cohort, client_durations: RoundDurations, t: int) -> Cohort:
        """Return the selected clients that count, and advance virtual time."""
        clock, host_index = self.clock, requested_cohort.host_index
        needed_seconds, steps = client_durations.needed_seconds, client_durations.steps
        if clock.delivers_late_rows:
            self._add_energy(requested_cohort, client_durations.compute_seconds, np.ones(len(needed_seconds)))
            return self._schedule_late_arrivals(requested_cohort, needed_seconds, steps)
        counted_mask = (
            self._counted_mask(requested_cohort, needed_seconds, client_durations.is_waited_for)
            | ~client_durations.is_waited_for
        )
        self._add_energy(requested_cohort, client_durations.compute_seconds, counted_mask)
        in_time_probability: float | np.ndarray = 1.0
        if clock.may_drop_clients:
            in_time_probability = clock.finish_probability(
                client_durations.client_times, host_index.virtual_clients.copy(), client_durations.minimum_samples
            )
            checks.check_number_per_client(
                f"clock={type(clock).__name__}: chance", in_time_probability, len(host_index.virtual_clients)
            )
        cohort = Cohort(
            requested_cohort.federation,
            host_index.rows,
            host_index.multiplicity,
            host_index.probability * in_time_probability,
            t,
            steps,
        )
        return cohort if counted_mask.all() else cohort.subset(np.flatnonzero(counted_mask))

    def _schedule_late_arrivals(
        self, requested_cohort: Cohort, needed_seconds: np.ndarray, steps: np.ndarray
    ) -> Cohort:
        """Return all clients; a client that needs more than a round arrives in the round in which it is done."""
        assert self.clock.deadline is not None
        host_index, replicates = requested_cohort.host_index, len(self.seconds)
        rounds_late = np.maximum(np.ceil(needed_seconds / self.clock.deadline) - 1, 0).astype(np.int64)
        self.arrival_delays[host_index.virtual_clients] = rounds_late
        late_mask = (rounds_late > 0) & (host_index.multiplicity > 0)
        late_counts = np.bincount(
            host_index.virtual_clients[late_mask] // requested_cohort.federation.clients, minlength=replicates
        )
        self.late_clients = requested_cohort.ranks.all_reduce_host(late_counts)[0].astype(np.int64)
        self.seconds += self.clock.server + self.clock.deadline
        return Cohort(
            requested_cohort.federation,
            host_index.rows,
            host_index.multiplicity,
            host_index.probability,
            requested_cohort.round,
            steps,
        )

    def _work_within_deadline(
        self, client_times: Times, load: Workload, steps: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return [n] each: the steps that are done, the samples they use, and the steps without which a client is
        late."""
        partial_workload = Workload(load.num_samples, load.size, load.per_pass, steps, load.short_last).batch_sizes()
        if self.clock.late != "partial" or self.clock.deadline is None or not partial_workload.shape[1]:
            samples = partial_workload.sum(1)
            return steps, samples, samples
        cumulative_samples = np.cumsum(partial_workload, axis=1)
        fits_mask = (
            client_times.link[:, None] + cumulative_samples * client_times.sample[:, None] <= self.clock.deadline
        )
        completed_steps = np.minimum(fits_mask.sum(1), steps)
        return (
            completed_steps,
            np.where(np.arange(partial_workload.shape[1]) < completed_steps[:, None], partial_workload, 0).sum(1),
            partial_workload[:, 0],
        )

    def _counted_mask(
        self, requested_cohort: Cohort, needed_seconds: np.ndarray, is_waited_for: np.ndarray
    ) -> np.ndarray:
        """Return which clients count [n], given how long each takes and which the server waits for; advance virtual
        time."""
        clock = self.clock
        (seconds_of_clients, waited_mask), virtual_clients, bounds = requested_cohort.all_gather_host(
            np.stack([needed_seconds, is_waited_for.astype(float)])
        )
        deadline = np.inf if clock.deadline is None else clock.deadline
        counted_mask = np.zeros(len(virtual_clients), dtype=bool)
        for r, (a, b) in enumerate(itertools.pairwise(bounds)):
            candidates = a + np.flatnonzero(waited_mask[a:b])
            order = candidates[np.argsort(seconds_of_clients[candidates], kind="stable")]
            arrivals = order[seconds_of_clients[order] <= deadline][: clock.first]
            counted_mask[arrivals] = True
            self.late_clients[r] = self.num_dropped_late[r] = len(candidates) - len(arrivals)
            is_complete = len(arrivals) == min(len(candidates), clock.first or len(candidates)) and len(candidates) > 0
            round_seconds = seconds_of_clients[arrivals[-1]] if is_complete else deadline
            self.seconds[r] += clock.server + (round_seconds if np.isfinite(round_seconds) else 0.0)
        return counted_mask[np.searchsorted(virtual_clients, requested_cohort.host_index.virtual_clients)]
