"""Ways of running the same local training, and plain PyTorch's."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch
from torch import nn

from fedsim import Execution, Simulation
from fedsim.core import Report
from fedsim.data.datasets import Dataset, GaussianMean
from fedsim.local import SGD, PerStep
from fedsim.models import MLP, Mean
from fedsim.shift import Location

SIZES = (1, 9, 4, 3, 8, 5, 2)  # one sample; below, at, above and twice the batch size of 4


BATCH = 4


double = functools.partial(Execution, dtype="float64")


WAYS = {
    "vmap": double("vmap"),
    "vmap in chunks": double("vmap", chunk=3),
    "loop": double("loop", workers=1),
    "loop with two workers": double("loop", workers=2),
    "loop in chunks": double("loop", workers=2, chunk=2),
    "fused": double("fused"),
    "fused in chunks": double("fused", chunk=3, workers=2),
}


RULES = {
    f"{'steps' if steps else 'epochs'}, {sampling}, {'drop' if drop else 'keep'} last, batch {size}": {
        "steps": steps,
        "epochs": epochs,
        "sampling": sampling,
        "drop_last": drop,
        "batch_size": size,
    }
    for (steps, epochs), sampling, drop, size in itertools.product(
        [(5, None), (None, 2)], ["pass", "replacement"], [True, False], [BATCH, None]
    )
}


def labelled(sizes=SIZES) -> Dataset:
    """Random inputs and labels; client i owns sizes[i] of them."""
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    x = torch.as_tensor(draw.standard_normal((len(owners), 6)))
    y = torch.as_tensor(draw.integers(0, 3, len(owners)))
    return Dataset("labelled", x, y, classes=3, owners=torch.as_tensor(owners))


def simulation_of(dataset: Dataset, model, rule, **options) -> Simulation:
    options = {"clients": len(SIZES), "seeds": (3, 5), "execution": double()} | options
    return Simulation(dataset, model, local=rule, **options)


def everyone(simulation: Simulation):
    federation = simulation.federation
    ones = np.ones((federation.num_replicates, federation.clients))
    return federation.make_cohort(ones, ones)


def train(simulation: Simulation, cohort=None, t: int = 2) -> Report:
    """One round; every row starts from its own point, a function of its number."""
    cohort = everyone(simulation) if cohort is None else cohort
    width = torch.arange(simulation.model.dimension, dtype=torch.float64)
    start = 0.3 * torch.sin(1.7 * width + cohort.rows[:, None] + 1.0)
    deployed = torch.linspace(1, 2, simulation.federation.num_replicates)[:, None] * torch.cos(width)
    return simulation.trainer.run(start.to(simulation.model.dtype), cohort, t, deployed.to(simulation.model.dtype))


def batches_of(simulation: Simulation, cohort, t: int, row: int) -> list[dict[str, torch.Tensor]]:
    """The batches one row meets when it is alone in its chunk."""
    chunk = simulation.trainer.batches.plan(cohort, t).chunk(np.array([row]))
    dtype = simulation.model.dtype
    return [{k: v[0] for k, v in chunk.batch(k, 0, 1, dtype).items()} for k in range(int(chunk.steps[0]))]


def same(left: Report, right: Report, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(left.end, right.end, rtol=0, atol=tolerance)
    torch.testing.assert_close(left.loss, right.loss, rtol=0, atol=tolerance)
    torch.testing.assert_close(left.lr_sum, right.lr_sum)
    assert list(left.samples) == list(right.samples)


class Dropping(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Dropout(0.2), nn.Linear(shape[0], 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, classes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class DroppingTwice(nn.Module):
    """One dropout layer in two places, as hand-written models often have it."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        drop = nn.Dropout(0.5)
        self.layers = nn.Sequential(drop, nn.Linear(shape[0], 6), nn.ReLU(), drop, nn.Linear(6, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def ragged(kind: str, execution: Execution) -> Simulation:
    if kind == "stream":
        dataset = GaussianMean(clients=len(SIZES))
        rule = SGD(lr=0.1, steps=4, batch_size=5, schedule=PerStep(0.9))
        return simulation_of(dataset, Mean, rule, shift=Location(0.5, 0.1, deploy="round"), execution=execution)
    model = {"mlp": functools.partial(MLP, hidden=(5,)), "dropout": Dropping, "shared dropout": DroppingTwice}[kind]
    rule = SGD(lr=0.1, epochs=2, batch_size=BATCH, drop_last=False)
    return simulation_of(labelled(), model, rule, execution=execution)
