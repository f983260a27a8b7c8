"""Metrics of one's own, as a user's package has them; naive formulas of torchmetrics'; data to measure them on."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.data.datasets import Dataset

SIZES = (1, 7, 12, 3, 5, 9, 2, 8, 4, 6, 11, 10, 1, 2, 3, 4, 5, 6, 7, 8, 2, 3)  # 22 clients: a tenth are two
SEEDS, CLASSES, TEST = (3, 4, 5), 4, 1203
DOUBLE = Execution(dtype="float64")


def margin(output: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    """One number per sample: how far the label's score is above the mean score."""
    return scale * (output.gather(1, target[:, None])[:, 0] - output.mean(1))


def spread(output: Tensor, target: Tensor) -> float:
    """A number of a whole set that is no mean over its batches: the standard deviation of the labels' scores."""
    return output.gather(1, target[:, None]).std(correction=0).item()


def sloppy(output: Tensor, target: Tensor) -> Tensor:
    """It writes into the outputs."""
    return output.sigmoid_().mean(1)


def by_chance(output: Tensor, target: Tensor) -> float:
    return torch.rand(()).item()


def ranks(output: Tensor, target: Tensor) -> Tensor:
    """A number per sample that depends on who else is there."""
    return output[:, 0] - output[:, 0].mean()


def per_class(output: Tensor, target: Tensor) -> Tensor:
    return output.mean(0)


def picky(output: Tensor, target: Tensor) -> Tensor:
    """It fails where a set lacks a class, but not on a few samples."""
    if len(target) > 3 and len(target.unique()) < 3:
        raise ValueError("a class is missing")
    return output.mean()


spread.higher_is_better = False  # type: ignore[attr-defined]


class Largest:
    """Sees a set batch by batch: the largest loss."""

    higher_is_better = False

    def __init__(self, power: float = 1.0) -> None:
        self.power = power
        self.reset()

    def reset(self) -> None:
        self.largest = 0.0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.largest = max(self.largest, F.cross_entropy(output, target, reduction="none").max().item())

    def compute(self) -> float:
        return self.largest**self.power


def top(k: int, scores: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean([label in np.argsort(-row)[:k] for row, label in zip(scores, y, strict=True)]))


def macro_f1(predicted: np.ndarray, y: np.ndarray, classes: int) -> float:
    """The mean over the classes that are there or predicted."""
    found = []
    for c in range(classes):
        hit, wrong, missed = (
            np.sum((predicted == c) & (y == c)),
            np.sum((predicted == c) & (y != c)),
            np.sum((predicted != c) & (y == c)),
        )
        if hit + wrong + missed:
            found.append(2 * hit / (2 * hit + wrong + missed))
    return float(np.mean(found))


def area(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of pairs in which the positive sample has the higher score; NaN without pairs."""
    up, down = scores[positive == 1][:, None], scores[positive == 0][None]
    pairs = (up > down) + 0.5 * (up == down)
    return float(pairs.mean()) if pairs.size else float("nan")


def precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """Average precision: the mean over positive samples of the precision at their scores; NaN without any."""
    at = [np.mean(positive[scores >= score]) for score in scores[positive == 1]]
    return float(np.mean(at)) if at else float("nan")


def macro(score, probabilities: np.ndarray, y: np.ndarray) -> float:
    """Over the classes where it exists."""
    found = [score(probabilities[:, c], y == c) for c in range(probabilities.shape[1])]
    return float(np.nanmean(found)) if not np.isnan(found).all() else float("nan")


def labelled(test: int = TEST) -> Dataset:
    """Few clients hold all classes, and more test samples than one forward pass takes."""
    draw = np.random.default_rng(2)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    y = (owners + draw.integers(0, 2, len(owners)) * draw.integers(1, CLASSES, len(owners))) % CLASSES
    targets = draw.choice(CLASSES, test, p=[0.1, 0.2, 0.3, 0.4])
    parts = [draw.standard_normal((len(y), 5)), y, draw.standard_normal((test, 5)), targets]
    return Dataset("labels", *map(torch.as_tensor, parts), classes=CLASSES, owners=torch.as_tensor(owners))


def of(dataset: Dataset, model, metrics, **given) -> Simulation:
    clients = len(SIZES) if dataset.owners is not None else 2
    options = {"seeds": SEEDS, "execution": DOUBLE, "clients": clients, "rounds": 2} | given
    return Simulation(dataset, model, evaluation=EvaluationOptions(client_samples=12, metrics=metrics), **options)


def models_of(simulation: Simulation) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(len(simulation.federation.seeds), simulation.model.dimension, generator=draw).double()


def outputs_of(simulation: Simulation, row: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return simulation.model.evaluate(row, x.double() if x.is_floating_point() else x)


class Score(nn.Module):
    """So many numbers of five."""

    def __init__(self, shape=None, classes=None, outputs: int = 1, flat: bool = False) -> None:
        super().__init__()
        self.layer, self.flat = nn.Linear(5, outputs), flat

    def forward(self, x):
        return self.layer(x)[:, 0] if self.flat else self.layer(x)
