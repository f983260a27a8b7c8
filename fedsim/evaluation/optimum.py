"""The closed-form optimum of mean estimation and quadratic clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.data.samples import ClientData
from fedsim.models import Mean, StatelessModel
from fedsim.models.losses import half_squared_distance


def optimum(data: ClientData, model: StatelessModel) -> Tensor | None:
    """[R, d] float64 the minimiser Σ_i w_i z̄_i / (1 + λ) of Σ_i w_i E ½‖θ − z‖² + λ/2 ‖θ‖², with the weights of the
    strategy's objective, the clients' own samples and the run's ridge; None for other problems."""
    estimation = isinstance(model.evaluation_module, Mean) and model.loss is half_squared_distance
    means = data.means() if estimation else None
    if means is None:
        return None
    weights = torch.tensor(data.federation.client_weights, device=means.device)
    return torch.einsum("rm,rmd->rd", weights, means) / (1 + model.ridge)
