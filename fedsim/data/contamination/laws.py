"""Kinds of contaminated samples: outliers, a fixed point, noisy features, wrong labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import NonNegative, Real
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.contamination.huber import ContaminatedEntry, HuberContamination, check_real_entry, check_real_inputs
from fedsim.data.datasets import Dataset


class Gaussian(HuberContamination):
    """Planted samples are N(mean, std²) in every feature (`entry: x`), or in the target (`entry: y`).

    Args:
        mean, std: of Q, in the units of the prepared input.
        entry: 'x' or 'y'.
        **options: of `HuberContamination`.
    """

    def __init__(
        self, mean: Real = 0.0, std: NonNegative = 10.0, entry: ContaminatedEntry = "x", **options: Any
    ) -> None:
        super().__init__(**options)
        self.mean, self.std = mean, std
        self.entry = entry

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        super().setup(federation, dataset)
        self.entry = check_real_entry(self, self.entry, dataset)

    def replacement_values(self, batch: dict[str, Tensor], contaminated: Tensor, keys: Tensor) -> dict[str, Tensor]:
        return {self.entry: self.mean + self.std * self.normals(keys, batch[self.entry])}


class FeatureNoise(HuberContamination):
    """x ← x + N(0, std²) in every feature of contaminated samples. Unlike Huber's Q_i, the resulting law depends on the
    genuine samples.

    Args:
        std: in the units of the prepared input.
        **options: of `HuberContamination`.
    """

    def __init__(self, std: NonNegative = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.std = std

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        super().setup(federation, dataset)
        check_real_inputs(self, dataset)

    def replacement_values(self, batch: dict[str, Tensor], contaminated: Tensor, keys: Tensor) -> dict[str, Tensor]:
        return {"x": batch["x"] + self.std * self.normals(keys, batch["x"])}


class LabelFlip(HuberContamination):
    """The wrong class is any of the others with equal chance; of two classes, the other."""

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        super().setup(federation, dataset)
        if dataset.classes is None:
            raise ConfigError(
                f"contamination=label_flip needs classes, and dataset={dataset.name} has none; use gaussian"
            )
        if not dataset.stream and dataset.labels is None:
            raise ConfigError(
                f"contamination=label_flip needs one class per sample, and dataset={dataset.name} has several"
            )
        self.classes = dataset.classes

    def replacement_values(self, batch: dict[str, Tensor], contaminated: Tensor, keys: Tensor) -> dict[str, Tensor]:
        slots = torch.arange(contaminated.shape[1], device=keys.device)
        return {"y": (batch["y"] + 1 + rng.integers(keys[:, None], slots, self.classes - 1)) % self.classes}


class Point(HuberContamination):
    """Planted samples are one fixed point: `value` in every feature (`entry: x`), or as target (`entry: y`).

    Args:
        value: in the units of the prepared input.
        entry: 'x' or 'y'.
        **options: of `HuberContamination`.
    """

    def __init__(self, value: Real = 10.0, entry: ContaminatedEntry = "x", **options: Any) -> None:
        super().__init__(**options)
        self.value, self.entry = value, entry

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        super().setup(federation, dataset)
        self.entry = check_real_entry(self, self.entry, dataset)

    def replacement_values(self, batch: dict[str, Tensor], contaminated: Tensor, keys: Tensor) -> dict[str, Tensor]:
        return {self.entry: torch.full_like(batch[self.entry], self.value)}
