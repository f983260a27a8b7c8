"""Local rules for performative shifts: repeated and performative gradient descent (PFL, PoFL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsim.core.constraints import Count, Fraction, Positive
from fedsim.core.effects import EffectDeclarations, EffectiveIf
from fedsim.core.federation import Federation
from fedsim.data.samples import Batch, ClientData
from fedsim.local import laws
from fedsim.local.estimators import DistributionEstimator, nonzero_weight_sum
from fedsim.local.history import DeploymentHistory
from fedsim.local.projection import Projection
from fedsim.local.rule import Carry, Objective
from fedsim.local.sgd import SGD
from fedsim.models import StatelessModel
from fedsim.shift import Shift


class PFL(SGD):
    """Repeated gradient descent (p-fedavg; PFL in profl §2): θ ← Proj_Θ(θ − η L̂₁), L̂₁ = mean ∇ℓ(z_j; θ), z_j ~
    D_i(θ).

    Samples are drawn from the distribution that the client's current model induces, but the gradient ignores this
    dependence: the fixed point is θ^PS. Without a projection this is SGD.

    Args:
        box: Θ = [lo, hi] for every parameter; None: unbounded.
        ball: radius of Θ = {‖θ‖ ≤ r} instead.
        **options: of SGD.
    """

    def __init__(self, box: Sequence[float] | None = None, ball: Positive | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.project = Projection(box, ball)

    def descend(self, carry: Carry, gradient: Tensor, lr: Tensor) -> Tensor:
        return self.project(super().descend(carry, gradient, lr))


@dataclass
class LocalStepSamples:
    """The samples of c clients at a local step, and quantities computed from them.

    Attributes:
        batch: [c, B, …] per entry.
        weight: [c, B], 0 for samples that do not count.
        theta: [c, d] the deployed models that the samples react to.
        f: [c, p] f̂.
        gradient: [c, d] L̂₁.
        loss: [c] mean loss.
    """

    batch: Batch
    weight: Tensor
    theta: Tensor
    f: Tensor
    gradient: Tensor
    loss: Tensor


class PoFL(PFL):
    """Performative gradient descent in a federation (profl §3, Alg. 2): θ ← Proj_Θ(θ − η (L̂₁ + L̂₂)).

    L̂₂ = mean ℓ(z_j; θ) (df/dθ)ᵀ ∂log p(z_j; f̂)/∂f is the contribution of the reaction of the data to the gradient:
    the fixed point is θ^PO. A client's first H steps are repeated gradient descent. Memory: H·(d + p) numbers per
    client.

    Args:
        history: H, deployed models from which df/dθ is estimated (see `DeploymentHistory`).
        rcond: relative cut-off in the pseudo-inverse.
        growing: start as soon as the history determines df/dθ, not only when it is full (see `DeploymentHistory`).
        estimator: the statistic f that reacts (see `fedsim.local.laws`).
        variance: known σ² of the score; None estimates it.
        **options: of PFL.
    """

    effective_if: EffectDeclarations = tuple(
        EffectiveIf(
            parameter,
            lambda component, run: component.estimator.size > 0,
            "data that react to the model: a shift",
            attribute=attribute,
        )
        for parameter, attribute in (
            ("history", "history.length"),
            ("rcond", "history.rcond"),
            ("growing", "history.growing"),
            ("variance", "known_variance"),
        )
    )

    batched = True  # masks of ProFL's filter, whose loop depends on the data, and a single pseudo-inverse for all
    per_sample = True
    knows_deployed = True

    def __init__(
        self,
        history: Count = 10,
        rcond: Fraction = 1e-4,
        growing: bool = False,
        estimator: laws.LawName = "auto",
        variance: Positive | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.history = DeploymentHistory(history, rcond, growing)
        self.estimator_name, self.known_variance = estimator, variance

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        self.estimator: DistributionEstimator = laws.make_estimator(
            self.estimator_name, self.known_variance, data, shift
        )

    def memory(self, federation: Federation, dimension: int) -> Carry:
        return self.history.memory(federation, dimension, self.estimator.size)

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        params, theta = carry["params"], self.point(carry, batch)
        batch = {name: value for name, value in batch.items() if name != "deployed"}
        losses, gradients = objective.per_sample(params, batch)
        weight = self.select(carry, gradients, batch.get("weight", torch.ones_like(losses)))
        share = weight / nonzero_weight_sum(weight)
        f = self.estimator.estimate_statistic(batch, weight, self.history.last_estimate(carry))
        loss_gradient = torch.einsum("cb,cbd->cd", share, gradients)
        draw = LocalStepSamples(batch, weight, theta, f, loss_gradient, (share * losses).sum(1))
        carry, shift_gradient = self.shift_gradient(
            carry, draw, self.estimator.score_function_gradient(batch, weight, f, losses)
        )
        carry = self.update_learned_state(carry, draw, lr)
        carry = self.updated(carry, loss_gradient + shift_gradient, lr[:, None])
        return self.history.record_deployment(carry, theta, f), draw.loss

    def point(self, carry: Carry, batch: Batch) -> Tensor:
        """[c, d] what f̂ is a reaction to, beside which it is kept."""
        return batch.get("deployed", carry["params"])

    def select(self, carry: Carry, gradients: Tensor, weight: Tensor) -> Tensor:
        """[c, B] the weights of the samples that count, given those of the real ones and the gradients [c, B, d]."""
        return weight

    def shift_gradient(self, carry: Carry, draw: LocalStepSamples, moment_gradient: Tensor) -> tuple[Carry, Tensor]:
        """L̂₂ [c, d] = (df/dθ)ᵀ u for u = mean ℓ ∂log p/∂f [c, p]; and the carry, if something is to be kept."""
        return carry, self.history.transposed_derivative_product(carry, draw.theta, draw.f, moment_gradient)

    def update_learned_state(self, carry: Carry, sample_draw: LocalStepSamples, lr: Tensor) -> Carry:
        """The carry with whatever else a client remembers; parameters and history are still those before the step."""
        return carry
