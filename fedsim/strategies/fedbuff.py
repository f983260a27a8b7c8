"""FedBuff: the server steps whenever K updates have arrived (Nguyen et al., AISTATS 2022)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core.constraints import Count, NonNegative, PositivePerSeed
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.report import Report
from fedsim.strategies.staleness import DISCOUNT_EFFECTIVE_IF, Discount, DiscountKind
from fedsim.strategies.strategy import ServerRateStrategy, State


@dataclass
class FedBuffState(State):
    """Attributes:

    buffer: [R, d] Σ σ(d_i) G_i of the rows that wait.
    waiting: [R] int64 how many there are, fewer than K.
    """

    buffer: Tensor
    waiting: Tensor


class FedBuff(ServerRateStrategy[FedBuffState]):
    """x ← x − (η_g / K) Σ σ(d_i) G_i over K updates, as soon as K have arrived; σ(d) = (1 + d)^{−1/2}, d the number of
    rounds since the computation of update i started.

    Updates that arrive in the same round are processed in the order of client indices; the remainder stays in the
    buffer. The paper's d counts server steps, which is the same if the server steps in every round. Memory: one row on
    the server.

    Args:
        buffer: K.
        server_lr: η_g, or a list of one per seed.
        discount: σ: polynomial, hinge or constant, see `fedsim.strategies.staleness`.
        a, b: of σ.
    """

    effective_if = DISCOUNT_EFFECTIVE_IF

    supports_stale = True

    def __init__(
        self,
        buffer: Count = 10,
        server_lr: PositivePerSeed = 1.0,
        discount: DiscountKind = "polynomial",
        a: NonNegative = 0.5,
        b: NonNegative = 4.0,
    ) -> None:
        super().__init__(server_lr)
        self.buffer = self.arrivals = buffer
        self.discount = Discount(discount, a, b)

    def check(self, availability: Availability) -> None:
        if availability.law == "multiset":
            raise ConfigError(
                f"strategy={type(self).__name__} counts rows one by one, and availability=multiset counts some twice; "
                "choose another availability"
            )

    def initial(self, model: Tensor, federation: Federation) -> FedBuffState:
        zero_counts = torch.zeros(federation.num_replicates, dtype=torch.int64, device=model.device)
        return FedBuffState(model, torch.zeros_like(model), zero_counts)

    def aggregate(self, state: FedBuffState, report: Report, t: int) -> FedBuffState:
        cohort, k = report.cohort, self.buffer
        participates, virtual_clients, bounds = cohort.all_gather_host(cohort.host_index.multiplicity > 0)
        positions, arrived_positions = np.cumsum(participates) - 1, []
        for a, b in itertools.pairwise(bounds):
            positions[a:b] -= positions[a] - participates[a] + 1 if b > a else 0
            arrived_positions.append(int(participates[a:b].sum()))
        local_positions = torch.as_tensor(
            positions[np.searchsorted(virtual_clients, cohort.host_index.virtual_clients)], device=state.model.device
        )
        pending_rows = state.waiting + torch.tensor(arrived_positions, device=state.model.device)
        num_consumed = pending_rows // k * k  # rows that are in a full buffer
        in_full_buffer = (cohort.broadcast(state.waiting) + local_positions < cohort.broadcast(num_consumed)).to(
            state.model.dtype
        )
        weights = torch.as_tensor(self.discount(report.rounds_late)).to(in_full_buffer)
        steps = (num_consumed > 0)[:, None]
        filled_buffer = torch.where(steps, state.buffer, 0.0) + cohort.sum(report.innovation, weights * in_full_buffer)
        remainder = torch.where(steps, 0.0, state.buffer) + cohort.sum(
            report.innovation, weights * (1 - in_full_buffer)
        )
        return FedBuffState(state.model - self.server_lr / k * filled_buffer, remainder, pending_rows - num_consumed)
