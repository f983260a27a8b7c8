"""RoLoRA: the factors of low-rank adapters are trained and averaged in turns."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.core.column_names import ColumnsByName
from fedsim.core.federation import Cohort, Weighting
from fedsim.core.report import Report
from fedsim.strategies.lora import adapters_of
from fedsim.strategies.strategy import State, Strategy


class RoLoRA(Strategy[State]):
    """In rounds 0, 2, … clients train B_i with A fixed, and B ← mean_{i∈A} B_i; in rounds 1, 3, … they train A_i with B
    fixed, and A ← mean_{i∈A} A_i (Chen et al., NeurIPS 2025). Other trained parameters are trained and averaged in
    every round.

    Since one factor is the same for all clients, the mean of the products is the product of the means: there is no
    aggregation error. Requires a model with adapters, such as model=lora_mlp, and a local rule whose carry takes a
    scale of the step for each column, such as local=sgd; `local.clip` acts on the gradient of both factors. A client
    sends one factor, but bytes are counted for both.

    Args:
        weighting: w_i of the means: 'uniform' 1/m, or 'data' fractions.
    """

    server_sees = "mean"

    def __init__(self, weighting: Weighting = "uniform") -> None:
        self.weighting = weighting

    def check_columns(self, columns: ColumnsByName) -> None:
        adapters_of(columns, "rolora", residuals=False)

    def start(self, state: State, cohort: Cohort) -> dict[str, Tensor]:
        rows = cohort.broadcast(state.model)
        trained = self.trained_column_mask(cohort.federation.columns, state.model, cohort.round)
        return {"params": rows, "scale": trained.expand(len(cohort), -1).contiguous()}

    def trained_column_mask(self, columns: ColumnsByName, model: Tensor, t: int) -> Tensor:
        """[d] 1 in the columns that clients train in round t, else 0."""
        trained = torch.ones_like(model[0])
        for adapter in adapters_of(columns, "rolora", residuals=False) if columns else []:
            trained[(adapter.b if t % 2 else adapter.a).columns] = 0.0
        return trained

    def aggregate(self, state: State, report: Report, t: int) -> State:
        step = self.trained_column_mask(report.columns, state.model, t) * self.mean(report.cohort, report.innovation)
        return State(report.cohort.where_nonempty(state.model - step, state.model))
