"""Workload (f): a million clients of whom a thousand take part, beside the same thousand alone, each in its own process
so that the memory is its own."""

from __future__ import annotations

import math
import multiprocessing
import statistics
from typing import Any

from bench_rounds import Rounds
from bench_workloads import Workload, noise

from fedsim.models import Linear
from fedsim.run.plan import peak_memory_gib

POPULATION, ACTIVE, SAMPLES = 1_000_000, 1_000, 8


def child(clients: int, device: str, repeat: int) -> tuple[list[float], float]:
    """Seconds a round, and the process's peak memory in GiB."""
    data = noise((1, 8, 8), clients * SAMPLES)
    work = Workload("f", "", data, Linear, SAMPLES, 10, clients=clients, active=ACTIVE)
    rounds = Rounds(work, [0], device, {})
    seconds = [rounds.seconds() for _ in range(repeat)]
    return seconds, peak_memory_gib() or math.nan


def population(device: str, repeat: int, clients: int) -> dict[str, Any]:
    """The row of the table."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        many, peak = pool.apply(child, (clients, device, repeat))
        alone, peak_alone = pool.apply(child, (ACTIVE, device, repeat))
    seconds, less = statistics.median(many), statistics.median(alone)
    return {
        "workload": "f",
        "what": f"logistic, {ACTIVE:,} of {clients:,} clients, batch {SAMPLES}, 10 steps",
        "vs_common": None,
        "vs_limit": None,
        "seconds": seconds,
        "more_seconds": seconds - less,
        "peak_gib": peak,
        "alone": {"seconds": less, "peak_gib": peak_alone},
    }
