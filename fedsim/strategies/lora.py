"""Aggregation of low-rank adapters without an aggregation error: FedEx-LoRA and FLoRA.

The mean of products B_i A_i is not the product of the means of B_i and A_i, which FedAvg on adapters (FedIT) takes.
Both strategies add what is missing to the backbone, in columns that clients receive and do not train
(`fedsim.models.lora`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.column_names import RECEIVED, ColumnNames, ParameterColumns
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation, Weighting
from fedsim.core.report import Report
from fedsim.local import LocalRule
from fedsim.strategies.strategy import State, Strategy


class Adapter(NamedTuple):
    """The columns of an adapter: A [r, in], B [out, r] and what the server adds to the layer, R [out, in]."""

    a: ParameterColumns
    b: ParameterColumns
    residual: ParameterColumns


def adapters_of(columns: ColumnNames, strategy: str) -> Iterator[Adapter]:
    """The adapters of a model, layer by layer.

    Raises:
        ConfigError: it has none, or none with R.
    """
    residuals = [entry for entry in columns.values() if entry.role == RECEIVED]
    prefixes = [entry.name.rpartition("lora_")[0] for entry in residuals]
    parts = [(f"{prefix}lora_A", f"{prefix}lora_B") for prefix in prefixes]
    if not parts or any(name not in columns or columns[name].columns is None for pair in parts for name in pair):
        raise ConfigError(
            f"strategy={strategy} adds products of adapters B A to the layers that they belong to, which needs a model "
            "with adapters whose A and B clients train and send, and with residuals: model=lora_mlp "
            "model.residual=true, or fedsim.models.lora.add_adapters(…, residual=True), and columns=all"
        )
    for entry, (a, b) in zip(residuals, parts, strict=True):
        yield Adapter(columns[a], columns[b], entry)


class ExactLoRA(Strategy[State]):
    """What FedEx-LoRA and FLoRA share: after a round the effective weight of each layer is the mean of the clients'.

    Args:
        weighting: w_i of the means: 'uniform' 1/m, or 'data' fractions.

    Attributes:
        label: its name in a configuration.
    """

    label: ClassVar[str]

    def __init__(self, weighting: Weighting = "uniform") -> None:
        self.weighting = weighting

    def check_local(self, rule: LocalRule) -> None:
        if getattr(rule, "weight_decay", 0.0):
            raise ConfigError(
                f"strategy={self.label} sends columns that clients do not train, and local.weight_decay would shrink "
                "them; use local.weight_decay=0"
            )

    def check_columns(self, columns: ColumnNames) -> None:
        list(adapters_of(columns, self.label))

    def aggregate(self, state: State, report: Report, t: int) -> State:
        cohort = report.cohort
        step = self.mean(cohort, report.innovation)
        ends, model = report.start - report.innovation, state.model - step
        for adapter in adapters_of(report.columns, self.label):
            product = self.mean(cohort, adapter.b.of(ends) @ adapter.a.of(ends))  # [R, out, in]
            model = self.renewed(model, state, adapter, product, cohort.federation, t)
        return replace(state, model=cohort.unless_empty(model, state.model))

    @abstractmethod
    def renewed(
        self, model: Tensor, state: State, adapter: Adapter, product: Tensor, federation: Federation, t: int
    ) -> Tensor:
        """The models [R, d] with this adapter's columns after round t, from the mean product of the clients'."""


class FedExLoRA(ExactLoRA):
    """A ← mean_{i∈A} A_i, B ← mean_{i∈A} B_i, R ← R + mean_{i∈A} B_i A_i − B A, layer by layer (Singhal et al., ACL
    2025): FedAvg on adapters, and its aggregation error added to the frozen weight W + (α/r) R.

    Requires a model with adapters and residuals, such as model=lora_mlp model.residual=true. Clients do not send R.
    Each row of a round has a copy of R, and the products B_i A_i of all clients of the round are in memory layer by
    layer.

    Args:
        weighting: w_i of the means: 'uniform' 1/m, or 'data' fractions.
    """

    label = "fedex_lora"

    def renewed(
        self, model: Tensor, state: State, adapter: Adapter, product: Tensor, federation: Federation, t: int
    ) -> Tensor:
        error = product - adapter.b.of(model) @ adapter.a.of(model)
        return adapter.residual.set(model, adapter.residual.of(state.model) + error)


class FLoRA(ExactLoRA):
    """R ← R + mean_{i∈A} B_i A_i, layer by layer, and the next round's adapters begin anew, with a random A and B = 0
    (Wang et al., NeurIPS 2024): the stacked product [B_1 … B_n] [A_1; …; A_n] of the weighted adapters is added to the
    frozen weight.

    Requires a model with adapters and residuals, such as model=lora_mlp model.residual=true. Clients do not send R.
    In the paper clients receive the stacked adapters, n times as many numbers as one client's; here they receive R.

    Args:
        weighting: w_i of the mean: 'uniform' 1/m, or 'data' fractions.
    """

    label = "flora"

    def renewed(
        self, model: Tensor, state: State, adapter: Adapter, product: Tensor, federation: Federation, t: int
    ) -> Tensor:
        model = adapter.residual.set(model, adapter.residual.of(state.model) + product)
        a = adapter.a.of(model)
        seeds, numbers = federation.seed_of_replicate, torch.arange(a[0].numel(), device=a.device)
        assert adapter.a.columns is not None
        first = torch.full_like(seeds, adapter.a.columns.start)
        uniform = rng.uniform(rng.row_keys(seeds, rng.Purpose.STRATEGY, first, t)[:, None], numbers, a.dtype)
        model = adapter.a.set(model, ((2 * uniform - 1) / math.sqrt(a.shape[-1])).reshape(a.shape))
        return adapter.b.set(model, torch.zeros_like(adapter.b.of(model)))
