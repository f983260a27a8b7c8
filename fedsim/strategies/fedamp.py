"""FedAMP: each client's model is pulled towards a mixture of the models that are close to it."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fedsim.core.constraints import NonNegative, Positive
from fedsim.core.federation import Cohort, Federation
from fedsim.core.report import Report
from fedsim.strategies.strategy import ClientModels, KeepsClientModels


class FedAMP(KeepsClientModels[ClientModels]):
    """u_i = x_i + Σ_{j∈A} ξ_ij (x_j − x_i), ξ_ij = (α/σ) e^{−‖x_i − x_j‖²/σ}, over the clients of the round; client i
    starts from its own x_i and trains f_i(x) + λ/(2α) ‖x − u_i‖² (Huang et al., AAAI 2021, Alg. 1 with A(z) = 1 −
    e^{−z/σ}). Requires local=sgd, whose carry takes the anchor u_i.

    In the paper all clients participate. The weight of the others, at most (|A| − 1) α/σ, must stay below 1 for u_i to
    be a mixture; the defaults keep it there for up to 100 clients. λ = 0 is local training. In PFLlib (clientamp.py)
    the penalty is computed on detached parameters and has no gradient. The state's model is the plain mean of all
    clients' models. Memory: one model per client, which the server knows.

    Args:
        alpha: α.
        sigma: σ, a squared distance between models.
        lam: λ.
    """

    def __init__(self, alpha: Positive = 10.0, sigma: Positive = 1000.0, lam: NonNegative = 1.0) -> None:
        self.alpha = alpha
        self.sigma = sigma
        self.lam = lam

    def initial(self, model: Tensor, federation: Federation) -> ClientModels:
        return ClientModels.broadcast(model, federation)

    def start(self, state: ClientModels, cohort: Cohort) -> dict[str, Tensor]:  # type: ignore[override]
        models = cohort.gather(state.models)
        proximal = models.new_full((len(cohort),), self.lam / self.alpha)
        return {"params": models, "anchor": self.mixed_models(cohort, models), "proximal": proximal}

    def mixed_models(self, cohort: Cohort, models: Tensor) -> Tensor:
        """[n, d] u_i of the clients' models [n, d]."""
        mixed_models = torch.empty_like(models)
        for cohort_models, (first_row, end_row) in zip(
            cohort.split_by_replicate(models), itertools.pairwise(cohort.replicate_bounds), strict=True
        ):
            local_models = models[first_row:end_row]
            distances = torch.cdist(local_models, cohort_models, compute_mode="donot_use_mm_for_euclid_dist").square()
            weights = self.alpha / self.sigma * torch.exp(-distances / self.sigma)  # x_i itself adds nothing
            mixed_models[first_row:end_row] = (
                local_models + weights @ cohort_models - weights.sum(1, keepdim=True) * local_models
            )
        return mixed_models

    def aggregate(self, state: ClientModels, report: Report, t: int) -> ClientModels:
        report.cohort.scatter(state.models, report.end)
        return ClientModels(report.cohort.federation.mean_over_clients(state.models), state.models)
