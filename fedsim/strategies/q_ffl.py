"""q-FFL: clients with high losses get larger weights (Li, Sanjabi, Beirami and Smith, ICLR 2020)."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedsim.core.constraints import NonNegative
from fedsim.core.federation import Weighting
from fedsim.core.report import Report
from fedsim.strategies.strategy import State, Strategy, full_data_gradients

LOSS_OFFSET = 1e-10  # added to every loss, as in the authors' program


class QFFL(Strategy[State]):
    """q-FedAvg: x ← x − Σ_{i∈A} w_i F_i^q ĝ_i / Σ_{i∈A} w_i (q F_i^{q−1} ‖ĝ_i‖² + F_i^q / η_l), ĝ_i = G_i / η_l, F_i
    the loss of all the client's data at x^t.

    It minimises Σ_i w_i F_i^{q+1} / (q + 1): q = 0 is FedAvg, q → ∞ minimises the largest loss of a client. Losses must
    not be negative. No memory; a client evaluates all its data once more, and sends its loss. η_l is the learning rate
    of the round's first step.

    Args:
        q: 0.001 to 15 in the papers.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions (p_k in the paper; its program samples clients by them).
    """

    needs_full_gradients = True

    def __init__(self, q: NonNegative = 1.0, weighting: Weighting = "uniform") -> None:
        self.q = q
        self.weighting = weighting

    def aggregate(self, state: State, report: Report, t: int) -> State:
        cohort = report.cohort
        rate = cohort.broadcast(report.lr)
        loss = full_data_gradients(cohort, state.model).loss.clamp(min=0.0) + LOSS_OFFSET
        gradient = report.innovation / rate[:, None]
        weight = loss**self.q
        curvature = self.q * loss ** (self.q - 1) * gradient.square().sum(1) + weight / rate
        if self.weighting == "data":
            curvature, weight = (cohort.weights("data") * values for values in (curvature, weight))
        total = cohort.sum(curvature)
        step = cohort.sum(gradient, weight) / torch.where(total > 0, total, 1.0)[:, None]
        return replace(state, model=state.model - step)
