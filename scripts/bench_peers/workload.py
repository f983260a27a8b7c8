"""The workload that every simulator does here: pfl-research's CIFAR-10 benchmark, on noise.

1000 clients of 50 samples, 50 of them a round, batch 10, one local epoch of SGD at 0.1, the server takes the mean, no
evaluation (benchmarks/image_classification/configs/baseline.yaml of apple/pfl-research). Two models: `p-cnn` is its
two-convolution network for 3×32×32, `p-mlp` is 64-128-10, small enough that only a simulator's own overhead counts.

Every peer's script runs some warm-up rounds and some timed ones and prints one line of JSON (`report`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import time
from typing import Any

import numpy as np

CLIENTS, SAMPLES, ACTIVE, BATCH, LR = 1000, 50, 50, 10, 0.1
STEPS = SAMPLES // BATCH  # of one client in a round
CLASSES = 10
SHAPES = {"p-mlp": (64,), "p-cnn": (3, 32, 32)}
ROUNDS = {"p-mlp": 30, "p-cnn": 5}
WARM_UP = {"p-mlp": 10, "p-cnn": 2}


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """What every peer's script takes: the workload, and how many rounds are warm-up and timed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, help="timed rounds")
    parser.add_argument("--warm-up", type=int, help="rounds before them")
    found = parser.parse_args(argv)
    found.rounds = found.rounds or ROUNDS[found.workload]
    found.warm_up = found.warm_up or WARM_UP[found.workload]
    return found


def data(workload: str) -> tuple[np.ndarray, np.ndarray]:
    """x [1000, 50, *shape] float32 and y [1000, 50] int64: noise, the same for everybody."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((CLIENTS, SAMPLES, *SHAPES[workload]), dtype=np.float32)
    return x, draw.integers(0, CLASSES, (CLIENTS, SAMPLES))


def torch_model(workload: str) -> Any:
    """The model as a `torch.nn.Sequential`."""
    from torch import nn

    if workload == "p-mlp":
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    convolutions = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    dense = [nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, CLASSES)]
    return nn.Sequential(*convolutions, nn.Flatten(), *dense)


def torch_vector(model: Any) -> np.ndarray:
    """[d] a copy of the parameters of a torch module."""
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


class Clock:
    """Ends of rounds; the timed ones are those after the warm-up.

    Args:
        asked: the parsed options.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.ends = asked, []  # type: ignore[var-annotated]

    @property
    def total(self) -> int:
        """Rounds to run."""
        return int(self.asked.warm_up + self.asked.rounds)

    def tick(self) -> None:
        """A round is over, and its work is done."""
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of every timed round, from the end of the one before it."""
        if len(self.ends) != self.total:
            raise RuntimeError(f"{len(self.ends)} rounds were run, not {self.total}")
        timed = self.ends[self.asked.warm_up - 1 :]
        return [b - a for a, b in zip(timed, timed[1:])]  # noqa: B905, RUF007 (peers' Python may be old)


def report(
    clock: Clock, start: np.ndarray, end: np.ndarray, steps: float, setting: str, threads: int, packages: list[str]
) -> None:
    """Print the line of JSON that the driver reads, if the work was really done.

    Args:
        clock: of the rounds.
        start, end: [d] the server's model before and after all rounds.
        steps: SGD steps taken in all rounds, by all clients.
        setting: how the simulator was used, in words.
        threads: intra-op threads of each process.
        packages: whose versions to give.

    Raises:
        RuntimeError: where steps are missing, or the model did not move or is not finite.
    """
    if steps != clock.total * ACTIVE * STEPS:
        raise RuntimeError(f"{steps} SGD steps in {clock.total} rounds, not {clock.total * ACTIVE * STEPS}")
    moved = float(np.linalg.norm(end - start))
    if not (math.isfinite(moved) and moved > 0):
        raise RuntimeError(f"the server's model moved by {moved}")
    line = {
        "seconds": clock.seconds(),
        "steps": steps,
        "moved": moved,
        "parameters": len(start),
        "setting": setting,
        "threads": threads,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
    print(json.dumps(line), flush=True)
