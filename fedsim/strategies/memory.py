"""Per-client memory of strategies that store an innovation or a control variate of each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar, cast

import torch
from torch import Tensor

from fedsim.core.constraints import OneOf, PositivePerSeed
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.strategies.strategy import ServerRateStrategy, State

MEMORY_DTYPES = {"same": None, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MemoryDtype = Annotated[str, OneOf(*MEMORY_DTYPES)]


@dataclass
class RememberedUpdates(State):
    """Attributes:

    memory: [R·m, d] what is remembered of each client, zero before its first time; in the dtype the user picks.
    mean: [R, d] its mean over clients, kept up to date with the rows that change, so that a round costs the active.
    """

    memory: Tensor
    mean: Tensor


MemoryState = TypeVar("MemoryState", bound=RememberedUpdates)


class RemembersClients(ServerRateStrategy[MemoryState]):
    """A strategy that stores one row per client, zero before its first participation.

    Args:
        server_lr: η_g, or a list of one per seed.
        memory_dtype: of the stored rows: same (as the model's), float32, float16 or bfloat16.
        weighting: w_i of the means over all clients and over A: 'uniform' 1/m, or 'data' fractions.
    """

    def __init__(
        self,
        server_lr: PositivePerSeed = 1.0,
        memory_dtype: MemoryDtype = "same",
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr)
        self.dtype = MEMORY_DTYPES[memory_dtype]
        self.weighting = weighting

    def initial(self, model: Tensor, federation: Federation) -> MemoryState:
        return cast(MemoryState, RememberedUpdates(model, *self.empty(model, federation)))

    def empty(self, model: Tensor, federation: Federation) -> tuple[Tensor, Tensor]:
        """Zero memory [R·m, d] and its mean [R, d]."""
        return federation.zeros(model.shape[1], dtype=self.dtype or model.dtype), torch.zeros_like(model)

    def remembered_rows(self, state: MemoryState, cohort: Cohort) -> Tensor:
        """[n, d] what is remembered of the cohort's clients, in the model's dtype."""
        return cohort.gather(state.memory).to(state.model.dtype)

    def store_client_values(self, state: MemoryState, cohort: Cohort, values: Tensor) -> Tensor:
        """Store the cohort's values [n, d] in place; return the new mean [R, d] of what is stored of all clients."""
        return update_memory_and_mean(state.memory, state.mean, cohort, values, self.weighting)


def update_memory_and_mean(
    memory: Tensor, memory_mean: Tensor, cohort: Cohort, values: Tensor, weighting: str = "uniform"
) -> Tensor:
    """Store values [n, d] in any memory [R·m, d], in place; return its new mean [R, d], plain or by clients' data."""
    stored_values = cohort.gather(memory)
    rounded_values = values.to(memory.dtype)  # the mean is that of the stored, rounded values
    cohort.scatter(memory, rounded_values)
    value_change = rounded_values.to(values.dtype) - stored_values.to(values.dtype)
    inverse_count = 1.0 / cohort.multiplicity.clamp(min=1)  # a multiset's repeated client is still remembered once
    if weighting == "data":
        return memory_mean + cohort.sum(value_change, inverse_count * cohort.weights("data"))
    return memory_mean + cohort.sum(value_change, inverse_count) / cohort.federation.clients
