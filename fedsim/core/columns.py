"""The division of a client's row into columns that strategies see and columns that are kept apart."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core.federation import Cohort, Federation
from fedsim.core.memory import Memory

OWN_COLUMNS_ENTRY, AVERAGED_COLUMNS_ENTRY = "own columns", "averaged columns"  # names in a memory


def slice_if_contiguous(numbers: Tensor) -> Tensor | slice:
    """Return a slice in place of consecutive indices, since a slice copies nothing."""
    if len(numbers) and bool((numbers.diff() == 1).all()):
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


@dataclass(frozen=True)
class ParameterPartition:
    """A row [d] in three parts. Strategies see only the shared columns, and aggregate them as their papers say.

    Attributes:
        shared: [d_s] numbers of the trained columns that travel.
        private: [d_o] of those that stay with the client, trained or not.
        averaged: [d_a] of statistics that travel: they are no parameters that a server could step along, so whoever
            takes part gets their mean and its new one is that of those who took part, as federations do it everywhere.
    """

    shared: Tensor
    private: Tensor
    averaged: Tensor

    @classmethod
    def from_sizes(cls, sizes: dict[str, int], statistics: set[str], private_names: set[str]) -> ParameterPartition:
        """Build the partition of rows whose parts have these names and sizes: private parts stay with the client,
        statistics that are sent are averaged, and all else is shared."""
        count = torch.tensor(list(sizes.values()))
        home_mask, statistics_mask = (
            torch.tensor([name in selected_names for name in sizes]).repeat_interleave(count)
            for selected_names in (private_names, statistics)
        )
        columns = torch.arange(int(count.sum()))
        return cls(columns[~home_mask & ~statistics_mask], columns[home_mask], columns[~home_mask & statistics_mask])

    @property
    def has_hidden_columns(self) -> bool:
        """Whether rows have columns that strategies do not see."""
        return bool(len(self.private) or len(self.averaged))

    def merge_parts(self, shared: Tensor, private: Tensor, averaged: Tensor) -> Tensor:
        """[…, d_s], […, d_o], […, d_a] → rows […, d]."""
        rows = torch.cat([shared, private, averaged], dim=-1)
        return rows if self._column_order is None else rows[..., self._column_order]

    @functools.cached_property
    def _column_order(self) -> Tensor | None:
        """The position of each column in the three concatenated parts; None if the parts are contiguous."""
        columns = torch.cat([self.shared, self.private, self.averaged])
        return None if bool((columns.diff() == 1).all()) else columns.argsort()

    @functools.cached_property
    def _shared_column_index(self) -> Tensor | slice:
        return slice_if_contiguous(self.shared)

    def select_shared(self, rows: Tensor) -> Tensor:
        """Return […, d] → […, d_s], the columns that strategies see."""
        return rows[..., self._shared_column_index]

    def add_hidden_columns(self, initial: Tensor, memory: Memory, federation: Federation) -> None:
        """Add the hidden columns of initial rows [R, d] to a memory."""
        if len(self.private):
            memory.clients[OWN_COLUMNS_ENTRY] = federation.broadcast(initial[:, self.private])
        if len(self.averaged):
            memory.server[AVERAGED_COLUMNS_ENTRY] = initial[:, self.averaged]

    def full_rows(self, shared_rows: Tensor, cohort: Cohort, memory: Memory) -> Tensor:
        """Return the full rows [n, d] of a cohort's clients, given their shared columns [n, d_s]."""
        if not self.has_hidden_columns:
            return shared_rows
        no_columns = shared_rows[:, :0]
        private_columns = cohort.gather(memory.clients[OWN_COLUMNS_ENTRY]) if len(self.private) else no_columns
        averaged = cohort.broadcast(memory.server[AVERAGED_COLUMNS_ENTRY]) if len(self.averaged) else no_columns
        return self.merge_parts(shared_rows, private_columns, averaged)

    def full_server_rows(self, shared_rows: Tensor, memory: Memory, federation: Federation) -> Tensor:
        """Return [R, d_s] → [R, d] with the mean over all clients of their private columns, for evaluation; no
        client has this model."""
        if not self.has_hidden_columns:
            return shared_rows
        no_columns = shared_rows[:, :0]
        private_columns = (
            federation.mean_over_clients(memory.clients[OWN_COLUMNS_ENTRY]) if len(self.private) else no_columns
        )
        averaged = memory.server[AVERAGED_COLUMNS_ENTRY] if len(self.averaged) else no_columns
        return self.merge_parts(shared_rows, private_columns, averaged)

    def expand_carry_columns(self, carry: dict[str, Tensor], cohort: Cohort, memory: Memory) -> dict[str, Tensor]:
        """Return a strategy's carry in which 'params' and directions [n, d_s] have become rows [n, d]; gradients of
        columns that the strategy does not see are unchanged."""
        rows = self.full_rows(carry["params"], cohort, memory)
        full_carry = carry | {"params": rows}
        for name in ("correction", "anchor", "gradient"):
            if name in carry:
                full_carry[name] = torch.zeros_like(rows).index_copy(1, self.shared, carry[name])
        if "proximal" in carry and len(self.private):
            mask = torch.zeros_like(rows[:1]).index_fill(1, self.shared, 1.0)
            full_carry["proximal"] = carry["proximal"][:, None] * mask
        return full_carry

    def shared_carry(self, end: dict[str, Tensor], carry_before: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the carry that a strategy sees after the local steps, with the entries of `carry_before` in their
        own shapes."""
        strategy_carry = dict(end)
        for name in carry_before:
            if end[name].shape != carry_before[name].shape:
                strategy_carry[name] = carry_before[name] if name == "proximal" else self.select_shared(end[name])
        return strategy_carry

    def store_unshared_columns(self, rows: Tensor, cohort: Cohort, memory: Memory) -> None:
        """Store the private columns, and the mean of the averaged ones, of the rows [n, d] of a round."""
        if len(self.private):
            memory.scatter_entry(cohort, OWN_COLUMNS_ENTRY, rows[:, self.private])
        if len(self.averaged) and memory.writable:
            mean = cohort.mean(rows[:, self.averaged], cohort.weights(cohort.federation.weighting))
            memory.server[AVERAGED_COLUMNS_ENTRY] = cohort.where_nonempty(mean, memory.server[AVERAGED_COLUMNS_ENTRY])
