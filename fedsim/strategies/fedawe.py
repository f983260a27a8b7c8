"""FedAWE: innovations are multiplied by the number of missed rounds (echoed), and models gossip implicitly (fedawe Alg.
1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedsim.core.constraints import OneOf, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Federation, Weighting
from fedsim.core.per_seed import as_per_seed
from fedsim.core.report import Report
from fedsim.strategies.strategy import ClientModels, KeepsClientModels, ServerRateStrategy


@dataclass
class FedAWEState(ClientModels):
    """Adds last_seen [R·m] int64: τ_i, the last round client i took part in; −1 before the first."""

    last_seen: Tensor


class FedAWE(KeepsClientModels[FedAWEState], ServerRateStrategy[FedAWEState]):
    """Agile weight re-equalisation for intermittently available clients (Xiang et al., NeurIPS 2024, Alg. 1).

    The innovation of a client that last participated in round τ_i is echoed, x_i† = x_i − η_g (t − τ_i) G_i, and
    x^{t+1} = mean_{i∈A} x_i† is sent only to participating clients. Memory: one model and one integer per client.

    Args:
        server_lr: η_g, or a list of one per seed.
        clip: maximal Euclidean norm of the averaged echoed update, or a list likewise; None: no clipping, as in
            Algorithm 1. The paper speaks of gradient clipping (App. J); its authors' program clips this mean, at 0.5.
        clipped: which update is clipped: 'step' is η_g mean_{i∈A} (t − τ_i) G_i, the difference between x^{t+1} and
            mean_{i∈A} x_i^t; 'mean' is the same without η_g, which is applied after clipping (as in the authors'
            program). With η_g = 1 they are identical.
        weighting: of the mean over A: 'uniform', as in the paper, or 'data' fractions.
    """

    effective_if = (
        EffectiveIf(
            "clipped",
            lambda component, run: (
                component.clip is not None
                and component.server_lr != 1
                and set(getattr(component.server_lr, "values", [0])) != {1.0}
            ),
            "{at}.clip, and {at}.server_lr other than 1",
        ),
    )

    def __init__(
        self,
        server_lr: PositivePerSeed = 1.0,
        clip: PositivePerSeed | None = None,
        clipped: Annotated[str, OneOf("step", "mean")] = "step",
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr)
        self.clip = None if clip is None else as_per_seed(clip)
        self.clipped = clipped
        self.weighting = weighting

    def initial(self, model: Tensor, federation: Federation) -> FedAWEState:
        minus_ones = torch.full((federation.num_memory_rows,), -1, dtype=torch.int64, device=model.device)
        return FedAWEState.broadcast(model, federation, last_seen=minus_ones)

    def aggregate(self, state: FedAWEState, report: Report, t: int) -> FedAWEState:
        cohort = report.cohort
        missed_rounds = (t - state.last_seen[cohort.rows])[:, None]
        update = cohort.expand_per_seed(self.server_lr) * (missed_rounds * report.innovation)
        if self.clip is not None:
            max_norm = self.clip * (self.server_lr if self.clipped == "mean" else 1.0)
            norm = self.mean(cohort, update).norm(dim=1, keepdim=True)
            update = update * cohort.broadcast((max_norm / norm).clamp(max=1.0))
        model = cohort.where_nonempty(self.mean(cohort, report.start - update), state.model)
        cohort.scatter(state.models, cohort.broadcast(model))
        state.last_seen[cohort.rows] = t
        return FedAWEState(model, state.models, state.last_seen)
