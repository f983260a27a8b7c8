"""Power-of-choice: the candidates with the largest losses train (Cho, Wang and Joshi, 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from fedsim.core.constraints import Count, OneOf, PositivePerSeed
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation
from fedsim.core.report import Report
from fedsim.strategies.selection import draw_rows
from fedsim.strategies.strategy import ServerRateStrategy, State, full_data_gradients

LOSS_SOURCES = ("asked", "last")


@dataclass
class LossesState(State):
    """Adds losses [R·m]: the mean training loss of the client's last round; ∞ before its first."""

    losses: Tensor


class PowerOfChoice(ServerRateStrategy[LossesState]):
    """d candidates are drawn among the available clients, in proportion to their data and without replacement; the k of
    them with the largest F_i(x^t) train; x ← x − η_g mean_{i∈A} G_i.

    d = k is sampling by data; a larger d gives faster convergence with a stronger (intended) bias towards clients with
    large losses. If fewer than d clients are available, all of them are candidates. An empty round changes nothing.
    Memory: one number per client.

    Args:
        k: number of clients that train.
        candidates: d, at least k; 2k to 10k in the paper.
        loss: 'asked': candidates evaluate all their data at x^t (π_pow-d), which is not counted in bytes; 'last': their
            mean loss over the local steps of their last round, ∞ before the first (π_rpow-d), which needs no extra
            computation.
        server_lr: η_g, or a list of one per seed.
    """

    side_information = "losses go up as they are"

    def __init__(
        self,
        k: Count = 3,
        candidates: Count = 6,
        loss: Annotated[str, OneOf(*LOSS_SOURCES)] = "asked",
        server_lr: PositivePerSeed = 1.0,
    ) -> None:
        super().__init__(server_lr)
        self.k, self.candidates = k, candidates
        if self.candidates < self.k:
            raise ConfigError(
                key="candidates", value=candidates, needs=f"are fewer than {{k}}={k}; give {k} or more", mentions=("k",)
            )
        self.needs_full_gradients = loss == "asked"

    def initial(self, model: Tensor, federation: Federation) -> LossesState:
        return LossesState(
            model, torch.full((federation.num_memory_rows,), torch.inf, dtype=model.dtype, device=model.device)
        )

    def cohort(self, state: LossesState, active: Cohort) -> Cohort:
        candidate_rows = draw_rows(active, self.candidates, active.weights("data"))
        losses = (
            full_data_gradients(candidate_rows, state.model).loss
            if self.needs_full_gradients
            else state.losses[candidate_rows.rows]
        )
        return candidate_rows.select_largest(losses, self.k)

    def aggregate(self, state: LossesState, report: Report, t: int) -> LossesState:
        state.losses[report.cohort.rows] = report.loss
        return replace(state, model=state.model - self.server_lr * report.cohort.mean(report.innovation))
