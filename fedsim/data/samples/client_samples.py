"""Fixed samples of every client for evaluation: the same in every evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.data.samples.client_data import Batch, ClientData


class ClientSamples:
    """Up to `limit` samples of each virtual client; those of a stream have the moments of its law
    (`StreamDataset.exact`).

    Args:
        data: training or validation samples of clients.
        limit: samples per client; None: all.
        dtype: of model inputs.

    Attributes:
        width: q, samples per client in `batch`.
    """

    def __init__(self, data: ClientData, limit: int | None, dtype: torch.dtype) -> None:
        self.data, self.dtype, self.width = data, dtype, data.width(limit)

    def batch(self, rows: Tensor, t: int = 0) -> Batch:
        """x [n, q, …], y [n, q], weight [n, q], client and row [n] of virtual clients [n], with the law of round t;
        weight 0 marks padding.
        """
        batch = self.data.fixed_samples(rows, self.width, self.dtype, rng.Purpose.EVALUATION, by_seed=True)
        if "weight" not in batch:
            batch["weight"] = torch.ones(len(rows), self.width, dtype=self.dtype, device=rows.device)
        return self.data.drifted(batch, rows.cpu().numpy(), t) if self.data.drift.active else batch
