"""How fast a round's local training is: every executor beside a raw PyTorch loop over one model.

The raw loop (`limit`) trains a single model on as many samples at the same batch size, batches ready in memory; it does
no sampling, no gathering, no aggregation. Every repetition measures all contenders in turn, so that the ratios hold
when the machine's speed drifts; the medians are shown.

usage: python scripts/bench.py [--json FILE] [--only logistic,mlp,cnn] [--repeat 7] [--device auto]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import Simulation
from fedsim.datasets import Dataset
from fedsim.local import SGD
from fedsim.models import MLP, SVHNCNN, Linear


@dataclass
class Workload:
    """One row of the table."""

    name: str
    model: Callable[..., nn.Module]
    shape: tuple[int, ...]
    clients: int
    batch: int
    steps: int


WORKLOADS = [
    Workload("logistic", Linear, (1, 28, 28), 100, 20, 20),
    Workload("mlp", MLP, (1, 28, 28), 100, 20, 10),
    Workload("cnn", SVHNCNN, (3, 32, 32), 20, 128, 10),
]


def random_images(shape: tuple[int, ...], samples: int) -> Dataset:
    """uint8 noise with labels: speed does not depend on what the pixels show."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (samples, *shape), dtype=torch.uint8, generator=draw)
    y = torch.randint(0, 10, (samples,), generator=draw)
    return Dataset("noise", x, y, x[:100], y[:100], classes=10)


def raw_loop(work: Workload, device: torch.device) -> Callable[[], None]:
    """One model, plain PyTorch, batches ready in memory."""
    model = work.model(shape=work.shape, classes=10).to(device)
    parameters = list(model.parameters())
    x = torch.rand(work.steps, work.batch, *work.shape, device=device)
    y = torch.randint(0, 10, (work.steps, work.batch), device=device)

    def run() -> None:
        for _ in range(work.clients):
            for k in range(work.steps):
                gradients = torch.autograd.grad(F.cross_entropy(model(x[k]), y[k]), parameters)
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.sub_(gradient, alpha=0.01)

    return run


def local_training(work: Workload, executor: str, device: str) -> tuple[Callable[[], Tensor], Simulation]:
    """fedsim's local training of one full round: sampling, gathering and all steps of all clients."""
    samples = max(600, 2 * work.batch) * work.clients if work.name != "cnn" else 500 * work.clients
    simulation = Simulation(
        random_images(work.shape, samples),
        work.model,
        clients=work.clients,
        local=SGD(lr=0.01, steps=work.steps, batch_size=work.batch),
        executor=executor,
        device=device,
    )
    cohort = simulation.availability.sample(0)
    state = simulation.initial_state()
    start = simulation.strategy.start(state, cohort)
    return lambda: simulation.trainer.run(start, cohort, 0, state.model).end, simulation


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call, the device's work included."""
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def measure(work: Workload, device: str, repeat: int) -> dict[str, Any]:
    """Samples per second of every contender, interleaved."""
    contenders: dict[str, Callable[[], Any]] = {}
    for executor in ("vmap", "loop", "auto"):
        contenders[executor], simulation = local_training(work, executor, device)
    contenders["limit"] = raw_loop(work, simulation.device)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        seconds(run, simulation.device)
    for _ in range(repeat):
        for name, run in contenders.items():
            times[name].append(seconds(run, simulation.device))
    samples = work.clients * work.steps * work.batch
    rate = {name: samples / statistics.median(values) for name, values in times.items()}

    def ratio(other: str) -> float:
        """How much faster `auto` is, run by run."""
        return statistics.median(a / b for a, b in zip(times[other], times["auto"], strict=True))

    return {
        "workload": work.name,
        "samples_per_second": {name: round(value) for name, value in rate.items()},
        "min_seconds": {name: min(values) for name, values in times.items()},
        "median_seconds": {name: statistics.median(values) for name, values in times.items()},
        "auto_chose": simulation.trainer.choice.describe(),
        "vs_limit": ratio("limit"),
        "vs_best": min(ratio("vmap"), ratio("loop")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Samples per second of every executor beside a raw PyTorch loop.")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated workloads")
    parser.add_argument("--repeat", type=int, default=7, help="measured repetitions (default 7)")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else [work.name for work in WORKLOADS]
    unknown = set(wanted) - {work.name for work in WORKLOADS}
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} unknown; choose from logistic, mlp, cnn")
    machine = {
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and options.device != "cpu" else "cpu",
    }
    print(
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}; samples/s, {options.repeat} runs"
    )
    print(f"{'workload':10} {'vmap':>10} {'loop':>10} {'auto':>10} {'limit':>10}   auto/limit   auto/best")
    rows = []
    for work in (w for w in WORKLOADS if w.name in wanted):
        row = measure(work, options.device, options.repeat)
        rate = row["samples_per_second"]
        columns = " ".join(f"{rate[name]:>10,}" for name in ("vmap", "loop", "auto", "limit"))
        print(f"{work.name:10} {columns}   {row['vs_limit']:>9.2f}×   {row['vs_best']:>8.2f}×", flush=True)
        rows.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": rows, "machine": machine}, file, indent=2)


if __name__ == "__main__":
    main()
