"""Client selection by Oort's statistical utility: clients with large losses and many samples train (Lai et al., OSDI
2021).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.core import ties
from fedsim.core.constraints import Count, Fraction, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.fedavg import FedAvg
from fedsim.strategies.selection import choose_rows
from fedsim.strategies.strategy import State


@dataclass
class OortState(State):
    """Attributes ([R·m] each):

    utility: of the client's last round, U_i.
    last_seen: that round, int64; −1 before its first.
    """

    utility: Tensor
    last_seen: Tensor


class Oort(FedAvg):
    """Selects k of the available clients: a fraction ε_t at random among those that have not trained before, the others
    by utility.

    U_i = |B_i| · (mean loss) of the client's last round, clipped at a quantile and scaled to [0, 1] over the available
    clients; S_i = U_i + √(0.1 ln t / L_i), L_i its last round, both counted from 1. Clients with S_i ≥ 0.95 of the
    cut-off, the smallest S among the top clients, are drawn in proportion to S_i. ε_t = max(0.9 · 0.98^t, 0.2). If one
    of the two sets has too few clients, the other one fills up the selection. The aggregation is that of FedAvg.

    The paper's U_i uses the root mean square of the samples' losses; here it is the mean loss over the local steps. The
    paper's penalty for slow devices, (T / t_i)^α, its pacer and its exclusion of clients that participated too often
    are omitted, since rounds have no duration here. Scaling U_i follows the authors' program, which scales by the range
    before clipping. Memory: two numbers per client.

    Args:
        k: number of clients that train.
        clip: quantile at which utilities are clipped.
        explore, decay, explore_least: 0.9, 0.98 and 0.2 of ε_t.
        cutoff: 0.95.
        server_lr, weighting: as `FedAvg`.
    """

    effective_if = (
        EffectiveIf("k", lambda component, run: component.k < run.federation.clients, "more clients than {at}.k"),
        EffectiveIf("clip", lambda component, run: component.k < run.federation.clients, "more clients than {at}.k"),
        EffectiveIf("explore", lambda component, run: component.k < run.federation.clients, "more clients than {at}.k"),
        EffectiveIf("decay", lambda component, run: component.k < run.federation.clients, "more clients than {at}.k"),
        EffectiveIf(
            "explore_least", lambda component, run: component.k < run.federation.clients, "more clients than {at}.k"
        ),
        EffectiveIf("cutoff", lambda component, run: component.k < run.federation.clients, "more clients than {at}.k"),
    )

    side_information = "losses go up as they are"

    def __init__(
        self,
        k: Count = 3,
        clip: Fraction = 0.95,
        explore: Fraction = 0.9,
        decay: Fraction = 0.98,
        explore_least: Fraction = 0.2,
        cutoff: Fraction = 0.95,
        server_lr: PositivePerSeed = 1.0,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr, weighting)
        self.k = k
        self.clip, self.cutoff = clip, cutoff
        self.explore, self.decay = (
            explore,
            decay,
        )
        self.explore_least = explore_least

    def initial(self, model: Tensor, federation: Federation) -> OortState:
        minus_ones = torch.full((federation.num_memory_rows,), -1, dtype=torch.int64, device=model.device)
        return OortState(model, federation.zeros(dtype=model.dtype), minus_ones)

    def cohort(self, state: State, active: Cohort) -> Cohort:
        assert isinstance(state, OortState)
        share = max(self.explore * self.decay**active.round, self.explore_least)

        rounding = ties.relative_tolerance(state.utility.dtype)

        def pick_clients(draw: np.random.Generator, utility: np.ndarray, last: np.ndarray) -> np.ndarray:
            past_clients, new_clients = np.flatnonzero(last >= 0), np.flatnonzero(last < 0)
            num_exploited = min(len(past_clients), max(self.k - round(share * self.k), self.k - len(new_clients)))
            explored = draw.permutation(new_clients)[: self.k - num_exploited]
            best = self.exploited_clients(draw, past_clients, utility, last, active.round, num_exploited, rounding)
            return np.concatenate([explored, best])

        return choose_rows(active, pick_clients, state.utility[active.rows], state.last_seen[active.rows])

    def exploited_clients(
        self,
        random_draw: np.random.Generator,
        explored_clients: np.ndarray,
        client_utilities: np.ndarray,
        last_round: np.ndarray,
        t: int,
        client_count: int,
        rounding_tolerance: float = 0.0,
    ) -> np.ndarray:
        """So many of the known ones, by utility, which is exact up to `rounding_tolerance`, relative to its size."""
        if not client_count:
            return explored_clients[:0]
        capped_utility = np.minimum(
            client_utilities[explored_clients], np.quantile(client_utilities[explored_clients], self.clip)
        )
        utility_range = np.ptp(capped_utility)
        equal = (
            utility_range <= rounding_tolerance * np.abs(capped_utility).max()
        )  # then the range is only rounding error and must not scale anything
        scores = (0.0 if equal else (capped_utility - capped_utility.min()) / utility_range) + np.sqrt(
            0.1 * np.log(t + 1) / (last_round[explored_clients] + 1)
        )
        admitted_mask = (
            scores >= (self.cutoff - rounding_tolerance) * np.sort(scores)[-client_count]
        )  # also where rounding lowers one
        keys = np.log(random_draw.random(len(explored_clients))) / np.maximum(
            scores, 1e-12
        )  # the largest are such a draw
        return explored_clients[np.argsort(-np.where(admitted_mask, keys, -np.inf), kind="stable")[:client_count]]

    def aggregate(self, state: State, report: Report, t: int) -> State:
        assert isinstance(state, OortState)
        rows = report.cohort.rows
        samples = torch.as_tensor(report.samples, dtype=report.loss.dtype).to(report.loss.device)
        state.utility[rows], state.last_seen[rows] = samples * report.loss, t
        return super().aggregate(state, report, t)
