"""Debiasing FedAvg: local steps weighted by the inverse participation frequency so far (Sun et al., ICLR 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core.constraints import Positive, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.strategy import ServerRateStrategy, State


@dataclass
class DebiasingState(State):
    """Adds taken [R·m]: in how many rounds the client took part."""

    taken: Tensor


class Debiasing(ServerRateStrategy[DebiasingState]):
    """Local steps x_i ← x_i − η_l (w_i / π_i) ∇f_i, π_i the client's fraction of all participations so far, including
    this round; x ← x − (η_g / B) Σ_{i∈A} G_i, B the mean number of participating clients per round.

    Neither participation frequencies nor correlations need to be known. The estimate and its use follow the paper; the
    constants are chosen such that equal participation gives FedAvg and |A| may vary between rounds. With one local step
    it is inverse-frequency weighting, as in F3AST; with more steps the client drift also grows with 1/π_i. Memory: one
    number per client. Runs under local=sgd, whose carry takes the scale.

    Args:
        server_lr: η_g, or a list of one per seed.
        cap: maximal w_i / π_i, since a client that has rarely participated would take a huge step; null: no limit.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions.
    """

    effective_if = (
        EffectiveIf(
            "cap",
            lambda component, run: run.may_clients_be_absent or component.weighting == "data",
            "clients that miss rounds",
        ),
    )

    def __init__(
        self, server_lr: PositivePerSeed = 1.0, cap: Positive | None = None, weighting: Weighting = "uniform"
    ) -> None:
        super().__init__(server_lr)
        self.cap = cap
        self.weighting = weighting

    def initial(self, model: Tensor, federation: Federation) -> DebiasingState:
        return DebiasingState(model, federation.zeros(dtype=model.dtype))

    def start(self, state: DebiasingState, cohort: Cohort) -> dict[str, Tensor]:
        participations, total = self.count_participation(state, cohort)
        scale = cohort.weights(self.weighting) * cohort.broadcast(total) / participations[cohort.rows]
        scale = scale if self.cap is None else scale.clamp(max=self.cap)
        return {"params": cohort.broadcast(state.model), "scale": scale}

    def aggregate(self, state: DebiasingState, report: Report, t: int) -> DebiasingState:
        participations, total = self.count_participation(state, report.cohort)
        mean = report.cohort.sum(report.innovation) * ((t + 1) / total.clamp(min=1))[:, None]
        return DebiasingState(state.model - self.server_lr * mean, participations)

    def count_participation(self, state: DebiasingState, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """[R·m] and [R]: how often each client has taken part, this round included, and all of them together."""
        participations = state.taken.index_add(0, cohort.rows, cohort.multiplicity)
        return participations, cohort.federation.sum_over_clients(participations, torch.ones_like(participations))
