"""The decoupled performative risk R(θ, θ') as a deterministic, differentiable function in double precision."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from fedsim.core import rng
from fedsim.data.samples import ClientData
from fedsim.evaluation.performative.search import EvaluationCounter
from fedsim.models import StatelessModel
from fedsim.shift import Shift
from fedsim.shift.shift import unpadded_client_batches

JACOBIAN_ROWS_AT_ONCE = 16  # rows of a Jacobian that are computed at once


class Risk:
    """R(θ, θ') = Σ_i w_i E_{z∼D_i(θ')} ℓ(z; θ) + λ/2 ‖θ‖² of one replicate. R(θ, θ) is the performative risk. w_i are
    the weights of the strategy's objective (`Federation.client_weights`).

    The expectation is a mean over a fixed base sample of every client, to which the shift is applied: all the client's
        stored data, or a stream's `exact` sample. For the latter, means of functions that are at most quadratic in the
        base noise are exact; others are means over `samples` keyed draws. Contamination is ignored.

    Args:
        model: of the run; used in double precision and evaluation mode.
        shift: set up for the run.
        data: the clients' samples.
        replicate: number of the replicate.
        samples: largest number per client; None: all stored samples, or 1,000 of a stream.
        search: the search that evaluates it, which may stop it.

    Attributes:
        base: the base sample with the law of round 0, or of another one by `at`, if the data drift.
    """

    def __init__(
        self,
        model: StatelessModel,
        shift: Shift,
        data: ClientData,
        replicate: int = 0,
        samples: int | None = None,
        search: EvaluationCounter | None = None,
    ) -> None:
        self.search = search or EvaluationCounter()
        self.model, self.shift = model.to_double_precision(), shift
        federation = data.federation
        m, device = federation.clients, federation.device
        rows = torch.arange(m, device=device) + replicate * m
        self.data, self._rows = data, rows.cpu().numpy()
        width = data.width(samples, self._rows)
        self.first_base = data.fixed_samples(rows, width, torch.float64, rng.Purpose.EVALUATION)
        self.base = data.drifted(self.first_base, self._rows, 0)
        self.weights = torch.tensor(federation.client_weights[replicate], device=device)  # a copy: see `minimise`

    def at(self, t: int) -> Risk:
        """Return the risk on the data of round t, which is this risk unless the data drift."""
        if not self.data.drift.active:
            return self
        risk = copy.copy(self)
        risk.base = self.data.drifted(self.first_base, self._rows, t)
        return risk

    def drift_displacements(self, t: int) -> np.ndarray:
        """[m] how far the drift has displaced the samples of each client in round t."""
        replicate, client = np.divmod(self._rows, self.data.federation.clients)
        return self.data.drift.displacement(np.full(len(client), t), replicate, client)

    def __call__(self, theta: Tensor, deployed: Tensor) -> Tensor:
        """R(θ, θ') [] for θ and θ' [d], differentiable in both."""
        self.search.count_evaluation()
        if self.shift.runs_unpadded:
            losses = torch.stack(
                [self.client_risk(theta, deployed, client_batch) for client_batch in unpadded_client_batches(self.base)]
            )
        else:
            losses = vmap(self.client_risk, in_dims=(None, None, 0))(theta, deployed, self.base)
        return losses @ self.weights + 0.5 * self.model.ridge * theta.square().sum()

    def client_risk(self, theta: Tensor, deployed: Tensor, base_samples: dict[str, Tensor]) -> Tensor:
        """A client's mean loss [] on its base sample, shifted by `deployed`, without the ridge."""
        shifted_batch = self.shift.respond_differentiably(base_samples, deployed)
        return self.model.mean_loss(self.model.evaluate(theta, shifted_batch["x"]), shifted_batch)

    def performative_risk(self, theta: Tensor) -> Tensor:
        """R(θ, θ) []."""
        return self(theta, theta)

    def decoupled_gradient(self, theta: Tensor) -> Tensor:
        """[d] ∇_θ R(θ, θ') at θ' = θ: the gradient used by repeated gradient descent."""
        return grad(self, argnums=0)(theta, theta)

    def performative_gradient(self, theta: Tensor) -> Tensor:
        """[d] ∇_θ R(θ, θ), through the shift."""
        return grad(self.performative_risk)(theta)

    def decoupled_jacobian(self, theta: Tensor) -> Tensor:
        """[d, d] derivative of `decoupled_gradient`, including the reaction of the data."""
        return jacrev(self.decoupled_gradient, chunk_size=JACOBIAN_ROWS_AT_ONCE)(theta)

    def performative_hessian(self, theta: Tensor) -> Tensor:
        """[d, d] derivative of `performative_gradient`."""
        return jacrev(self.performative_gradient, chunk_size=JACOBIAN_ROWS_AT_ONCE)(theta)
