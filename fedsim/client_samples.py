"""Samples of its own on which every client is judged: the same in every evaluation, whoever asks."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim import rng
from fedsim.partition import Table
from fedsim.trainer import Batches
from fedsim.trainer.batches import flattened, thinned


class ClientSamples:
    """Up to `most` samples of each virtual client; those of a stream have the moments of its law (`Stream.exact`).

    Args:
        batches: of the run.
        most: samples a client is judged by; None takes all it has (of a stream: 100).
        dtype: of what models see.
        tables: which samples, one table per replicate; None: those it trains on. Of no meaning for a stream.
    """

    def __init__(
        self, batches: Batches, most: int | None, dtype: torch.dtype, tables: list[Table] | None = None
    ) -> None:
        self.batches, self.federation, self.dtype = batches, batches.federation, dtype
        if batches.dataset.stream:
            self.width = batches.dataset.exact_size(100 if most is None else most)
            return
        device = self.federation.device
        if tables is None:
            self.order, self.offsets = batches.order, batches.offsets
            self.sizes = torch.as_tensor(self.federation.sizes, device=device)
        else:
            self.order, self.offsets = flattened(tables, device)
            self.sizes = torch.cat([torch.as_tensor(table.sizes, device=device) for table in tables])
        longest = int(self.sizes.max())
        self.width = longest if most is None else min(most, longest)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """x [n, q, …], y [n, q], weight [n, q], client and row [n] of virtual clients [n]; weight 0 marks padding.

        A client without any sample has weight 0 throughout.
        """
        clients, dataset = rows % self.federation.clients, self.batches.dataset
        if dataset.stream:
            seeds = self.federation.seed_of_replicate[rows // self.federation.clients]
            keys = rng.row_keys(seeds, rng.Purpose.EVALUATION, clients)
            batch = dataset.exact(clients, keys, self.width, self.dtype)
            weight = torch.ones(len(rows), self.width, dtype=self.dtype, device=rows.device)
        else:
            numbers, real = thinned(self.order, self.offsets[rows], self.sizes[rows], self.width)
            batch = self.batches.gather(numbers, self.dtype)
            batch["x"] = dataset.prepare(batch["x"], self.dtype)
            weight = real.to(self.dtype)
        return batch | {"weight": weight, "client": clients, "row": rows}
