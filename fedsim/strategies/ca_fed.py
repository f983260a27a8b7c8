"""CA-Fed: excludes clients with strongly correlated availability if that reduces an error bound (Rodio et al., INFOCOM
2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.core import ties
from fedsim.core.constraints import Fraction, NonNegative, Positive, PositivePerSeed, Real
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.strategy import ServerRateStrategy, State, full_data_gradients


@dataclass
class CAFedState(State):
    """Attributes ([R·m] each):

    loss: F̂_i, what the client's data said last at a broadcast model; 0 before its first round.
    here: was the client there in the last round, 0 or 1?
    taken: in how many rounds it was there.
    stayed, missed: how many rounds it was there, or away, after one in which it was so too.
    """

    loss: Tensor
    here: Tensor
    taken: Tensor
    stayed: Tensor
    missed: Tensor


class CAFed(ServerRateStrategy[CAFedState]):
    """x ← x − η_g Σ_{i∈A} q_i G_i, q_i = w_i / π_i, or 0 for excluded clients.

    Clients are considered in decreasing order of |λ_i|, then in increasing order of π_i; a client is excluded if that
    reduces J = Σ_i a_i (F̂_i − F*) + κ TV(w, a)² max_i (F̂_i − F*), where a are the w_i of the remaining clients,
    scaled to sum 1, and TV = ½ ‖w − a‖₁. π_i is the fraction of rounds in which a client is available, λ_i = P(stays
    available) + P(stays unavailable) − 1; both are estimated from the rounds so far, including this one. At least one
    client remains. An empty round does not change the model.

    For a client that has not participated yet, the mean F̂ of those that have is used; the authors' program uses the
    mean loss of round 0 until the client participates (see docs/authors_programs.md).

    The authors' program has a prior for π_i and λ_i with the true values and the weight of 100 rounds, and obtains F*_i
    by training each client alone; here the prior is probability ½ in every round, and F* is a single number. Available
    clients evaluate the loss of all their data at x^t. Excluded clients train and their updates are counted as sent,
    but not used. Memory: five numbers per client. The host waits.

    Args:
        server_lr: η_g, or a list of one per seed.
        bias: κ.
        tolerance: minimal decrease of J for excluding a client; a huge value excludes none.
        smoothness: weight of the previous F̂_i in its update.
        optimum: F*.
        prior: weight of the prior in rounds; more than 0.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions.
    """

    needs_full_gradients = True

    def __init__(
        self,
        server_lr: PositivePerSeed = 1.0,
        bias: NonNegative = 1.0,
        tolerance: NonNegative = 0.0,
        smoothness: Fraction = 0.0,
        optimum: Real = 0.0,
        prior: Positive = 10.0,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr)
        self.bias = bias
        self.tolerance = tolerance
        self.smoothness = smoothness
        self.optimum = optimum
        self.prior = prior
        self.weighting = weighting

    def initial(self, model: Tensor, federation: Federation) -> CAFedState:
        return CAFedState(model, *(federation.zeros(dtype=model.dtype) for _ in range(5)))

    def aggregate(self, state: CAFedState, report: Report, t: int) -> CAFedState:
        cohort = report.cohort
        new_state = self.updated_statistics(state, cohort, t)
        share = (new_state.taken + self.prior / 2) / (t + 1 + self.prior)
        stay_probability = (new_state.stayed + self.prior / 2) / (state.taken + self.prior)
        miss_probability = (new_state.missed + self.prior / 2) / (t - state.taken + self.prior)
        kept_mask = self.included_mask(new_state, share, stay_probability + miss_probability - 1, cohort)
        weights = kept_mask * cohort.weights(self.weighting) / share[cohort.rows]
        new_state.model = state.model - self.server_lr * cohort.sum(report.innovation, weights)
        return new_state

    def updated_statistics(self, state: CAFedState, cohort: Cohort, t: int) -> CAFedState:
        """What is known when this round's clients have said their losses."""
        rows, active = cohort.rows, torch.zeros_like(state.here)
        active[rows] = 1
        past_weight = torch.where(state.taken[rows] > 0, self.smoothness, 0.0).to(active.dtype)
        loss = state.loss.clone()
        loss[rows] = past_weight * state.loss[rows] + (1 - past_weight) * full_data_gradients(cohort, state.model).loss
        missed_rounds = state.missed + ((1 - active) * (1 - state.here) if t else 0.0)
        return CAFedState(
            state.model, loss, active, state.taken + active, state.stayed + active * state.here, missed_rounds
        )

    def included_mask(self, state: CAFedState, share: Tensor, correlation: Tensor, cohort: Cohort) -> Tensor:
        """[n] 1 for those of the cohort who are not left out, else 0."""
        federation = cohort.federation
        all_rows = federation.full_cohort(cohort)
        statistics = torch.stack([state.loss, state.taken, share, correlation, federation.weights(self.weighting)])
        host_statistics, virtual_clients, _ = all_rows.all_gather_host(statistics.double().cpu().numpy())
        included_clients = np.zeros(federation.num_replicates * federation.clients)
        rounding_tolerance = ties.relative_tolerance(share.dtype)
        for seed, replicate_rows in zip(
            federation.seeds, virtual_clients.reshape(federation.num_replicates, -1), strict=True
        ):
            loss, participations, pi, rho, w = host_statistics[:, replicate_rows]
            if participations.any():
                excess_losses = np.where(participations > 0, loss, loss[participations > 0].mean()) - self.optimum
                breakers = ties.tie_breakers(seed, replicate_rows % federation.clients, cohort.round)
                order = [*np.lexsort((breakers, -abs(rho))), *np.lexsort((breakers, pi))]
                included_clients[replicate_rows] = self.included_of_replicate(
                    w, excess_losses, order, rounding_tolerance
                )
        return torch.as_tensor(included_clients[cohort.host_index.virtual_clients]).to(share)

    def included_of_replicate(
        self, w: np.ndarray, excess_losses: np.ndarray, exclusion_order: list[int], rounding_tolerance: float = 0.0
    ) -> np.ndarray:
        """[m] bool: who is kept of one replicate; a fall of J that rounding made too small counts."""

        def error_bound(included: np.ndarray) -> float:
            a = w * included / (w * included).sum()
            return float(a @ excess_losses + self.bias * (abs(w - a).sum() / 2) ** 2 * excess_losses.max())

        included_clients = np.ones(len(w), dtype=bool)
        lowest_error = error_bound(included_clients)
        for client in exclusion_order:
            candidate_mask = included_clients.copy()
            candidate_mask[client] = False
            error_tolerance = rounding_tolerance * abs(lowest_error)
            if (
                included_clients[client]
                and (w * candidate_mask).sum() > 0
                and lowest_error - error_bound(candidate_mask) >= self.tolerance - error_tolerance
            ):
                included_clients, lowest_error = candidate_mask, error_bound(candidate_mask)
        return included_clients
