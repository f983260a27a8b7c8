"""Samples of its own on which every client is judged: the same in every evaluation, whoever asks."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.data.samples.client_data import Batch, ClientData


class ClientSamples:
    """Up to `limit` samples of each virtual client; those of a stream have the moments of its law (`Stream.exact`).

    Args:
        data: whose samples: those that clients train on, or validation samples.
        limit: samples a client is judged by; None takes all it has.
        dtype: of what models see.

    Attributes:
        width: q, samples that `batch` gives each client.
    """

    def __init__(self, data: ClientData, limit: int | None, dtype: torch.dtype) -> None:
        self.data, self.dtype, self.width = data, dtype, data.width(limit)

    def batch(self, rows: Tensor) -> Batch:
        """x [n, q, …], y [n, q], weight [n, q], client and row [n] of virtual clients [n]; weight 0 marks padding."""
        batch = self.data.fixed_samples(rows, self.width, self.dtype, rng.Purpose.EVALUATION, by_seed=True)
        if "weight" not in batch:
            batch["weight"] = torch.ones(len(rows), self.width, dtype=self.dtype, device=rows.device)
        return batch
