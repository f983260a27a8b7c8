"""Small networks for images, which the fused executor may stack or not, and runs of them."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.data.datasets import Dataset
from fedsim.local import SGD, Adam, LocalRule, Momentum, PerStep
from fedsim.models import CINIC10CNN, MLP, SVHNCNN, Linear

SIZES = (1, 9, 4, 3, 8)
SHAPE = (2, 4, 4)


def images() -> Dataset:
    draw = np.random.default_rng(1)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    x = torch.as_tensor(draw.standard_normal((len(owners), *SHAPE)))
    y = torch.as_tensor(draw.integers(0, 3, len(owners)))
    return Dataset("images", x, y, classes=3, owners=torch.as_tensor(owners))


double = functools.partial(Execution, dtype="float64")


def simulation_of(model, rule: SGD | None = None, dataset: Dataset | None = None, **options) -> Simulation:
    rule = rule or SGD(lr=0.05, epochs=2, batch_size=3, drop_last=False, weight_decay=0.1)
    defaults = {"clients": len(SIZES), "seeds": (3, 5), "rounds": 2, "evaluation": EvaluationOptions(every=2)}
    defaults |= {"execution": double()}
    return Simulation(dataset or images(), model, local=rule, **defaults | options)


class Twice(nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(self.inner(x.flatten(1)).relu()))


class Mixing(nn.Module):
    """Centres every batch: rows that shared one would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return self.layer(flat - flat.mean(0))


class Unused(nn.Module):
    """A layer that no sample meets: it decays, and has no gradient."""

    samplewise = True

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(32, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1))


def sequential(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


def frozen() -> nn.Module:
    module = sequential(nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 3))
    module[1].weight.requires_grad_(False)
    return module


def tied() -> nn.Module:
    module = sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 3))
    module[3].weight = module[1].weight
    return module


def sized(*layers: nn.Module) -> nn.Module:
    """With a linear layer at the end that fits."""
    inner = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(inner, nn.Linear(inner(torch.zeros(1, *SHAPE)).shape[1], 3))


MODELS = {
    "linear": (functools.partial(Linear, shape=SHAPE, classes=3), True),
    "no bias": (lambda: sequential(nn.Linear(32, 3, bias=False)), True),
    "mlp": (functools.partial(MLP, shape=SHAPE, classes=3, hidden=(6, 5)), True),
    "nested": (lambda: sequential(nn.Sequential(nn.Linear(32, 4), nn.GELU()), nn.Sequential(nn.Linear(4, 3))), True),
    "along the last axis": (lambda: nn.Sequential(nn.Linear(4, 2), nn.SiLU(), nn.Flatten(), nn.Linear(16, 3)), True),
    "in place": (lambda: sequential(nn.Linear(32, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)), True),
    "dropout": (functools.partial(MLP, shape=SHAPE, classes=3, hidden=(6, 5), dropout=0.4), True),
    "channels dropped": (lambda: nn.Sequential(nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(32, 3)), True),
    "convolutions": (lambda: sized(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), False),
    "convolutions, dropout": (lambda: sized(nn.Conv2d(2, 3, 2), nn.Dropout2d(0.3), nn.Conv2d(3, 2, 2)), False),
    "normalised": (lambda: sequential(nn.LayerNorm(32), nn.Linear(32, 3)), False),
    "softmax over samples": (lambda: sequential(nn.Softmax(0), nn.Linear(32, 3)), False),
    "flattened later": (lambda: nn.Sequential(nn.Flatten(2), nn.Linear(16, 3), nn.Flatten(), nn.Linear(6, 3)), False),
    "a layer twice": (Twice, False),
    "a batch's mean": (Mixing, False),
    "frozen": (frozen, False),
    "tied": (tied, False),
    "unused": (Unused, True),
}  # fmt: skip
PUBLISHED = {
    "as in SVHN": functools.partial(SVHNCNN, shape=SHAPE, classes=3),
    "as in CINIC-10": functools.partial(CINIC10CNN, shape=SHAPE, classes=3, dropout=0.3),
}
CONVOLUTIONS = {
    "as in SVHN": (PUBLISHED["as in SVHN"], True),
    "as in CINIC-10": (PUBLISHED["as in CINIC-10"], True),
    "strides": (lambda: sized(nn.Conv2d(2, 3, (2, 3), stride=(1, 2), padding=(1, 0))), True),
    "dilated, no bias": (lambda: sized(nn.Conv2d(2, 3, 2, dilation=2, bias=False), nn.AvgPool2d(2)), True),
    "one after another": (lambda: sized(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 1)), True),
    "groups": (lambda: sized(nn.Conv2d(2, 4, 3, groups=2)), False),
    "reflected": (lambda: sized(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect")), False),
    "padded by name": (lambda: sized(nn.Conv2d(2, 3, 3, padding="same")), False),
}  # fmt: skip
WORK: dict[str, Any] = {"lr": 0.05, "epochs": 2, "batch_size": 3, "drop_last": False, "schedule": PerStep(0.9)}
OPTIMISERS: dict[str, LocalRule] = {
    "momentum": Momentum(0.8, weight_decay=0.1, **WORK),
    "nesterov": Momentum(0.8, nesterov=True, weight_decay=0.1, state="client", **WORK),
    "adam": Adam(0.8, 0.9, weight_decay=0.1, state="client", **WORK),
    "adamw": Adam(weight_decay=0.1, decoupled=True, **WORK),
}


def paired(*others: tuple[str, ...]) -> list[Any]:
    """Every model with one of each of the others; the rest of the product is slow."""
    every = [(name, other) for name in MODELS for other in itertools.chain(*others)]
    chosen = {(name, some[place % len(some)]) for some in others for place, name in enumerate(MODELS)}
    return [pytest.param(*pair, marks=[] if pair in chosen else pytest.mark.slow) for pair in every]
