"""Wrong labels: a contaminated sample keeps its input and gets another class."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.contamination.base import Huber
from fedsim.core import rng
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.datasets import Dataset


class LabelFlip(Huber):
    """The wrong class is any of the others with equal chance; of two classes, the other."""

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        super().setup(federation, dataset)
        if dataset.classes is None:
            raise ConfigError(
                f"contamination=label_flip needs classes, and dataset={dataset.name} has none; use gaussian"
            )
        if not dataset.stream and dataset.labels is None:
            raise ConfigError(
                f"contamination=label_flip needs one class for a sample, and dataset={dataset.name} has several"
            )
        self.classes = dataset.classes

    def corrupt(self, batch: dict[str, Tensor], contaminated: Tensor, keys: Tensor) -> dict[str, Tensor]:
        slots = torch.arange(contaminated.shape[1], device=keys.device)
        return {"y": (batch["y"] + 1 + rng.integers(keys[:, None], slots, self.classes - 1)) % self.classes}
