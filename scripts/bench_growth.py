"""How the time, the memory and the traffic of a round grow: with active clients, population, parameters, seeds, runs in
lockstep, and ranks.

Per axis, sizes from small to large, each in a process of its own with one thread. Seconds are of a whole round (the
median over the repetitions), memory is the peak of the process, traffic is what clients and server exchange in a round.
Seconds are fitted by a + b·n, by least squares of the relative deviations: a is what a round takes at any size, b what
each further unit adds, and at the bend n = a / b both take equally long. `slope` is that of the logarithms between the
two largest sizes: 1 where the time is proportional to the size, 0 where it does not depend on it.

usage: python scripts/bench_growth.py [--json FILE] [--only clients,seeds] [--repeat 3] [--largest 1e9]
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import bench_options
import bench_record
import numpy as np
import torch
from bench_rounds import Rounds
from bench_workloads import Workload, noise
from torch import nn

from fedsim import EvaluationOptions, Execution, Simulation, run_together
from fedsim.data.datasets import GaussianMean
from fedsim.data.partition import Natural
from fedsim.local import SGD
from fedsim.models import MLP, Linear, Mean
from fedsim.run.plan import peak_memory_gib
from fedsim.run.tracking.metrics_csv import read_metrics

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 10  # of a client
LEAST_SECONDS = 0.5  # of rounds that are timed together


@dataclass(frozen=True)
class Axis:
    """What grows, the sizes, and the slope that is expected where the size dominates.

    Attributes:
        what: runs, in words.
        measure: (size, repetitions) → (seconds of a round, bytes of a round).
    """

    what: str
    sizes: tuple[int, ...]
    expected: float
    measure: Callable[[int, int], tuple[float, float]]


def wide(shape: tuple[int, ...], classes: int, hidden: int) -> nn.Module:
    return MLP(shape, classes, hidden=(hidden,))


def clients(active: int, population: int, repeat: int, hidden: int | None = None) -> tuple[float, float]:
    """Logistic regression, or an MLP with so many hidden units, on images of 8×8 pixels."""
    model = Linear if hidden is None else functools.partial(wide, hidden=hidden)
    data = noise((1, 8, 8), population * SAMPLES)
    work = Workload("growth", "", data, model, SAMPLES, 5, clients=population, active=active)
    rounds = Rounds(work, [0], "cpu", {}, LEAST_SECONDS, written=False)
    seconds = statistics.median(rounds.seconds() for _ in range(repeat))
    dimension = rounds.simulation.model.dimension
    return seconds, 2 * 4 * active * dimension


def parameters(size: int, repeat: int) -> tuple[float, float]:
    """An MLP with about so many parameters: 64 inputs, 10 outputs."""
    return clients(10, 1000, repeat, hidden=max(1, round(size / 75)))


def means(seeds: int, lr: float, rounds: int) -> Simulation:
    return Simulation(
        GaussianMean(clients=25),
        Mean,
        clients=25,
        partition=Natural(),
        local=SGD(lr=lr, steps=5, batch_size=10),
        seeds=tuple(range(seeds)),
        rounds=rounds,
        evaluation=EvaluationOptions(every=10**9, client_samples=1),
        execution=Execution(device="cpu"),
    )


def timed_rounds(make: Callable[[int], list[Simulation]], repeat: int) -> float:
    """Seconds of a round: those of a long run less those of a short one, per round of the difference."""
    run_together(make(45))  # until small steps are recorded
    begin = time.perf_counter()
    run_together(make(100))
    count = max(100, math.ceil(LEAST_SECONDS / ((time.perf_counter() - begin) / 100)))
    measured = []
    for _ in range(repeat):
        ends = []
        for rounds in (60, 60 + count):
            simulations = make(rounds)
            begin = time.perf_counter()
            run_together(simulations)
            ends.append(time.perf_counter() - begin)
        measured.append((ends[1] - ends[0]) / count)
    return statistics.median(measured)


def seeds(size: int, repeat: int) -> tuple[float, float]:
    """25 Gaussian means of so many seeds."""
    seconds = timed_rounds(lambda rounds: [means(size, 0.05, rounds)], repeat)
    return seconds, 2 * 4 * 25 * size * GaussianMean(clients=25).shape[0]


def jobs(size: int, repeat: int) -> tuple[float, float]:
    """So many runs of 25 Gaussian means with rates of their own, in lockstep."""
    rates = np.linspace(0.01, 0.1, size)
    seconds = timed_rounds(lambda rounds: [means(1, float(rate), rounds) for rate in rates], repeat)
    return seconds, 2 * 4 * 25 * size * GaussianMean(clients=25).shape[0]


def ranks(size: int, repeat: int) -> tuple[float, float]:
    """An MLP of 1,000 hidden units on digits, 100 clients, on so many processes."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={size}",
        "-m",
        "fedsim",
    ]
    run = ["dataset=digits", "model=mlp", "model.hidden=[1000]", "clients=100", "local_steps=20", "batch_size=10"]
    run += ["rounds=90", "eval_every=30", "trainer.trial=false", "tracking.tensorboard=false", "tracking.progress=none"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    measured, exchanged = [], 0.0
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            subprocess.run([*command, *run, f"out={out}"], check=True, capture_output=True, env=environment)
            rows = read_metrics(out / "metrics.csv")
            measured.append((float(rows[-1]["seconds"]) - float(rows[1]["seconds"])) / 60)
            exchanged = float(rows[-1]["bytes_up"]) + float(rows[-1]["bytes_down"])
    return statistics.median(measured), exchanged


AXES = {
    "clients": Axis(
        "active clients of 20,000, logistic regression, 5 steps in batches of 10",
        (10, 30, 100, 300, 1000, 3000, 10_000),
        1.0,
        lambda size, repeat: clients(size, 20_000, repeat),
    ),
    "population": Axis(
        "clients of whom 100 are active, logistic regression",
        (1000, 10_000, 100_000, 1_000_000, 10_000_000),
        0.0,
        lambda size, repeat: clients(100, size, repeat),
    ),
    "parameters": Axis(
        "parameters of an MLP, 10 active clients", (1000, 10_000, 100_000, 1_000_000, 10_000_000), 1.0, parameters
    ),
    "seeds": Axis("seeds of 25 Gaussian means", (1, 2, 4, 8, 16, 32, 64), 1.0, seeds),
    "jobs": Axis("runs of 25 Gaussian means in lockstep", (1, 2, 4, 8, 16, 32, 64), 1.0, jobs),
    "ranks": Axis("processes that share 100 clients, MLP of 1,000 units, digits", (1, 2), -1.0, ranks),
}


def child(name: str, size: int, repeat: int) -> dict[str, float]:
    """What one size takes, in this process."""
    torch.set_num_threads(1)
    seconds, exchanged = AXES[name].measure(size, repeat)
    return {"size": size, "seconds": seconds, "bytes": exchanged, "peak_gib": peak_memory_gib() or math.nan}


def overhead_and_unit(sizes: list[float], seconds: list[float]) -> tuple[float, float]:
    """a and b of seconds = a + b·size, by least squares of the relative deviations; neither is negative."""
    best, best_error = (0.0, 0.0), math.inf
    columns = np.stack([np.ones(len(sizes)), np.array(sizes)], 1) / np.array(seconds)[:, None]
    for kept in ([0, 1], [0], [1]):
        solution, *_ = np.linalg.lstsq(columns[:, kept], np.ones(len(sizes)), rcond=None)
        coefficients = np.zeros(2)
        coefficients[kept] = solution
        error = float(np.square(columns @ coefficients - 1).sum())
        if (coefficients >= 0).all() and error < best_error:
            best, best_error = (float(coefficients[0]), float(coefficients[1])), error
    return best


def measure(name: str, repeat: int, largest: float) -> dict[str, object]:
    """One axis, each size in a process of its own."""
    axis, points = AXES[name], list[dict[str, float]]()
    print(f"{name}: {axis.what}\n{'size':>12} {'a round':>12} {'peak':>10} {'traffic':>12}")
    for size in axis.sizes:
        if size > largest:
            continue
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            point = pool.apply(child, (name, size, repeat))
        points.append(point)
        line = f"{size:12,} {1000 * point['seconds']:9.2f} ms {point['peak_gib']:6.2f} GiB"
        print(f"{line} {point['bytes'] / 1e3:10.1f} kB", flush=True)
    sizes, seconds = ([point[key] for point in points] for key in ("size", "seconds"))
    slope = math.log(seconds[-1] / seconds[-2]) / math.log(sizes[-1] / sizes[-2]) if len(points) > 1 else math.nan
    overhead, unit = overhead_and_unit(sizes, seconds)
    bend = overhead / unit if unit and axis.expected > 0 else None
    print(f"  slope {slope:.2f} (expected {axis.expected:g}), bend at {'–' if bend is None else f'{bend:,.1f}'}")
    return {
        "axis": name, "what": axis.what, "points": points, "slope": slope, "expected": axis.expected,
        "overhead_seconds": overhead, "unit_seconds": unit, "bend": bend,
    }  # fmt: skip


def main() -> None:
    parser = bench_options.parser(__doc__ or "", AXES, "wall")
    parser.add_argument("--largest", type=float, default=math.inf, help="leave out sizes above this one")
    parser.set_defaults(repeat=3)
    options = parser.parse_args()
    names = bench_options.wanted(parser, options.only, AXES)
    rows = [measure(name, options.repeat, options.largest) for name in names]
    bench_record.save(options.json, rows, repeat=options.repeat)


if __name__ == "__main__":
    main()
