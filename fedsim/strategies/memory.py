"""Per-client memory of strategies that remember an innovation or a control variate of everybody."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim import checks
from fedsim.federation import Cohort, Federation
from fedsim.strategies.base import State

DTYPES = {"same": None, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class ClientMemory(State):
    """Attributes:

    memory: [R·m, d] what is remembered of each client, zero before its first time; in the dtype the user picks.
    mean: [R, d] its mean over clients, kept up to date with the rows that change, so that a round costs the active.
    """

    memory: Tensor
    mean: Tensor


def memory_dtype(name: str) -> torch.dtype | None:
    """The dtype of `strategy.memory_dtype`; None is that of the rows."""
    return DTYPES[checks.choice("strategy.memory_dtype", name, DTYPES)]


def empty_memory(model: Tensor, federation: Federation, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Zero memory [R·m, d] and its mean [R, d]."""
    shape = (federation.rows, model.shape[1])
    return torch.zeros(shape, dtype=dtype or model.dtype, device=model.device), torch.zeros_like(model)


def remember(state: ClientMemory, cohort: Cohort, values: Tensor) -> Tensor:
    """Store the heard rows' values [n, d] in place; return the new mean [R, d] of what is stored."""
    old = state.memory[cohort.rows]
    new = values.to(state.memory.dtype)  # the mean is that of the stored, rounded values
    state.memory[cohort.rows] = new
    change = new.to(values.dtype) - old.to(values.dtype)
    once = 1.0 / cohort.count.clamp(min=1)  # a multiset's repeated client is still remembered once
    return state.mean + cohort.total(change, once) / cohort.federation.clients
