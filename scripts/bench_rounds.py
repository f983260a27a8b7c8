"""Whole rounds of fedsim, timed one after the other."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_workloads import Workload

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Availability, Full, UniformK
from fedsim.core import Cohort
from fedsim.run.tracking import Tracking

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SECONDS = 0.8  # of consecutive rounds per repetition


class Clocked(Availability):
    """Notes when every round begins; `sample` is the first thing a round does."""

    def __init__(self, process: Availability, clock: Callable[[], float]) -> None:
        self.process, self.times, self.clock = process, [0.0], clock

    def setup(self, population: Any) -> None:
        super().setup(population)
        self.process.setup(population)

    def probabilities(self, t: int) -> Any:
        return self.process.probabilities(t)

    def counts(self, t: int) -> Any:
        return self.process.counts(t)

    def sample(self, t: int) -> Cohort:
        assert self.federation is not None
        if self.federation.device.type == "cuda":
            torch.cuda.synchronize(self.federation.device)
        self.times = [self.clock()] if t == 0 else [*self.times, self.clock()]
        return super().sample(t)


class Rounds:
    """Whole rounds of a simulation, timed.

    Args:
        work: what runs, of so many `seeds` together, on the device, with these settings of `Execution`.
        least: seconds of rounds that are timed together.
        written: into a run folder; else nothing is.
        clock: one of `CLOCKS`.
    """

    def __init__(
        self, work: Workload, seeds: list[int], device: str, settings: dict[str, Any], least: float = SECONDS,
        written: bool = True,
        clock: str = "wall",
    ) -> None:  # fmt: skip
        self.written = written
        process = Full() if work.active is None else UniformK(work.active)
        self.simulation = Simulation(
            work.data,
            work.model,
            clients=work.clients,
            partition=work.partition,
            availability=Clocked(process, CLOCKS[clock]),
            local=work.local(),
            shift=work.shift,
            seeds=seeds,
            rounds=4 if written else 2,
            evaluation=EvaluationOptions(every=10**9, client_samples=1),
            execution=Execution(device=device, **settings),
        )
        assert isinstance(self.simulation.availability, Clocked)
        self.clock = self.simulation.availability  # a simulation works on a copy of its own
        self.seconds()
        taken = self.seconds()
        self.simulation.rounds = max(4, 2 + round(least / taken)) if written else 1 + math.ceil(least / taken)

    def seconds(self) -> float:
        """Mean seconds of a round; where something is written, of one after the first."""
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "run") if self.written else None
            self.simulation.run(out, tracking=Tracking(progress="none"))
        times = self.clock.times[1:] if self.written else self.clock.times
        return (times[-1] - times[0]) / (len(times) - 1)
