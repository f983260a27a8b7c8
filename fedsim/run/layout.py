"""How the tensors of a run, divided among ranks, are those of a single process: what a checkpoint holds."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.memory import Memory
from fedsim.core.ranks import Ranks
from fedsim.strategies import Strategy


@dataclass(frozen=True)
class Layout:
    """Which tensors each rank holds a part of.

    Attributes:
        ranks: of the run.
        shape: (R, m).
        divided: names of the tensors [R·m', …] of which each rank holds its own clients' rows; the others are the same
            on every rank.
    """

    ranks: Ranks = field(default_factory=Ranks)
    shape: tuple[int, int] = (0, 0)
    divided: frozenset[str] = frozenset()

    @classmethod
    def of(cls, strategy: Strategy[Any], memory: Memory, model: Tensor, federation: Federation) -> Layout:
        """A field of the strategy's state is divided if it is longer where one process has all clients."""
        ranks, shape = federation.ranks, (federation.replicates, federation.clients)
        if ranks.count == 1:
            return cls()
        local_lengths, single_lengths = (
            {f.name: getattr(state, f.name).shape[:1] for f in dataclasses.fields(state)}
            for state in (
                strategy.initial(model[:, :1], federation),
                strategy.initial(model[:, :1], dataclasses.replace(federation, ranks=Ranks())),
            )
        )
        divided = {name for name in local_lengths if local_lengths[name] != single_lengths[name]}
        for name in sorted(local_lengths.keys() - divided):
            if local_lengths[name] == (federation.replicates * federation.clients,):
                raise ConfigError(
                    f"strategy={type(strategy).__name__} keeps {name} of every client on every rank; "
                    "make it with federation.rows and federation.broadcast"
                )
        of_clients = {name for name in memory.named_tensors() if not name.startswith("server.")}
        return cls(ranks, shape, frozenset(divided | of_clients))

    def whole_shape(self, name: str, value: Tensor) -> tuple[int, ...]:
        """The shape of this tensor in a single process."""
        return (self.shape[0] * self.shape[1], *value.shape[1:]) if name in self.divided else tuple(value.shape)

    def gather(self, name: str, value: Tensor) -> Tensor:
        """The single process's tensor on rank 0, on the host; elsewhere `value`."""
        if name not in self.divided:
            return value
        ranks = self.ranks
        local_rows = value.detach().cpu()
        if not ranks.is_first:
            ranks.send(local_rows.contiguous(), 0)
            return value
        full_tensor = torch.empty(*self.shape, *value.shape[1:], dtype=value.dtype)
        full_tensor[:, ranks.client_slice] = local_rows.unflatten(0, (self.shape[0], -1))
        for rank in range(1, ranks.count):
            rank_rows = full_tensor[:, rank :: ranks.count]
            rank_rows.copy_(ranks.receive(rank_rows, rank))
        return full_tensor.flatten(0, 1)

    def gather_rows(self, in_flight: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is under way, name → [k', …] here → [k, …] on rank 0, on the host, in a single process's order: by the
        round in which rows began, then by client. Elsewhere `in_flight`."""
        ranks = self.ranks
        if ranks.count == 1 or not in_flight:  # before the first round, or where nothing is late: on every rank
            return in_flight
        counts = ranks.gather(len(in_flight["virtual"]))
        local_rows = {name: value.detach().cpu().contiguous() for name, value in in_flight.items()}
        if not ranks.is_first:
            for name in sorted(local_rows):
                ranks.send(local_rows[name], 0)
            return in_flight
        gathered_rows = {}
        for name in sorted(local_rows):
            buffers = (local_rows[name].new_empty(k, *local_rows[name].shape[1:]) for k in counts[1:])
            gathered_rows[name] = torch.cat(
                [local_rows[name], *(ranks.receive(buffer, n + 1) for n, buffer in enumerate(buffers))]
            )
        order = torch.from_numpy(np.lexsort((gathered_rows["virtual"].numpy(), gathered_rows["began"].numpy())))
        return {name: value[order] for name, value in gathered_rows.items()}

    def deal_rows(self, in_flight: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of the rows under way that are of this rank's clients, of what rank 0 holds."""
        ranks = self.ranks
        if ranks.count == 1:
            return in_flight
        owner = in_flight["virtual"] % self.shape[1] % ranks.count if in_flight else torch.zeros(0)
        counts = [int((owner == rank).sum()) for rank in range(ranks.count)]
        like = {name: (tuple(rows.shape[1:]), rows.dtype) for name, rows in sorted(in_flight.items())}
        like, counts = ranks.broadcast_object((like, counts))
        if not ranks.is_first:
            empty = {
                name: torch.empty(counts[ranks.rank], *shape, dtype=dtype) for name, (shape, dtype) in like.items()
            }
            return {name: ranks.receive(rows, 0) for name, rows in empty.items()}
        for rank, name in itertools.product(range(1, ranks.count), like):
            ranks.send(in_flight[name][owner == rank].contiguous(), rank)
        return {name: rows[owner == 0] for name, rows in in_flight.items()}

    def deal(self, name: str, full_tensor: Tensor | None, like: Tensor) -> Tensor:
        """This rank's part, on the host, of what rank 0 holds (None elsewhere); `like` has its shape and dtype."""
        ranks = self.ranks
        if name not in self.divided:
            return ranks.broadcast_tensor(full_tensor, like)
        if full_tensor is None:
            return ranks.receive(like, 0)
        rows_by_client = full_tensor.unflatten(0, self.shape)
        for rank in range(1, ranks.count):
            ranks.send(rows_by_client[:, rank :: ranks.count].contiguous(), rank)
        local_rows: Tensor = rows_by_client[:, ranks.client_slice].flatten(0, 1)
        return local_rows
