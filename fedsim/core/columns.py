"""Which columns of a client's row travel, and how: what a strategy sees of a row, and what is kept beside it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core.federation import Cohort, Federation
from fedsim.core.memory import Memory

OWN, AVERAGED = "own columns", "averaged columns"  # names in a memory


def slice_if_contiguous(numbers: Tensor) -> Tensor | slice:
    """A slice in the place of whole numbers that follow one another: it copies nothing."""
    if len(numbers) and bool((numbers.diff() == 1).all()):
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


@dataclass(frozen=True)
class ParameterPartition:
    """A row [d] in three parts. Strategies meet the shared columns alone, and aggregate them as their papers say.

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
    def of(cls, sizes: dict[str, int], statistics: set[str], private_names: set[str]) -> ParameterPartition:
        """Of rows whose parts have these names and sizes: everything travels but what is at home with the client, and
        statistics that travel are averaged."""
        count = torch.tensor(list(sizes.values()))
        home_mask, statistics_mask = (
            torch.tensor([name in selected_names for name in sizes]).repeat_interleave(count)
            for selected_names in (private_names, statistics)
        )
        columns = torch.arange(int(count.sum()))
        return cls(columns[~home_mask & ~statistics_mask], columns[home_mask], columns[~home_mask & statistics_mask])

    @property
    def is_divided(self) -> bool:
        """Is there more to a row than what strategies see?"""
        return bool(len(self.private) or len(self.averaged))

    def join(self, shared: Tensor, private: Tensor, averaged: Tensor) -> Tensor:
        """[…, d_s], […, d_o], […, d_a] → rows […, d]."""
        rows = torch.cat([shared, private, averaged], dim=-1)
        return rows if self._order is None else rows[..., self._order]

    @functools.cached_property
    def _order(self) -> Tensor | None:
        """Where each column is among the three parts; None where they follow one another."""
        columns = torch.cat([self.shared, self.private, self.averaged])
        return None if bool((columns.diff() == 1).all()) else columns.argsort()

    @functools.cached_property
    def _shared(self) -> Tensor | slice:
        return slice_if_contiguous(self.shared)

    def shared_part(self, rows: Tensor) -> Tensor:
        """[…, d] → […, d_s], what strategies see."""
        return rows[..., self._shared]

    def memory(self, initial: Tensor, memory: Memory, federation: Federation) -> None:
        """Add to a memory what is kept of initial rows [R, d] beside the shared columns."""
        if len(self.private):
            memory.clients[OWN] = federation.broadcast(initial[:, self.private])
        if len(self.averaged):
            memory.server[AVERAGED] = initial[:, self.averaged]

    def full_rows(self, shared: Tensor, cohort: Cohort, memory: Memory) -> Tensor:
        """[n, d_s] of a cohort's clients → their rows [n, d]."""
        if not self.is_divided:
            return shared
        none = shared[:, :0]
        private_columns = cohort.gather(memory.clients[OWN]) if len(self.private) else none
        averaged = cohort.broadcast(memory.server[AVERAGED]) if len(self.averaged) else none
        return self.join(shared, private_columns, averaged)

    def server_rows(self, shared: Tensor, memory: Memory, federation: Federation) -> Tensor:
        """[R, d_s] → [R, d]: with the mean over all clients of what stays with them, so that there is a model to be
        evaluated; nobody has it."""
        if not self.is_divided:
            return shared
        none = shared[:, :0]
        private_columns = federation.mean_over_clients(memory.clients[OWN]) if len(self.private) else none
        averaged = memory.server[AVERAGED] if len(self.averaged) else none
        return self.join(shared, private_columns, averaged)

    def expand(self, carry: dict[str, Tensor], cohort: Cohort, memory: Memory) -> dict[str, Tensor]:
        """A strategy's carry, whose 'params' and directions [n, d_s] become rows [n, d]; it adds nothing to the
        gradients of columns that it does not see."""
        rows = self.full_rows(carry["params"], cohort, memory)
        full_carry = carry | {"params": rows}
        for name in ("correction", "anchor", "gradient"):
            if name in carry:
                full_carry[name] = torch.zeros_like(rows).index_copy(1, self.shared, carry[name])
        if "proximal" in carry and len(self.private):
            mask = torch.zeros_like(rows[:1]).index_fill(1, self.shared, 1.0)
            full_carry["proximal"] = carry["proximal"][:, None] * mask
        return full_carry

    def restrict(self, end: dict[str, Tensor], handed: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a strategy sees of a carry after the local steps: entries it had `handed` in their own shapes."""
        strategy_carry = dict(end)
        for name in handed:
            if end[name].shape != handed[name].shape:
                strategy_carry[name] = handed[name] if name == "proximal" else self.shared_part(end[name])
        return strategy_carry

    def keep(self, rows: Tensor, cohort: Cohort, memory: Memory) -> None:
        """Take what does not travel, and the mean of what is averaged, out of the rows [n, d] of a round."""
        if len(self.private):
            memory.scatter_entry(cohort, OWN, rows[:, self.private])
        if len(self.averaged) and memory.writable:
            mean = cohort.mean(rows[:, self.averaged], cohort.weights(cohort.federation.weighting))
            memory.server[AVERAGED] = cohort.unless_empty(mean, memory.server[AVERAGED])
