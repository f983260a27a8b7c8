"""Metrics of one's own, as a user's package has them, and what they and torchmetrics' must give: naive formulas."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


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
