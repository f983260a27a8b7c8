"""HetLoRA: adapters whose rank differs between clients, by truncation and zero-padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.column_names import ColumnsByName
from fedsim.core.constraints import Count, OneOf
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.models.capacity import WIDTH_ASSIGNMENTS, levels_of_clients
from fedsim.strategies.lora import adapters_of
from fedsim.strategies.strategy import State, Strategy


@dataclass
class HetLoRAState(State):
    """Adds level [R·m] int64: which of the ascending ranks each client has."""

    level: Tensor


class HetLoRA(Strategy[HetLoRAState]):
    """Client i of rank r_i receives the first r_i rows of A and columns of B, trains them, and sends them; filled up
    with zeros they are averaged with weights v_i ∝ w_i ‖B_i A_i‖_F: A ← Σ_{i∈A} v_i A_i, B ← Σ_{i∈A} v_i B_i, and other
    trained parameters likewise (Cho et al., EMNLP 2024).

    The norm is that of all layers together. What a client does not receive is 0 in its row, and has no gradient there.
    Adapters are multiplied by α/r with the model's rank r for all clients. The paper's pruning, which lowers a client's
    rank in training, is not included. With one rank and `norm_weights=false` it is FedIT, strategy=fedavg. Requires a
    model with adapters, such as model=lora_mlp. Bytes are counted for adapters of the model's rank.

    Args:
        ranks: the ranks that occur, in equal shares; the largest must be the model's.
        assign: 'random': clients draw their ranks, by seed; 'size': those with more samples have larger ones.
        norm_weights: whether means are weighted by ‖B_i A_i‖_F too.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions.
    """

    effective_if = (EffectiveIf("assign", lambda component, run: len(set(component.ranks)) > 1, "several {at}.ranks"),)

    def __init__(
        self,
        ranks: Sequence[Count] = (1, 2, 4),
        assign: Annotated[str, OneOf(*WIDTH_ASSIGNMENTS)] = "random",
        norm_weights: bool = True,
        weighting: Weighting = "uniform",
    ) -> None:
        if not len(ranks):
            raise ConfigError("{ranks}=[] must name at least one rank, such as [2, 4]", mentions=("ranks",))
        self.ranks, self.assign, self.norm_weights, self.weighting = sorted(ranks), assign, norm_weights, weighting

    def check_columns(self, columns: ColumnsByName) -> None:
        rank = max(adapter.a.shape[0] for adapter in adapters_of(columns, "hetlora", residuals=False))
        if rank != self.ranks[-1]:
            raise ConfigError(
                f"strategy.ranks={self.ranks} must have the rank of the model's adapters as its largest, and that is "
                f"{rank}; choose other ranks, or model.rank={self.ranks[-1]}"
            )

    def initial(self, model: Tensor, federation: Federation) -> HetLoRAState:
        level = levels_of_clients(federation, [1.0] * len(self.ranks), self.assign, rng.Purpose.STRATEGY)
        own_clients = level.unflatten(0, (federation.num_replicates, -1))[:, federation.ranks.client_slice]
        return HetLoRAState(model, own_clients.flatten())

    def start(self, state: HetLoRAState, cohort: Cohort) -> Tensor:
        return cohort.broadcast(state.model) * self.held_column_masks(state, cohort)

    def held_column_masks(self, state: HetLoRAState, cohort: Cohort) -> Tensor:
        """[n, d] 1 in the columns that a client of the cohort has, else 0."""
        columns, masks = cohort.federation.columns, state.model.new_ones(len(self.ranks), state.model.shape[1])
        for adapter in adapters_of(columns, "hetlora", residuals=False) if columns else []:
            has = torch.arange(adapter.a.shape[0]) < torch.tensor(self.ranks)[:, None]  # [ranks, r]
            masks = adapter.a.replace(masks, has[:, :, None].to(masks).expand(-1, *adapter.a.shape))
            masks = adapter.b.replace(masks, has[:, None, :].to(masks).expand(-1, *adapter.b.shape))
        return masks[state.level[cohort.rows]]

    def aggregate(self, state: HetLoRAState, report: Report, t: int) -> HetLoRAState:
        cohort, column_masks = report.cohort, self.held_column_masks(state, report.cohort)
        weights = cohort.weights(self.weighting)
        if self.norm_weights:
            squared_norm = torch.zeros_like(weights)
            ends = (report.start - report.innovation) * column_masks
            for adapter in adapters_of(report.columns, "hetlora", residuals=False):
                a, b = adapter.a.select(ends), adapter.b.select(ends)
                squared_norm += ((b.mT @ b) * (a @ a.mT)).sum((1, 2))  # ‖B A‖² = tr(BᵀB AAᵀ)
            weights = weights * squared_norm.clamp(min=0).sqrt()
        # from x^t to the end, which is 0 in the columns that the client lacks
        step = cohort.mean(
            report.innovation * column_masks + cohort.broadcast(state.model) * (1 - column_masks), weights
        )
        return HetLoRAState(cohort.where_nonempty(state.model - step, state.model), state.level)
