"""Gaussian outliers: Q = N(mean, std² I)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedsim.contamination.base import Entry, Huber, real_entry
from fedsim.core.constraints import NonNegative, Real
from fedsim.core.federation import Federation
from fedsim.datasets import Dataset


class Gaussian(Huber):
    """Planted samples are N(mean, std²) in every feature (`entry: x`), or in the target (`entry: y`).

    Args:
        mean, std: of Q, in the units of the prepared input.
        entry: 'x' or 'y'.
        **options: of `Huber`.
    """

    def __init__(self, mean: Real = 0.0, std: NonNegative = 10.0, entry: Entry = "x", **options: Any) -> None:
        super().__init__(**options)
        self.mean, self.std = mean, std
        self.entry = entry

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        super().setup(federation, dataset)
        self.entry = real_entry(self, self.entry, dataset)

    def corrupt(self, batch: dict[str, Tensor], contaminated: Tensor, keys: Tensor) -> dict[str, Tensor]:
        return {self.entry: self.mean + self.std * self.normals(keys, batch[self.entry])}
