"""FedAsync: mixes each arriving update into the model, with a weight that decreases with staleness (Xie et al.
2019).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core.constraints import NonNegative, OneOf, PositiveFraction
from fedsim.core.errors import ConfigError
from fedsim.core.report import Report
from fedsim.strategies.staleness import DISCOUNT_EFFECTIVE_IF, Discount, DiscountKind
from fedsim.strategies.strategy import State, Strategy

UPDATE_FORMS = ("model", "difference")


class FedAsync(Strategy[State]):
    """x ← (1 − α_d) x + α_d x_i for every x_i that arrives, α_d = α σ(d), d the number of rounds since its computation
    started (`Discount`).

    Updates that arrive in the same round are processed in the order of client indices. The 'difference' form adds −α_d
    G_i to the current model, whereas the published form moves towards an old model; they differ if d > 0. The published
    local objective has a proximal term, which is not added here. No memory.

    Args:
        alpha: α, at most 1.
        discount: σ: polynomial, hinge or constant.
        a, b: of σ.
        form: model or difference.
    """

    effective_if = DISCOUNT_EFFECTIVE_IF

    supports_stale = True
    arrivals = 1

    def __init__(
        self,
        alpha: PositiveFraction = 0.6,
        discount: DiscountKind = "polynomial",
        a: NonNegative = 0.5,
        b: NonNegative = 4.0,
        form: Annotated[str, OneOf(*UPDATE_FORMS)] = "model",
    ) -> None:
        self.alpha = alpha
        self.discount = Discount(discount, a, b)
        self.form = form

    def check(self, availability: Availability) -> None:
        if availability.law == "multiset":
            raise ConfigError(
                f"strategy={type(self).__name__} mixes rows one by one, and availability=multiset counts some twice; "
                "choose another availability"
            )

    def aggregate(self, state: State, report: Report, t: int) -> State:
        cohort = report.cohort
        alpha = self.alpha * self.discount(report.rounds_late) * (cohort.host_index.multiplicity > 0)
        if self.form == "difference":
            return replace(
                state, model=state.model - cohort.sum(report.innovation, _to_tensor_like(alpha, state.model))
            )
        alphas, virtual_clients, bounds = cohort.all_gather_host(alpha)
        weights, model_weights = np.zeros_like(alphas), np.ones(len(state.model))
        for r, (a, b) in enumerate(itertools.pairwise(bounds)):
            later_products = np.append(np.cumprod(1.0 - alphas[a:b][::-1])[::-1], 1.0)  # Π_{j ≥ i} (1 − α_j)
            weights[a:b], model_weights[r] = alphas[a:b] * later_products[1:], later_products[0]
        local_weights = weights[np.searchsorted(virtual_clients, cohort.host_index.virtual_clients)]
        retained_model = _to_tensor_like(model_weights, state.model)[:, None] * state.model
        return replace(
            state, model=retained_model + cohort.sum(report.end, _to_tensor_like(local_weights, state.model))
        )


def _to_tensor_like(numbers: np.ndarray, rows: Tensor) -> Tensor:
    return torch.as_tensor(numbers, dtype=rows.dtype).to(rows.device)
