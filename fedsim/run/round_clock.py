"""Who of those that were asked answers in time, and with how much of the work done; virtual time goes by."""

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
class Durations:
    """What a round takes of n clients.

    Attributes:
        times: of links and samples.
        needed: [n] seconds from the start to the arrival; inf where a client does no step.
        waited: [n] bool: does the server wait for the client?
        steps: [n] that it does.
        minimum_samples: [n] those without which it is late.
    """

    times: Times
    needed: np.ndarray
    waited: np.ndarray
    steps: np.ndarray
    minimum_samples: np.ndarray


class RoundClock:
    """Clock and work of a run, round after round; without either, everybody answers with all of it.

    Args:
        clock, work: see there.
        trainer: which knows what a round asks of clients.
        traffic: what a client gets and sends.

    Attributes:
        seconds: [R] virtual ones so far.
        late_clients: [R] clients that were sent the model in the last round and do not count in it.
        cut: [R] those of them that never will.
        behind: [R·m] how many rounds later they arrive, where the clock delivers what is late.
    """

    def __init__(self, clock: Clock, work: Work, trainer: Trainer, traffic: Traffic) -> None:
        self.clock, self.work, self.batches, self.traffic = clock, work, trainer.batches, traffic
        if trainer.rule.indivisible and (work.active or (clock.deadline is not None and clock.late == "partial")):
            raise ConfigError(
                f"the local steps of local={type(trainer.rule).__name__} as configured belong together, and clients "
                "would do a part of them; give work=all and clock.late=drop, or another rule"
            )
        self.begin()

    def setup(self) -> None:
        """Set clock and work up for the clients: once, before the first round."""
        self.clock.setup(self.batches.federation)
        self.work.setup(self.batches.federation, self.batches.work)

    def begin(self, seconds: list[float] | None = None, memory: Memory | None = None) -> None:
        """Before the first round, or after so many virtual seconds [R]; `memory` is the run's."""
        replicates = self.batches.federation.replicates
        self.seconds = np.array(seconds) if seconds else np.zeros(replicates)
        self.late_clients, self.num_cut_off = (
            np.zeros(replicates, dtype=np.int64),
            np.zeros(replicates, dtype=np.int64),
        )
        self.rounds_behind = np.zeros(replicates * self.batches.federation.clients, dtype=np.int64)

    def __call__(self, requested: Cohort, t: int) -> Cohort:
        """Those of the asked who count, with the steps that they do."""
        clock, host = self.clock, requested.host
        if not (clock.active or self.work.active):
            return requested
        load = self.batches.load(requested)
        steps = self._steps_of_work(t, host.virtual, load) if self.work.active else load.steps
        if not clock.active:
            return Cohort(requested.federation, host.rows, host.count, host.probability, t, steps)
        times = self._times(t, host.virtual)
        steps, samples, minimum_samples = self._steps_in_time(times, load, steps)
        waited = host.count > 0  # for whoever computes without taking part nobody waits
        needed = np.where(steps > 0, times.link + samples * times.sample, np.inf)
        return self._participating_cohort(requested, Durations(times, needed, waited, steps, minimum_samples), t)

    def _steps_of_work(self, t: int, virtual: np.ndarray, load: Workload) -> np.ndarray:
        """[n] the steps that clients do, at least one where some are asked."""
        planned = dataclasses.replace(load, steps=load.steps.copy())
        steps = self.work.steps(t, virtual.copy(), planned)
        label = f"work={type(self.work).__name__}: steps({t}, …)"
        checks.number_per_client(label, steps, len(virtual), whole=True, minimum=min(1, load.steps.min(initial=1)))
        return steps.astype(np.int64)

    def _times(self, t: int, virtual: np.ndarray) -> Times:
        """What clients take in round t."""
        times = self.clock.times(t, virtual.copy(), self.traffic.down, self.traffic.up)
        label = f"clock={type(self.clock).__name__}: times({t}, …)"
        if not isinstance(times, Times):
            raise ConfigError(f"{label} must return Times(link, sample), and returns {type(times).__name__}")
        for name, values in (("link", times.link), ("sample", times.sample)):
            checks.number_per_client(f"{label}.{name}", values, len(virtual))
        return times

    def _participating_cohort(self, requested: Cohort, durations: Durations, t: int) -> Cohort:
        """Those of the asked who count; time goes by."""
        clock, host = self.clock, requested.host
        needed, steps = durations.needed, durations.steps
        if clock.delivers_late_rows:
            return self._tick(requested, needed, steps)
        counts = self._wait(requested, needed, durations.waited) | ~durations.waited
        chance: float | np.ndarray = 1.0
        if clock.may_drop_clients:
            chance = clock.chance(durations.times, host.virtual.copy(), durations.minimum_samples)
            checks.number_per_client(f"clock={type(clock).__name__}: chance", chance, len(host.virtual))
        cohort = Cohort(requested.federation, host.rows, host.count, host.probability * chance, t, steps)
        return cohort if counts.all() else cohort.subset(np.flatnonzero(counts))

    def _tick(self, requested: Cohort, needed: np.ndarray, steps: np.ndarray) -> Cohort:
        """All of them; who needs more than a round arrives in that in which it is done."""
        assert self.clock.deadline is not None
        host, replicates = requested.host, len(self.seconds)
        behind = np.maximum(np.ceil(needed / self.clock.deadline) - 1, 0).astype(np.int64)
        self.rounds_behind[host.virtual] = behind
        late_mask = (behind > 0) & (host.count > 0)
        late_counts = np.bincount(host.virtual[late_mask] // requested.federation.clients, minlength=replicates)
        self.late_clients = requested.ranks.all_reduce_host(late_counts)[0].astype(np.int64)
        self.seconds += self.clock.server + self.clock.deadline
        return Cohort(requested.federation, host.rows, host.count, host.probability, requested.round, steps)

    def _steps_in_time(
        self, times: Times, load: Workload, steps: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[n] each: the steps that are done, the samples they take, and those without which a client is late."""
        sizes = Workload(load.num_samples, load.size, load.per_pass, steps, load.short_last).batch_sizes()
        if self.clock.late != "partial" or self.clock.deadline is None or not sizes.shape[1]:
            samples = sizes.sum(1)
            return steps, samples, samples
        cumulative_samples = np.cumsum(sizes, axis=1)
        fits_mask = times.link[:, None] + cumulative_samples * times.sample[:, None] <= self.clock.deadline
        completed_steps = np.minimum(fits_mask.sum(1), steps)
        return (
            completed_steps,
            np.where(np.arange(sizes.shape[1]) < completed_steps[:, None], sizes, 0).sum(1),
            sizes[:, 0],
        )

    def _wait(self, requested: Cohort, needed: np.ndarray, waited: np.ndarray) -> np.ndarray:
        """[n] who counts, given what each takes and for whom the server waits; time goes by."""
        clock = self.clock
        (took, waits), virtual, bounds = requested.all_gather_host(np.stack([needed, waited.astype(float)]))
        deadline = np.inf if clock.deadline is None else clock.deadline
        counts = np.zeros(len(virtual), dtype=bool)
        for r, (a, b) in enumerate(itertools.pairwise(bounds)):
            candidates = a + np.flatnonzero(waits[a:b])
            order = candidates[np.argsort(took[candidates], kind="stable")]
            arrivals = order[took[order] <= deadline][: clock.first]
            counts[arrivals] = True
            self.late_clients[r] = self.num_cut_off[r] = len(candidates) - len(arrivals)
            complete = len(arrivals) == min(len(candidates), clock.first or len(candidates)) and len(candidates) > 0
            round_seconds = took[arrivals[-1]] if complete else deadline
            self.seconds[r] += clock.server + (round_seconds if np.isfinite(round_seconds) else 0.0)
        return counts[np.searchsorted(virtual, requested.host.virtual)]
