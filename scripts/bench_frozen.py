"""Rounds of clients that train adapters in the last block of a frozen transformer, with and without cached outputs of
the frozen layers (`trainer.cache_frozen`).

The seconds of a run contain its setup, and so the pass of all samples through the frozen layers. Both runs alternate in
one process; a ratio is the median over the repetitions of uncached / cached. Evaluation is off.

usage: python scripts/bench_frozen.py [--json FILE] [--width 128] [--layers 4] [--rounds 10] [--epochs 1,3] [--repeat 5]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import bench_record
import torch
from torch import nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.data.datasets import Dataset
from fedsim.local import SGD
from fedsim.models.lora import add_adapters
from fedsim.models.text import Transformer
from fedsim.run.wiring import resolve_device

CLIENTS, SAMPLES, LENGTH, VOCABULARY, BATCH_SIZE = 32, 16, 16, 64, 8  # samples of each client


def adapted(shape: tuple[int, ...], classes: int, width: int, layers: int) -> nn.Module:
    """A transformer with adapters in its last block."""
    return add_adapters(Transformer(shape, classes, width, 4, layers), 4, 8.0, rf"blocks\.{layers - 1}\.linear")


def seconds(arguments: argparse.Namespace, epochs: int, cached: bool) -> tuple[float, float]:
    """Of a whole run, and of its rounds alone."""
    text = torch.randint(0, VOCABULARY, (CLIENTS * SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    begin = time.perf_counter()
    simulation = Simulation(
        Dataset("text", text[:, :-1], text[:, 1:], classes=VOCABULARY),
        functools.partial(adapted, width=arguments.width, layers=arguments.layers),
        clients=CLIENTS,
        local=SGD(lr=0.1, epochs=epochs, batch_size=BATCH_SIZE),
        rounds=arguments.rounds,
        evaluation=EvaluationOptions(every=10**9, client_samples=1),
        execution=Execution(device=arguments.device, executor="vmap", cache_frozen=cached),
    )
    rounds_begin = time.perf_counter()
    simulation.run()
    end = time.perf_counter()
    return end - begin, end - rounds_begin


def main() -> None:
    """Print one line for each number of epochs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", default="1,3", help="comma-separated local epochs")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    rows = []
    print("local epochs  uncached [s]  cached [s]  ratio  ratio without setup")
    for epochs in map(int, arguments.epochs.split(",")):
        pairs = [[seconds(arguments, epochs, cached) for cached in (False, True)] for _ in range(arguments.repeat + 1)]
        measured = pairs[1:]  # the first warms up
        uncached, cached = (statistics.median(pair[which][0] for pair in measured) for which in (0, 1))
        ratios = [statistics.median(pair[0][part] / pair[1][part] for pair in measured) for part in (0, 1)]
        print(f"{epochs:12d}  {uncached:12.2f}  {cached:10.2f}  {ratios[0]:5.2f}  {ratios[1]:19.2f}", flush=True)
        rows.append(
            {"epochs": epochs, "uncached": uncached, "cached": cached, "ratio": ratios[0], "rounds_ratio": ratios[1]}
        )
    device = resolve_device(arguments.device)
    settings = {name: getattr(arguments, name) for name in ("width", "layers", "rounds", "repeat")}
    bench_record.save(arguments.json, rows, device=device, **settings)


if __name__ == "__main__":
    main()
