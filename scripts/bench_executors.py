"""Which executor is fastest for which model, whether `auto` finds it, and how all of them compare with a plain loop.

Per model, interleaved in one process: whole rounds of fedsim under `auto` and under every executor that can run it, and
a plain PyTorch loop over the same clients (a copy of the module, torch.optim.SGD, batches by indexing, an average).
Numbers are the loop's seconds divided by the executor's: above 1 is faster than the loop. Evaluation is off, nothing
is written.

usage: python scripts/bench_executors.py [--json FILE] [--only resnet18_gn,vit] [--repeat 5] [--clock cpu]
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable
from typing import Any

import bench_options
import bench_record
import torch
from bench import interleaved, timed
from bench_rounds import Rounds
from bench_workloads import LR, Workload, char_lstm, loss_of, mlp, noise, resnet18_gn, text
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.data.datasets import Dataset
from fedsim.models import CIFAR10CNN, LeafCNN, Linear, Transformer, ViT
from fedsim.run.wiring import resolve_device

EXECUTORS = ("auto", "fused", "grouped", "vmap", "loop")


def normalised(shape: tuple[int, ...], classes: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    """A convolutional network with a normalisation after each convolution."""
    layers: list[nn.Module] = []
    for source, width in ((shape[0], 32), (32, 64)):
        layers += [nn.Conv2d(source, width, 3, padding=1), norm(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (shape[1] // 4) * (shape[2] // 4), classes))


def small_cnn(shape: tuple[int, ...], classes: int, channels: int, normalise: bool = False) -> nn.Module:
    """Two 5×5 convolutions with pooling, the second with twice the channels, and a linear layer."""
    layers: list[nn.Module] = []
    for source, width in ((shape[0], channels), (channels, 2 * channels)):
        layers += [nn.Conv2d(source, width, 5), *([nn.GroupNorm(2, width)] if normalise else []), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    side = ((shape[1] - 4) // 2 - 4) // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * channels * side * side, classes))


def small_cnn_workload(name: str, channels: int, batch: int, normalise: bool = False) -> Workload:
    """Some clients with a small network for MNIST."""
    build = functools.partial(small_cnn, channels=channels, normalise=normalise)
    norm = ", GroupNorm" if normalise else ""
    return Workload(
        name, f"{channels} and {2 * channels} channels{norm}, MNIST, batch {batch}", small(), build, batch, 3, active=16
    )


def cnn_gn(shape: tuple[int, ...], classes: int) -> nn.Module:
    return normalised(shape, classes, lambda width: nn.GroupNorm(2, width))


def cnn_bn(shape: tuple[int, ...], classes: int) -> nn.Module:
    return normalised(shape, classes, nn.BatchNorm2d)


def mlp_bn(shape: tuple[int, ...], classes: int) -> nn.Module:
    wide = nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, classes))
    return wide


def mlp_ln(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.LayerNorm(200), nn.ReLU(), nn.Linear(200, classes))


def small() -> Dataset:
    return noise((1, 28, 28), 20_000)


def colours() -> Dataset:
    return noise((3, 32, 32), 20_000)


MODELS: dict[str, Callable[[], Workload]] = {
    "linear": lambda: Workload("linear", "MNIST, batch 20", small(), Linear, 20, 5, active=32),
    "mlp": lambda: Workload("mlp", "2×200, MNIST, batch 20", small(), mlp, 20, 5, active=32),
    "mlp_ln": lambda: Workload("mlp_ln", "LayerNorm, MNIST, batch 20", small(), mlp_ln, 20, 5, active=32),
    "mlp_bn": lambda: Workload("mlp_bn", "BatchNorm, MNIST, batch 20", small(), mlp_bn, 20, 5, active=32),
    "cnn_8": lambda: small_cnn_workload("cnn_8", 8, 20),
    "cnn_16": lambda: small_cnn_workload("cnn_16", 16, 20),
    "cnn_16_gn": lambda: small_cnn_workload("cnn_16_gn", 16, 20, normalise=True),
    "leaf_cnn": lambda: Workload("leaf_cnn", "FEMNIST's, batch 10", small(), LeafCNN, 10, 3, active=2),
    "cifar10_cnn": lambda: Workload("cifar10_cnn", "3×32×32, batch 32", colours(), CIFAR10CNN, 32, 3, active=4),
    "cnn_gn": lambda: Workload("cnn_gn", "GroupNorm, 3×32×32, batch 32", colours(), cnn_gn, 32, 3, active=2),
    "cnn_bn": lambda: Workload("cnn_bn", "BatchNorm, 3×32×32, batch 32", colours(), cnn_bn, 32, 3, active=2),
    "resnet18_gn": lambda: Workload("resnet18_gn", "3×32×32, batch 8", colours(), resnet18_gn, 8, 6, active=1),
    "vit": lambda: Workload("vit", "3×32×32, batch 32", colours(), ViT, 32, 3, active=4),
    "char_lstm": lambda: Workload("char_lstm", "40 tokens, batch 10", text(40, 4000), char_lstm, 10, 3, active=2),
    "transformer": lambda: Workload("transformer", "40 tokens, batch 10", text(40, 4000), Transformer, 10, 3, active=8),
}


def plain_round(work: Workload, device: torch.device) -> Callable[[], None]:
    """A round of a plain loop: clients one after another, each with a copy of the module and torch.optim.SGD."""
    server = work.module().to(device)
    data, shares = work.data.to(device), [torch.as_tensor(share, device=device) for share in work.shares()]
    integers = not data.train_x.is_floating_point() and data.train_x.dtype == torch.uint8

    def run() -> None:
        mean: list[Tensor] = []
        count = len(shares) if work.active is None else work.active
        for share in shares[:count]:
            model = copy.deepcopy(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            order = share[torch.randperm(len(share), device=device)]
            for step in range(work.steps):
                pick = order[step * work.batch % len(order) :][: work.batch]
                x, y = data.train_x[pick], data.train_y[pick]  # type: ignore[index]
                x = (x.float() / 255 - 0.5) / 0.25 if integers else x
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()
            ends = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
            mean = (
                [m + e.detach() / count for m, e in zip(mean, ends, strict=True)]
                if mean
                else [e.detach() / count for e in ends]
            )
        places = [*server.parameters(), *(b for b in server.buffers() if b.is_floating_point())]
        with torch.no_grad():
            for place, value in zip(places, mean, strict=True):
                place.copy_(value)

    return run


def measure(work: Workload, device: str, repeat: int, seconds: float, clock: str) -> dict[str, Any]:
    """One row of the table: how often faster than the plain loop, median over the repetitions."""
    rounds: dict[str, Rounds] = {}
    for executor in EXECUTORS:
        try:
            rounds[executor] = Rounds(work, [0], device, {"executor": executor}, seconds, False, clock)
        except ConfigError:
            continue
    where = next(iter(rounds.values())).simulation.device
    contenders = {name: r.seconds for name, r in rounds.items()} | {
        "plain": timed(plain_round(work, where), where, clock)
    }
    times = interleaved(contenders, repeat)

    def median(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(times[other], times[name], strict=True))

    asked = [name for name in rounds if name != "auto"]
    best = max(asked, key=lambda name: median(name, "plain"))
    return {
        "model": work.name,
        "what": work.what,
        "speed": {name: median(name, "plain") for name in rounds},
        "chosen": rounds["auto"].simulation.trainer.executor_choice.executor,
        "best": best,
        "auto_of_best": median("auto", best),
        "seconds": {name: statistics.median(taken) for name, taken in times.items()},
    }


def main() -> None:
    parser = bench_options.parser(__doc__ or "", MODELS, "wall")
    parser.add_argument("--seconds", type=float, default=0.2, help="of rounds in one repetition (default 0.2)")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    wanted = bench_options.wanted(parser, options.only, MODELS)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; speed of a plain loop = 1")
    print(f"{'model':12} {'what':32} {'plain':>9} " + " ".join(f"{name:>6}" for name in EXECUTORS) + "  chosen (best)")
    rows = []
    for name in wanted:
        row = measure(MODELS[name](), options.device, options.repeat, options.seconds, options.clock)
        speeds = " ".join(f"{row['speed'][e]:6.2f}" if e in row["speed"] else "     –" for e in EXECUTORS)
        print(
            f"{name:12} {row['what']:32} {row['seconds']['plain']:7.3f} s {speeds}  {row['chosen']} ({row['best']})",
            flush=True,
        )
        rows.append(row)
    device = resolve_device(options.device)
    bench_record.save(options.json, rows, device=device, repeat=options.repeat, clock=options.clock)


if __name__ == "__main__":
    main()
