"""How long a sweep takes, six local rates × two of the server × three seeds, as a user starts it in four ways.

`one by one` is Hydra's own launcher, `joblib` two processes at a time, `lockstep` all jobs as one federation, `lists`
one run of 36 replicates with lists of rates. Each is a process of its own, and they take turns; a sweep of one round
beside it tells what its start takes. Processor time is that of the command and of its children, memory the most that
one of its processes holds. How many times as fast as one by one a way is, by the clock, is the median of the
repetitions' ratios.

usage: python scripts/bench_sweeps.py [--json FILE] [--only means,logistic,mlp] [--repeat 3] [--rounds 1000]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import bench_record

COMMON = ["trainer.trial=false", "tracking.tensorboard=false", "tracking.progress=none"]
SERVER = (1.0, 0.7)
SEEDS = (0, 1, 2)
LOGISTIC = ["dataset=digits", "partition=dirichlet", "clients=25", "local_steps=5", "batch_size=10"]
WORKLOADS = {
    "means": (
        ["dataset=gaussian_mean", "model=mean", "partition=natural", "clients=25", "local_steps=5", "batch_size=10"],
        (0.01, 0.02, 0.03, 0.04, 0.05, 0.06),
    ),
    "logistic": ([*LOGISTIC, "model=linear"], (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)),
    "mlp": ([*LOGISTIC, "model=mlp", "model.hidden=[64]"], (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)),
}
LAUNCHERS = {
    "one by one": [],
    "joblib": ["hydra/launcher=local", "hydra.launcher.n_jobs=2"],
    "lockstep": ["hydra/launcher=lockstep"],
    "lists": [],
}


def command(name: str, launcher: str, rounds: int, folder: str) -> list[str]:
    """The sweep as a user types it."""
    what, rates = WORKLOADS[name]
    if launcher == "lists":
        grid = [(lr, server, seed) for lr in rates for server in SERVER for seed in SEEDS]
        lists = zip(("lr", "strategy.server_lr", "seeds"), zip(*grid, strict=True), strict=True)
        sweep = [f"{key}={list(values)}" for key, values in lists]
    else:
        sweep = ["-m", f"lr={','.join(map(str, rates))}", f"strategy.server_lr={','.join(map(str, SERVER))}"]
        sweep += [f"seeds={list(SEEDS)}", *LAUNCHERS[launcher]]
    ends = [f"rounds={rounds}", f"eval_every={rounds}", f"out={folder}"]
    return [sys.executable, "-m", "fedsim", *what, *COMMON, *sweep, *ends]


class Taken(NamedTuple):
    """Seconds by the clock, seconds of processor time, and GiB of the largest process."""

    clock: float
    processor: float
    gib: float


def timed(arguments: list[str]) -> Taken:
    """What a command takes."""
    begun = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(arguments)} failed:\n{said.decode()[-2000:]}")
    return Taken(time.monotonic() - begun, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20)


def measure(name: str, rounds: int, repeat: int) -> dict[str, Any]:
    """One workload: medians over the repetitions, and how many times as fast as one by one each way is."""
    starts: dict[str, list[Taken]] = {launcher: [] for launcher in LAUNCHERS}
    wholes: dict[str, list[Taken]] = {launcher: [] for launcher in LAUNCHERS}
    with tempfile.TemporaryDirectory() as folder:
        for repetition in range(repeat):
            for launcher in LAUNCHERS:
                out = f"{folder}/{repetition}-{launcher.replace(' ', '-')}"
                starts[launcher].append(timed(command(name, launcher, 1, f"{out}-start")))
                wholes[launcher].append(timed(command(name, launcher, rounds, out)))
    clock = {way: [taken.clock for taken in wholes[way]] for way in LAUNCHERS}
    running = {
        way: [all_of.clock - of.clock for all_of, of in zip(wholes[way], starts[way], strict=True)] for way in LAUNCHERS
    }

    def as_fast(seconds: dict[str, list[float]], way: str) -> float:
        return statistics.median(one / other for one, other in zip(seconds["one by one"], seconds[way], strict=True))

    ways = {
        way: {
            "start": statistics.median(taken.clock for taken in starts[way]),
            "clock": statistics.median(clock[way]),
            "processor": statistics.median(taken.processor for taken in wholes[way]),
            "gib": max(taken.gib for taken in wholes[way]),
            "as_fast": as_fast(clock, way),
            "as_fast_without_start": as_fast(running, way),
        }
        for way in LAUNCHERS
    }
    return {"workload": name, "rounds": rounds, "ways": ways}


def show(row: dict[str, Any]) -> None:
    """Its lines of the table."""
    for launcher, of in row["ways"].items():
        seconds = " | ".join(f"{of[part]:.1f} s" for part in ("start", "clock", "processor"))
        ratios = f"{of['as_fast']:.1f}× | {of['as_fast_without_start']:.1f}×"
        print(f"| {row['workload']} | {launcher} | {seconds} | {of['gib']:.2f} GiB | {ratios} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--only", default=",".join(WORKLOADS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1000)
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(WORKLOADS):
        parser.error(f"--only: {', '.join(sorted(unknown))} unknown; choose from {', '.join(WORKLOADS)}")
    print("| sweep | | start | all | processor | memory | times as fast | without start |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    rows = []
    for name in wanted:
        rows.append(measure(name, options.rounds, options.repeat))
        show(rows[-1])
    bench_record.save(options.json, rows, repeat=options.repeat, rounds=options.rounds)


if __name__ == "__main__":
    main()
