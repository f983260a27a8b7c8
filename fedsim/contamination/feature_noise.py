"""Broken sensors: noise on top of a contaminated sample's own features."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedsim.contamination.base import Huber, real_inputs
from fedsim.core.constraints import NonNegative
from fedsim.core.federation import Federation
from fedsim.datasets import Dataset


class FeatureNoise(Huber):
    """x ← x + N(0, std²) in every feature of contaminated samples. Unlike Huber's Q_i, this law follows theirs.

    Args:
        std: in the units of the prepared input.
        **options: of `Huber`.
    """

    def __init__(self, std: NonNegative = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.std = std

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        super().setup(federation, dataset)
        real_inputs(self, dataset)

    def corrupt(self, batch: dict[str, Tensor], contaminated: Tensor, keys: Tensor) -> dict[str, Tensor]:
        return {"x": batch["x"] + self.std * self.normals(keys, batch["x"])}
