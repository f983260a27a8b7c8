"""CA-Fed: clients that come in long stretches are left out where that pays (Rodio et al., INFOCOM 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.core import checks, ties
from fedsim.core.federation import WEIGHTINGS, Cohort, Federation
from fedsim.core.per_seed import Numbers
from fedsim.core.report import Report
from fedsim.strategies.base import ServerStep, State, answers


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


class CAFed(ServerStep[CAFedState]):
    """x ← x − η_g Σ_{i∈A} q_i G_i, q_i = w_i / π_i or 0 for those left out.

    Clients are gone through by |λ_i|, the largest first, and once more by π_i, the smallest first; one is left out if
    that lowers J = Σ_i a_i (F̂_i − F*) + κ TV(w, a)² max_i (F̂_i − F*), where a are the w_i of those kept, scaled to sum
    1, and TV = ½ ‖w − a‖₁. π_i is the share of rounds in which a client is there, λ_i = P(stays) + P(stays away) − 1;
    both are estimated from what was seen, this round included. Nobody is ever the last to be left out. An empty round
    moves nothing.

    A client that has not been there yet counts with the mean F̂ of those that have; the authors' program gives it the
    mean loss of round 0, and keeps that until it comes (see docs/authors_programs.md).

    The authors' program has a prior for π_i and λ_i that is worth 100 rounds and true, and F*_i from training each
    client alone; here the prior is a fair coin in every round, and F* one number. Whoever is there is asked for the
    loss of all its data at x^t; the work of those left out is done, counted as sent, and not used. Memory: five numbers
    per client. The host waits.

    Args:
        server_lr: η_g, or a list of one per seed.
        bias: κ.
        tolerance: by how much J must fall at least; a huge one leaves nobody out.
        smoothness: how much of the old F̂_i stays.
        optimum: F*.
        prior: of how many rounds; more than 0.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions.
    """

    needs_full_gradients = True

    def __init__(
        self,
        server_lr: Numbers = 1.0,
        bias: float = 1.0,
        tolerance: float = 0.0,
        smoothness: float = 0.0,
        optimum: float = 0.0,
        prior: float = 10.0,
        weighting: str = "uniform",
    ) -> None:
        super().__init__(server_lr)
        self.bias = checks.not_negative("strategy.bias", bias)
        self.tolerance = checks.not_negative("strategy.tolerance", tolerance)
        self.smoothness = checks.fraction("strategy.smoothness", smoothness)
        self.optimum = checks.real("strategy.optimum", optimum)
        self.prior = checks.positive("strategy.prior", prior)
        self.weighting = checks.choice("strategy.weighting", weighting, WEIGHTINGS)

    def initial(self, model: Tensor, federation: Federation) -> CAFedState:
        return CAFedState(model, *(federation.zeros(dtype=model.dtype) for _ in range(5)))

    def aggregate(self, state: CAFedState, report: Report, t: int) -> CAFedState:
        cohort = report.cohort
        known = self.watched(state, cohort, t)
        share = (known.taken + self.prior / 2) / (t + 1 + self.prior)
        stays = (known.stayed + self.prior / 2) / (state.taken + self.prior)
        misses = (known.missed + self.prior / 2) / (t - state.taken + self.prior)
        kept = self.kept(known, share, stays + misses - 1, cohort)
        weights = kept * cohort.weights(self.weighting) / share[cohort.rows]
        known.model = state.model - self.server_lr * cohort.sum(report.innovation, weights)
        return known

    def watched(self, state: CAFedState, cohort: Cohort, t: int) -> CAFedState:
        """What is known when this round's clients have said their losses."""
        rows, here = cohort.rows, torch.zeros_like(state.here)
        here[rows] = 1
        old = torch.where(state.taken[rows] > 0, self.smoothness, 0.0).to(here.dtype)
        loss = state.loss.clone()
        loss[rows] = old * state.loss[rows] + (1 - old) * answers(cohort, state.model).loss
        missed = state.missed + ((1 - here) * (1 - state.here) if t else 0.0)
        return CAFedState(state.model, loss, here, state.taken + here, state.stayed + here * state.here, missed)

    def kept(self, state: CAFedState, share: Tensor, correlation: Tensor, cohort: Cohort) -> Tensor:
        """[n] 1 for those of the cohort who are not left out, else 0."""
        federation = cohort.federation
        everyone = federation.everyone(cohort)
        about = torch.stack([state.loss, state.taken, share, correlation, federation.weights(self.weighting)])
        host, virtual, _ = everyone.all_gather_host(about.double().cpu().numpy())
        keep = np.zeros(federation.replicates * federation.clients)
        rounding = ties.tolerance(share.dtype)
        for seed, own in zip(federation.seeds, virtual.reshape(federation.replicates, -1), strict=True):
            loss, taken, pi, rho, w = host[:, own]
            if taken.any():
                excess = np.where(taken > 0, loss, loss[taken > 0].mean()) - self.optimum
                breakers = ties.tie_breakers(seed, own % federation.clients, cohort.round)
                order = [*np.lexsort((breakers, -abs(rho))), *np.lexsort((breakers, pi))]
                keep[own] = self.left(w, excess, order, rounding)
        return torch.as_tensor(keep[cohort.host.virtual]).to(share)

    def left(self, w: np.ndarray, excess: np.ndarray, order: list[int], rounding: float = 0.0) -> np.ndarray:
        """[m] bool: who is kept of one replicate; a fall of J that rounding made too small counts."""

        def error(keep: np.ndarray) -> float:
            a = w * keep / (w * keep).sum()
            return float(a @ excess + self.bias * (abs(w - a).sum() / 2) ** 2 * excess.max())

        keep = np.ones(len(w), dtype=bool)
        least = error(keep)
        for client in order:
            without = keep.copy()
            without[client] = False
            slack = rounding * abs(least)
            if keep[client] and (w * without).sum() > 0 and least - error(without) >= self.tolerance - slack:
                keep, least = without, error(without)
        return keep
