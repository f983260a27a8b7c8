"""Byzantine clients that train on wrong labels and send the resulting update."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.contamination import Contamination
from fedsim.data.datasets import Dataset
from fedsim.uplink import StageContext
from fedsim.uplink.attack.attack import Attack


class LabelFlip(Attack):
    """Trains on C − 1 − y instead of every label y, with C classes, and sends the resulting update.

    Args:
        fraction, clients, since: see `fedsim.uplink.attack.Attack`.
    """

    def byzantine_rows(self, rows: Tensor, byzantine: Tensor, link: StageContext) -> Tensor:
        return rows

    def with_label_attack(self, contamination: Contamination) -> Contamination:
        return FlippedLabels(contamination, self)


class FlippedLabels(Contamination):
    """Flips the labels of some clients, after the other contaminations.

    Args:
        inner_contamination: that.
        attack: whose, and since when.
    """

    def __init__(self, inner_contamination: Contamination, attack: LabelFlip) -> None:
        self.inner_contamination, self.attack = inner_contamination, attack

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        self.inner_contamination.setup(federation, dataset)
        if dataset.classes is None or (not dataset.stream and dataset.labels is None):
            raise ConfigError(
                f"attack=label_flip needs one class for a sample, and dataset={dataset.name} has none or several; use "
                "another attack"
            )
        if len(self.attack.byzantine_mask) != len(federation.seeds) * federation.clients:
            raise ConfigError("attack=label_flip does not apply to clients that join later; use personal.newcomers=0")
        self.classes = dataset.classes

    def at(self, t: int) -> Contamination:
        return self if t >= self.attack.since else self.inner_contamination

    def __call__(self, batch: dict[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        y, byzantine = batch["y"], self.attack.byzantine_mask[batch["row"]]
        base_batch = self.inner_contamination(batch, keys) if self.inner_contamination.active else batch
        flipped_labels = torch.where(
            byzantine.reshape(-1, *[1] * (y.dim() - 1)), self.classes - 1 - base_batch["y"], base_batch["y"]
        )
        flipped_mask = byzantine[:, None].expand(y.shape[:2])
        return base_batch | {
            "y": flipped_labels,
            "contaminated": flipped_mask | base_batch.get("contaminated", flipped_mask),
        }
