"""What a drift displaces: inputs along a direction or around a centre, targets, or the fractions of the classes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.datasets import Dataset

MOVEMENTS = ("features", "rotation", "targets", "labels")
Batch = dict[str, Tensor]


class SampleDisplacement(ABC):
    """Displaces the samples of c clients by one number each."""

    @abstractmethod
    def __call__(
        self, batch: Batch, displacement: np.ndarray, replicate: np.ndarray, client: np.ndarray | None
    ) -> Batch:
        """The batch, displaced; the tensors given are left as they are.

        Args:
            batch: 'x' [c, B, …], prepared, and 'y' [c, B, …] where there are targets.
            displacement, replicate, client: [c] (host); client None: samples of all clients.
        """


def columns(displacement: np.ndarray, like: Tensor) -> Tensor:
    """[c] (host) as [c, 1, …], with the type, the device and the dimensions of a batch's entry [c, B, …]."""
    numbers = torch.as_tensor(displacement).to(like.dtype)
    return numbers.reshape(-1, *[1] * (like.dim() - 1)).to(like.device, non_blocking=True)


class FeatureMovement(SampleDisplacement):
    """x ← x + s u.

    Args:
        dataset: of the run.
        direction: u, one number per feature; None: all 1.
    """

    def __init__(self, dataset: Dataset, direction: Sequence[float] | None) -> None:
        need_numbers(dataset, "features")
        size = math.prod(dataset.shape)
        if direction is not None and len(direction) != size:
            raise ConfigError(
                f"drift.direction has {len(direction)} entries, but inputs of dataset={dataset.name} have {size} "
                "features"
            )
        numbers = torch.ones(size, dtype=torch.float64) if direction is None else torch.tensor(list(direction))
        self.direction = numbers.to(torch.float64).reshape(dataset.shape)

    def __call__(
        self, batch: Batch, displacement: np.ndarray, replicate: np.ndarray, client: np.ndarray | None
    ) -> Batch:
        x = batch["x"]
        return batch | {"x": x + columns(displacement, x) * self.direction.to(x)}


class Rotation(SampleDisplacement):
    """Inputs rotated by s degrees: images anticlockwise around their centre, with bilinear interpolation and zeros
    outside, other inputs in the plane of two features.

    Args:
        dataset: of the run.
        plane: these two features.
    """

    def __init__(self, dataset: Dataset, plane: Sequence[int]) -> None:
        need_numbers(dataset, "rotation")
        self.image, self.plane = len(dataset.shape) == 3, list(plane)
        size = math.prod(dataset.shape)
        if not self.image and max(plane) >= size:
            raise ConfigError(
                f"drift.plane={list(plane)} names feature {max(plane)}, but inputs of dataset={dataset.name} have "
                f"{size}; {'use moves=features' if size < 2 else f'features are numbered from 0 to {size - 1}'}"
            )

    def __call__(
        self, batch: Batch, displacement: np.ndarray, replicate: np.ndarray, client: np.ndarray | None
    ) -> Batch:
        x, angle = batch["x"], np.deg2rad(displacement)
        cos, sin = columns(np.cos(angle), x).flatten(), columns(np.sin(angle), x).flatten()
        return batch | {"x": self._rotate_images(x, cos, sin) if self.image else self._rotate_vectors(x, cos, sin)}

    def _rotate_vectors(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        flat = x.flatten(2).clone()
        first_feature, second_feature = (flat[..., feature].clone() for feature in self.plane)
        cos, sin = cos[:, None], sin[:, None]
        flat[..., self.plane[0]] = cos * first_feature - sin * second_feature
        flat[..., self.plane[1]] = sin * first_feature + cos * second_feature
        return flat.reshape(x.shape)

    @staticmethod
    def _rotate_images(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        ratio, zero_entries = height / width, torch.zeros_like(cos)
        # from a pixel of the result to its source, in coordinates from −1 to 1; y points downwards
        rows = torch.stack([cos, -sin * ratio, zero_entries]), torch.stack([sin / ratio, cos, zero_entries])
        theta = torch.stack(rows).permute(2, 0, 1).repeat_interleave(x.shape[1], dim=0)  # [c·B, 2, 3]
        images = x.flatten(0, 1)
        grid = functional.affine_grid(theta, list(images.shape), align_corners=False)
        return functional.grid_sample(images, grid, align_corners=False).reshape(x.shape)


class TargetMovement(SampleDisplacement):
    """y ← y + s for real-valued targets; y ← (y + round(s)) mod K for K classes.

    Args:
        dataset: of the run.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.classes = dataset.classes
        stored_without = not dataset.stream and dataset.train_y is None
        has_several_labels = self.classes is not None and not dataset.stream and dataset.labels is None
        if stored_without or has_several_labels or (self.classes is None and dataset.loss != "squared"):
            raise ConfigError(
                f"drift.moves=targets needs one class or real-valued targets per sample, which dataset={dataset.name} "
                "does not have; use moves=features"
            )

    def __call__(
        self, batch: Batch, displacement: np.ndarray, replicate: np.ndarray, client: np.ndarray | None
    ) -> Batch:
        y = batch["y"]
        if self.classes is None:
            return batch | {"y": y + columns(displacement, y)}
        return batch | {"y": (y + columns(np.rint(displacement), y)) % self.classes}


class LabelFractions(SampleDisplacement):
    """Class k of K has the fraction π_{i,k} e^{s b_k} / Σ_j π_{i,j} e^{s b_j} of client i, with b from −1 for class 0
    to 1 for class K − 1. Samples have importance weights, normalised over the batch; classes without samples at a
    client remain absent.

    Args:
        dataset: of the run.
        federation: all clients, with their class fractions.
    """

    def __init__(self, dataset: Dataset, federation: Federation) -> None:
        if dataset.stream or federation.class_fractions is None or dataset.classes is None or dataset.classes < 2:
            raise ConfigError(
                f"drift.moves=labels changes the fractions of classes of stored samples, which dataset={dataset.name} "
                "does not have; use moves=features"
            )
        self.fractions = np.asarray(federation.class_fractions, dtype=np.float64)  # [R, m, K]
        self.of_test = self.fractions.mean(axis=(0, 1))
        if dataset.test_y is not None:
            self.of_test = np.bincount(dataset.test_y.cpu().numpy(), minlength=dataset.classes) / len(dataset.test_y)
        self.class_tilt = np.linspace(-1.0, 1.0, dataset.classes)

    def __call__(
        self, batch: Batch, displacement: np.ndarray, replicate: np.ndarray, client: np.ndarray | None
    ) -> Batch:
        class_fractions = self.of_test[None] if client is None else self.fractions[replicate, client]
        factors = np.exp(displacement[:, None] * self.class_tilt)  # [c, K]
        total = (np.nan_to_num(class_fractions) * factors).sum(1, keepdims=True)
        of_class = torch.as_tensor(factors / np.where(total > 0, total, 1.0)).to(importance_weight_dtype(batch))
        weight = of_class.to(batch["x"].device, non_blocking=True).gather(1, batch["y"].to(torch.int64))
        return batch | {"weight": weight * batch["weight"] if "weight" in batch else weight}


def importance_weight_dtype(batch: Batch) -> torch.dtype:
    """The type of importance weights: that of the inputs, unless these are tokens."""
    return batch["x"].dtype if batch["x"].is_floating_point() else torch.get_default_dtype()


def need_numbers(dataset: Dataset, moves: str) -> None:
    """Raise an error if inputs are tokens."""
    if dataset.tokens:
        raise ConfigError(f"drift.moves={moves} moves numbers, but dataset={dataset.name} has tokens; use drift=none")
