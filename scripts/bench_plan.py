"""How well `fedsim plan` predicts runs: time, peak memory and bytes of the plan, beside those of the run itself.

Each composition is planned and then run, each in a process of its own, one after the other. Time is from the start of
the process to its end, memory the most that the process held, and bytes the last row of metrics.csv. Compositions
differ in strategy, data, model, availability, shift, uplink, clock, capacity, personal models, seeds and clients.

usage: OMP_NUM_THREADS=1 python scripts/bench_plan.py [--json FILE] [--only mifa,scaffold] [--seconds 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench_record
from bench_sweeps import timed

from fedsim.run.tracking.metrics_csv import METRICS_FILENAME, read_metrics

QUIET = ["tracking.progress=none"]
COMPOSITIONS = {
    "fedavg": "strategy=fedavg rounds=1500",
    "fedavg, evaluated each round": "strategy=fedavg rounds=500 eval_every=1",
    "fedau, 10 seeds": "strategy=fedau seeds=[0,1,2,3,4,5,6,7,8,9] rounds=300 availability=sine",
    "fedawe": "strategy=fedawe availability=markov rounds=300 model=mlp",
    "mifa": "strategy=mifa clients=200 availability=uniform_k rounds=800",
    "scaffold": "strategy=scaffold local_steps=10 model=mlp rounds=250",
    "fedavgm, momentum": "strategy=fedavgm local=momentum rounds=900",
    "fedopt, adam": "strategy=fedopt local=adam rounds=700 partition=shards",
    "robust": "strategy=krum attack=sign_flip rounds=500",
    "compressed": "uplink=topk rounds=600",
    "private": "uplink=gaussian rounds=600",
    "synthetic": "dataset=synthetic partition=natural clients=100 model=linear rounds=700",
    "quadratics": "dataset=quadratics partition=natural model=mean clients=50 rounds=3000",
    "location shift": "dataset=gaussian_mean partition=natural model=mean shift=location clients=25 rounds=2000",
    "pricing": "dataset=pricing partition=natural model=mean shift=demand local=profl clients=10 rounds=200 lr=0.001",
    "players": "dataset=market partition=natural model=mean shift=players clients=4 rounds=500",
    "personal": "local=ditto personal.over=all partition.validation=0.2 rounds=200",
    "capacity": "capacity=heterofl model=mlp rounds=200",
    "devices": "clock=devices rounds=800",
    "asynchronous": "clock=events strategy=fedbuff rounds=1000",
    "delayed": "delay=geometric rounds=800",
    "drift": "dataset=gaussian_mean partition=natural model=mean drift=linear clients=25 rounds=1500",
    "adapters": "model=lora_mlp model.residual=true strategy=fedex_lora lr=0.01 rounds=150",
    "transformer": "model=vit local_steps=2 clients=20 rounds=100",
    "large population": "dataset=gaussian_mean partition=natural model=mean clients=100000 availability=uniform_k "
    "rounds=2500",
}


def compare(name: str, overrides: list[str], seconds: float, folder: Path) -> dict[str, Any]:
    """The plan of a composition beside its run."""
    fedsim, plan_file = [sys.executable, "-m", "fedsim"], folder / "plan.json"
    planning = timed([*fedsim, "plan", *overrides, *QUIET, "--seconds", str(seconds), "--json", str(plan_file)])
    plan = json.loads(plan_file.read_text())
    run = timed([*fedsim, *overrides, *QUIET, f"out={folder / 'run'}"])
    rows = read_metrics(folder / "run" / METRICS_FILENAME)
    last_rows = [row for row in rows if row["round"] == rows[-1]["round"]]
    measured_bytes = statistics.mean(row["total_bytes_up"] + row["total_bytes_down"] for row in last_rows)
    planned_bytes = plan["total_bytes_up"] + plan["total_bytes_down"]
    return {
        "composition": name,
        "overrides": " ".join(overrides),
        "planning_seconds": planning.clock,
        "measured_rounds": plan["measured_rounds"],
        "rounds": plan["rounds"],
        "seconds": {"planned": plan["seconds"], "run": run.clock, "ratio": plan["seconds"] / run.clock},
        "memory_gib": {"planned": plan["memory_gib"], "run": run.gib, "ratio": plan["memory_gib"] / run.gib},
        "bytes": {"planned": planned_bytes, "run": measured_bytes, "ratio": planned_bytes / measured_bytes},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--only", metavar="NAMES", help="compositions, separated by commas (default: all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of rounds that are measured (default 1)")
    parser.add_argument("--rounds", type=int, help="rounds of each run, in place of its own")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(COMPOSITIONS)
    if unknown := [name for name in names if name not in COMPOSITIONS]:
        parser.error(f"--only: {', '.join(unknown)} unknown; choose from {', '.join(COMPOSITIONS)}")
    print(f"{'composition':30} {'planned':>9} {'run':>9} {'ratio':>6}  {'memory':>6} {'bytes':>6}")
    rows = []
    for name in names:
        overrides = COMPOSITIONS[name].split()
        if options.rounds is not None:
            overrides = [word for word in overrides if not word.startswith("rounds=")] + [f"rounds={options.rounds}"]
        with tempfile.TemporaryDirectory() as folder:
            row = compare(name, overrides, options.seconds, Path(folder))
        time_text = f"{row['seconds']['planned']:7.1f} s {row['seconds']['run']:7.1f} s {row['seconds']['ratio']:6.2f}"
        print(f"{name:30} {time_text}  {row['memory_gib']['ratio']:6.2f} {row['bytes']['ratio']:6.2f}", flush=True)
        rows.append(row)
        bench_record.save(options.json, rows, seconds=options.seconds)  # what is measured is kept if a later run fails


if __name__ == "__main__":
    main()
