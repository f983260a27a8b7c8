"""How the tensors of a run that are divided among ranks are combined into those of a single process, for
checkpoints."""

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
from fedsim.core.ranks import ProcessRanks
from fedsim.strategies import Strategy


@dataclass(frozen=True)
class RankLayout:
    """Which tensors are divided among ranks.

    Attributes:
        ranks: of the run.
        client_shape: (R, m).
        fields_divided_by_rank: names of the tensors [R·m', …] of which each rank holds its own clients' rows; the
            others are the same on every rank.
    """

    ranks: ProcessRanks = field(default_factory=ProcessRanks)
    client_shape: tuple[int, int] = (0, 0)
    fields_divided_by_rank: frozenset[str] = frozenset()

    @classmethod
    def from_components(
        cls, strategy: Strategy[Any], memory: Memory, model: Tensor, federation: Federation
    ) -> RankLayout:
        """A field of the strategy's state is divided if it is longer in a single process that has all clients."""
        ranks, population_shape = federation.ranks, (federation.num_replicates, federation.clients)
        if ranks.num_ranks == 1:
            return cls()
        local_lengths, single_lengths = (
            {f.name: getattr(state, f.name).shape[:1] for f in dataclasses.fields(state)}
            for state in (
                strategy.initial(model[:, :1], federation),
                strategy.initial(model[:, :1], dataclasses.replace(federation, ranks=ProcessRanks())),
            )
        )
        divided_fields = {
            tensor_name for tensor_name in local_lengths if local_lengths[tensor_name] != single_lengths[tensor_name]
        }
        for tensor_name in sorted(local_lengths.keys() - divided_fields):
            if local_lengths[tensor_name] == (federation.num_replicates * federation.clients,):
                raise ConfigError(
                    f"strategy={type(strategy).__name__} keeps {tensor_name} of every client on every rank; "
                    "make it with federation.num_memory_rows and federation.broadcast"
                )
        of_clients = {tensor_name for tensor_name in memory.named_tensors() if not tensor_name.startswith("server.")}
        return cls(ranks, population_shape, frozenset(divided_fields | of_clients))

    def global_shape(self, name: str, value: Tensor) -> tuple[int, ...]:
        """Return the shape of this tensor in a single process."""
        return (
            (self.client_shape[0] * self.client_shape[1], *value.shape[1:])
            if name in self.fields_divided_by_rank
            else tuple(value.shape)
        )

    def gather(self, name: str, value: Tensor) -> Tensor:
        """Return the single process's tensor on rank 0, on the host; on other ranks `value`."""
        if name not in self.fields_divided_by_rank:
            return value
        ranks = self.ranks
        local_rows = value.detach().cpu()
        if not ranks.is_main_rank:
            ranks.send(local_rows.contiguous(), 0)
            return value
        full_tensor = torch.empty(*self.client_shape, *value.shape[1:], dtype=value.dtype)
        full_tensor[:, ranks.client_slice] = local_rows.unflatten(0, (self.client_shape[0], -1))
        for rank in range(1, ranks.num_ranks):
            rank_rows = full_tensor[:, rank :: ranks.num_ranks]
            rank_rows.copy_(ranks.receive(rank_rows, rank))
        return full_tensor.flatten(0, 1)

    def gather_rows(self, in_flight: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows in flight of all ranks, name → [k, …], on rank 0, on the host, in the order of a single
        process: by the round in which they were started, then by client. On other ranks return `in_flight`."""
        ranks = self.ranks
        if ranks.num_ranks == 1 or not in_flight:  # before the first round, or if nothing is delayed, on every rank
            return in_flight
        row_counts = ranks.all_gather_objects(len(in_flight["virtual"]))
        local_rows = {tensor_name: value.detach().cpu().contiguous() for tensor_name, value in in_flight.items()}
        if not ranks.is_main_rank:
            for tensor_name in sorted(local_rows):
                ranks.send(local_rows[tensor_name], 0)
            return in_flight
        gathered_rows = {}
        for tensor_name in sorted(local_rows):
            buffers = (local_rows[tensor_name].new_empty(k, *local_rows[tensor_name].shape[1:]) for k in row_counts[1:])
            gathered_rows[tensor_name] = torch.cat(
                [local_rows[tensor_name], *(ranks.receive(buffer, n + 1) for n, buffer in enumerate(buffers))]
            )
        order = torch.from_numpy(np.lexsort((gathered_rows["virtual"].numpy(), gathered_rows["began"].numpy())))
        return {tensor_name: value[order] for tensor_name, value in gathered_rows.items()}

    def scatter_rows_to_ranks(self, in_flight: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows in flight of this rank's clients, out of those on rank 0."""
        ranks = self.ranks
        if ranks.num_ranks == 1:
            return in_flight
        owner_ranks = in_flight["virtual"] % self.client_shape[1] % ranks.num_ranks if in_flight else torch.zeros(0)
        counts = [int((owner_ranks == rank).sum()) for rank in range(ranks.num_ranks)]
        row_layouts = {name: (tuple(rows.shape[1:]), rows.dtype) for name, rows in sorted(in_flight.items())}
        row_layouts, counts = ranks.broadcast_object((row_layouts, counts))
        if not ranks.is_main_rank:
            empty_rows = {
                name: torch.empty(counts[ranks.rank], *shape, dtype=dtype)
                for name, (shape, dtype) in row_layouts.items()
            }
            return {name: ranks.receive(rows, 0) for name, rows in empty_rows.items()}
        for rank, name in itertools.product(range(1, ranks.num_ranks), row_layouts):
            ranks.send(in_flight[name][owner_ranks == rank].contiguous(), rank)
        return {name: rows[owner_ranks == 0] for name, rows in in_flight.items()}

    def scatter(self, name: str, full_tensor: Tensor | None, template_tensor: Tensor) -> Tensor:
        """Return this rank's part, on the host, of a tensor on rank 0 (None on other ranks); `template_tensor` has its
        shape and dtype."""
        ranks = self.ranks
        if name not in self.fields_divided_by_rank:
            return ranks.broadcast_tensor(full_tensor, template_tensor)
        if full_tensor is None:
            return ranks.receive(template_tensor, 0)
        rows_by_client = full_tensor.unflatten(0, self.client_shape)
        for rank in range(1, ranks.num_ranks):
            ranks.send(rows_by_client[:, rank :: ranks.num_ranks].contiguous(), rank)
        local_rows: Tensor = rows_by_client[:, ranks.client_slice].flatten(0, 1)
        return local_rows
