"""Aggregation of low-rank adapters by their products: FedEx-LoRA, FLoRA and FlexLoRA.

The mean of products B_i A_i is not the product of the means of B_i and A_i, which FedAvg on adapters (FedIT) takes.
FedEx-LoRA and FLoRA add what is missing to the backbone, in columns that clients receive and do not train
(`fedsim.models.lora`); FlexLoRA takes the best approximation of the rank that adapters have.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.column_names import ColumnsByName, TensorColumns
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation, Weighting
from fedsim.core.report import Report
from fedsim.local import LocalRule
from fedsim.strategies.strategy import State, Strategy


class AdapterColumns(NamedTuple):
    """The columns of an adapter: A [r, in], B [out, r], and the residual R [out, in] of its layer, where it has one."""

    a: TensorColumns
    b: TensorColumns
    residual: TensorColumns | None


def adapters_of(column_names: ColumnsByName, strategy: str, residuals: bool) -> list[AdapterColumns]:
    """The adapters of a model, layer by layer.

    Args:
        column_names: of the model.
        strategy: that asks, for messages.
        residuals: whether each must have R.

    Raises:
        ConfigError: the model has none, or not in the rows of strategies.
    """
    adapter_list = []
    prefixes = [name.rpartition("lora_A")[0] for name in column_names if "lora_A" in name]
    for prefix in prefixes:
        a, b, residual = (
            _columns_by_prefix(column_names, f"{prefix}lora_{tensor_suffix}")
            for tensor_suffix in ("A", "B", "residual")
        )
        if a is not None and b is not None and (residual is not None or not residuals):
            adapter_list.append(AdapterColumns(a, b, residual))
    if not prefixes or len(adapter_list) < len(prefixes):
        remedy = "model=lora_mlp model.residual=true" if residuals else "model=lora_mlp"
        raise ConfigError(
            f"strategy={strategy} aggregates products of adapters B A, which needs a model with adapters whose A and B "
            f"clients train and send{', and with residuals' if residuals else ''}: {remedy}, or "
            f"fedsim.models.lora.add_adapters(…{', residual=True' if residuals else ''}), and columns=all"
        )
    return adapter_list


def _columns_by_prefix(columns: ColumnsByName, start: str) -> TensorColumns | None:
    """Those of the tensor with this name, or with a name that goes on after it, if rows have them."""
    names = [name for name in columns if name == start or name.startswith(f"{start}.")]
    return columns[names[0]] if names and columns[names[0]].columns is not None else None


class ProductsLoRA(Strategy[State]):
    """What FedEx-LoRA, FLoRA and FlexLoRA share: they aggregate the clients' products B_i A_i, layer by layer. Other
    trained parameters are averaged.

    Args:
        weighting: w_i of the means: 'uniform' 1/m, or 'data' fractions.

    Attributes:
        label: its name in a configuration.
        residuals: whether it adds residuals R to layers.
    """

    label: ClassVar[str]
    residuals: ClassVar[bool] = True

    def __init__(self, weighting: Weighting = "uniform") -> None:
        self.weighting = weighting

    def check_local(self, local_rule: LocalRule) -> None:
        if getattr(local_rule, "weight_decay", 0.0):
            raise ConfigError(
                f"strategy={self.label} sends columns that clients do not train, and local.weight_decay would shrink "
                "them; use local.weight_decay=0"
            )

    def check_columns(self, columns: ColumnsByName) -> None:
        adapters_of(columns, self.label, self.residuals)

    def aggregate(self, state: State, report: Report, t: int) -> State:
        cohort = report.cohort
        step = self.mean(cohort, report.innovation)
        end_models, model = report.start - report.innovation, state.model - step
        for adapter in adapters_of(report.columns, self.label, self.residuals):
            product = self.mean(cohort, adapter.b.select(end_models) @ adapter.a.select(end_models))  # [R, out, in]
            model = self.with_updated_adapter(model, state, adapter, product, cohort.federation, t)
        return replace(state, model=cohort.where_nonempty(model, state.model))

    @abstractmethod
    def with_updated_adapter(
        self, model: Tensor, state: State, adapter: AdapterColumns, product: Tensor, federation: Federation, t: int
    ) -> Tensor:
        """The models [R, d] with this adapter's columns after round t, from the mean product of the clients'."""


class FedExLoRA(ProductsLoRA):
    """A ← mean_{i∈A} A_i, B ← mean_{i∈A} B_i, R ← R + mean_{i∈A} B_i A_i − B A, layer by layer (Singhal et al., ACL
    2025): FedAvg on adapters, and its aggregation error added to the frozen weight W + (α/r) R.

    Requires a model with adapters and residuals, such as model=lora_mlp model.residual=true. Clients do not send R.
    Each row of a round has a copy of R, and the products B_i A_i of all clients of the round are in memory layer by
    layer.

    Args:
        weighting: w_i of the means: 'uniform' 1/m, or 'data' fractions.
    """

    label = "fedex_lora"

    def with_updated_adapter(
        self, model: Tensor, state: State, adapter: AdapterColumns, product: Tensor, federation: Federation, t: int
    ) -> Tensor:
        assert adapter.residual is not None
        error = product - adapter.b.select(model) @ adapter.a.select(model)
        return adapter.residual.replace(model, adapter.residual.select(state.model) + error)


class FLoRA(ProductsLoRA):
    """R ← R + mean_{i∈A} B_i A_i, layer by layer, and the next round's adapters begin anew, with a random A and B = 0
    (Wang et al., NeurIPS 2024): the stacked product (B_1 … B_n)(A_1; …; A_n) of the weighted adapters is added to the
    frozen weight.

    Requires a model with adapters and residuals, such as model=lora_mlp model.residual=true. Clients do not send R.
    In the paper clients receive the stacked adapters, n times as many numbers as one client's; here they receive R.

    Args:
        weighting: w_i of the mean: 'uniform' 1/m, or 'data' fractions.
    """

    label = "flora"

    def with_updated_adapter(
        self, model: Tensor, state: State, adapter: AdapterColumns, product: Tensor, federation: Federation, t: int
    ) -> Tensor:
        assert adapter.residual is not None
        model = adapter.residual.replace(model, adapter.residual.select(state.model) + product)
        a = adapter.a.select(model)
        seeds, numbers = federation.seed_of_replicate, torch.arange(a[0].numel(), device=a.device)
        assert adapter.a.columns is not None
        first_columns = torch.full_like(seeds, adapter.a.columns.start)
        uniform = rng.uniform(rng.row_keys(seeds, rng.Purpose.STRATEGY, first_columns, t)[:, None], numbers, a.dtype)
        model = adapter.a.replace(model, ((2 * uniform - 1) / math.sqrt(a.shape[-1])).reshape(a.shape))
        return adapter.b.replace(model, torch.zeros_like(adapter.b.select(model)))


class FlexLoRA(ProductsLoRA):
    """B A ← the matrix of rank r that is closest to mean_{i∈A} B_i A_i, layer by layer: with the singular value
    decomposition U Σ Vᵀ of that mean, B ← U_r Σ_r and A ← V_rᵀ (Bai et al., NeurIPS 2024, for clients of equal rank).

    The squared aggregation error of a layer is the sum of the squared singular values that are dropped. Requires a
    model with adapters, such as model=lora_mlp.

    Args:
        weighting: w_i of the mean: 'uniform' 1/m, or 'data' fractions.
    """

    label = "flexlora"
    residuals = False

    def with_updated_adapter(
        self, model: Tensor, state: State, adapter: AdapterColumns, product: Tensor, federation: Federation, t: int
    ) -> Tensor:
        rank = adapter.a.shape[0]
        left_vectors, singular_values, right_vectors = torch.linalg.svd(product, full_matrices=False)
        model = adapter.b.replace(model, left_vectors[..., :rank] * singular_values[..., None, :rank])
        return adapter.a.replace(model, right_vectors[..., :rank, :])
