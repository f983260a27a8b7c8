"""The test set of data that drift: each sample drifts like one of the clients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsim.data.drift.movements import importance_weight_dtype
from fedsim.data.samples import ClientData


class DriftingTestSet:
    """The test set with the law of a round: sample j drifts like its owner, or like client j mod m if test samples do
    not belong to clients of the run.

    Args:
        data: of the run.
        owners_are_clients: whether the owner of a test sample is the client of the same number.
    """

    def __init__(self, data: ClientData, owners_are_clients: bool = False) -> None:
        self.data, self.owners_are_clients = data, owners_are_clients

    def batches(self, batch: dict[str, Tensor], start: int, t: int) -> list[dict[str, Tensor]] | None:
        """A batch of the test set from sample `start` on, with the law of round t of each replicate; None if it is as
        stored in all of them.
        """
        drift, owners = self.data.drift, self.data.dataset.test_owners
        if not drift.active:
            return None
        federation, number = self.data.federation, np.arange(start, start + len(batch["x"]))
        client = number % federation.clients
        if self.owners_are_clients and owners is not None:
            client = owners[start : start + len(number)].cpu().numpy()
        replicates = [np.full(len(number), r) for r in range(federation.num_replicates)]
        displacements = [drift.displacement(np.full(len(number), t), replicate, client) for replicate in replicates]
        if not np.any(displacements):
            return None
        samples = {name: value[:, None] for name, value in batch.items()}  # each a batch of one
        drifted_batches = [
            drift.displaced(samples, displacement, replicate, None)
            for displacement, replicate in zip(displacements, replicates, strict=True)
        ]
        if drift.uses_importance_weights:  # also where a replicate's fractions are as stored
            ones = torch.ones(len(number), 1, dtype=importance_weight_dtype(batch), device=batch["x"].device)
            drifted_batches = [{"weight": ones} | of_replicate for of_replicate in drifted_batches]
        return [{name: value[:, 0] for name, value in of_replicate.items()} for of_replicate in drifted_batches]
