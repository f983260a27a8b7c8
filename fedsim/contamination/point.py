"""A point mass: Q = δ_value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.contamination.base import Entry, Huber, real_entry
from fedsim.core.constraints import Real
from fedsim.core.federation import Federation
from fedsim.datasets import Dataset


class Point(Huber):
    """Planted samples are one fixed point: `value` in every feature (`entry: x`), or as target (`entry: y`).

    Args:
        value: in the units of the prepared input.
        entry: 'x' or 'y'.
        **options: of `Huber`.
    """

    def __init__(self, value: Real = 10.0, entry: Entry = "x", **options: Any) -> None:
        super().__init__(**options)
        self.value, self.entry = value, entry

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        super().setup(federation, dataset)
        self.entry = real_entry(self, self.entry, dataset)

    def corrupt(self, batch: dict[str, Tensor], contaminated: Tensor, keys: Tensor) -> dict[str, Tensor]:
        return {self.entry: torch.full_like(batch[self.entry], self.value)}
