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

    def of_samples(self, contamination: Contamination) -> Contamination:
        return FlippedLabels(contamination, self)


class FlippedLabels(Contamination):
    """The labels of some clients, after whatever else contaminates them.

    Args:
        before: that.
        attack: whose, and since when.
    """

    def __init__(self, before: Contamination, attack: LabelFlip) -> None:
        self.before, self.attack = before, attack

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        self.before.setup(federation, dataset)
        if dataset.classes is None or (not dataset.stream and dataset.labels is None):
            raise ConfigError(
                f"attack=label_flip needs one class for a sample, and dataset={dataset.name} has none or several; use "
                "another attack"
            )
        if len(self.attack.byzantine_mask) != len(federation.seeds) * federation.clients:
            raise ConfigError("attack=label_flip says nothing of those who join later; use personal.newcomers=0")
        self.classes = dataset.classes

    def at(self, t: int) -> Contamination:
        return self if t >= self.attack.since else self.before

    def __call__(self, batch: dict[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        y, bad = batch["y"], self.attack.byzantine_mask[batch["row"]]
        base_batch = self.before(batch, keys) if self.before.active else batch
        flipped = torch.where(
            bad.reshape(-1, *[1] * (y.dim() - 1)), self.classes - 1 - base_batch["y"], base_batch["y"]
        )
        wrong = bad[:, None].expand(y.shape[:2])
        return base_batch | {"y": flipped, "contaminated": wrong | base_batch.get("contaminated", wrong)}
