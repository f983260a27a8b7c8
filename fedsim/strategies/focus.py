"""FOCUS: the server steps along the sum of all clients' last gradients; clients are corrected by their own (Ying et
al.).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from fedsim.core.constraints import OneOf, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Cohort, Weighting
from fedsim.core.report import Report
from fedsim.strategies.memory import MemoryDtype, RememberedUpdates, RemembersClients

EMPTY_ROUND_POLICIES = ("step", "skip")


class Focus(RemembersClients[RememberedUpdates]):
    """Local steps follow g − h_i from x^t; then h_i ← the last g, for i∈A, and x ← x − η_g η_l Σ_i h_i, over all
    clients (Ying, Li and Yang, NeurIPS 2025: push-pull for federations).

    In the paper clients push y_i, the sum of the changes of their gradient, which is g − h_i at the end of the round;
    hence the server's y is Σ_i h_i. Local steps use η_l y_i, s − 1 times for s gradients. The learning rate multiplies
    a sum, not a mean: compare with other strategies at η_l m, or set server_lr = 1/m. With one local step it is MIFA
    with memory=gradient and η_g m. It is unbiased for arbitrary participation frequencies at a constant learning rate.
    Memory: one row per client. Requires local=sgd, whose carry takes −h_i and returns the last gradient.

    Args:
        server_lr: η_g, or a list of one per seed; 1 in the paper, where the local and the global learning rate are the
            same.
        empty: in a round without clients, 'step' moves along Σ_i h_i, as in the paper's recursion; 'skip' does nothing,
            as in the authors' program.
        weighting: 'uniform', or 'data', where client i has the weight m w_i.
        memory_dtype: of the stored rows: same, float32, float16 or bfloat16.
    """

    effective_if = (
        EffectiveIf(
            "empty",
            lambda component, run: run.may_clients_be_absent,
            "rounds without clients",
            attribute="empty_rounds",
        ),
    )

    side_information = "gradients go up as they are"
    sends_rows = False

    def __init__(
        self,
        server_lr: PositivePerSeed = 1.0,
        empty: Annotated[str, OneOf(*EMPTY_ROUND_POLICIES)] = "step",
        weighting: Weighting = "uniform",
        memory_dtype: MemoryDtype = "same",
    ) -> None:
        super().__init__(server_lr, memory_dtype, weighting)
        self.empty_rounds = empty
        self.steps_if_empty = self.empty_rounds == "step"

    def start(self, state: RememberedUpdates, cohort: Cohort) -> dict[str, Tensor]:
        last_gradient, model = self.remembered_rows(state, cohort), cohort.broadcast(state.model)
        return {"params": model, "correction": -last_gradient, "gradient": torch.zeros_like(last_gradient)}

    def aggregate(self, state: RememberedUpdates, report: Report, t: int) -> RememberedUpdates:
        cohort = report.cohort
        mean = self.store_client_values(state, cohort, report.carry["gradient"])
        model = state.model - self.server_lr * report.lr[:, None] * cohort.federation.clients * mean
        if not self.steps_if_empty:
            model = cohort.where_nonempty(model, state.model)
        return replace(state, model=model, mean=mean)
