"""Performative gradient descent for data that react gradually, depending on their past."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedsim.core.constraints import Count, CountOrZero, NonNegative
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.samples import Batch, ClientData
from fedsim.local.exploring import exploration_noise, replicate_seed_memory
from fedsim.local.history import STEPS
from fedsim.local.performative import LocalStepSamples, PoFL
from fedsim.local.rule import Carry
from fedsim.models import StatelessModel
from fedsim.shift import Shift


class StatefulPerfGD(PoFL):
    """Stateful performative gradient descent (Izzo, Ying and Zou, 2021; from its abstract): PoFL for a distribution
    that depends on the deployed model *and* on its own past, f_t = M(θ_t, f_{t−1}), as under `shift.inertia`; towards
    the θ^PO of the stationary distribution.

    Both partial derivatives are regressed together, Δf ≈ ∂₁ Δθ + ∂₂ Δf_before, over the client's last H steps, and

        df*/dθ = (I − ∂₂)⁻¹ ∂₁ = Σ_k ∂₂ᵏ ∂₁

    takes the place of PoFL's df/dθ in L̂₂. With M = (1 − λ)(Aθ + b) + λ f it is A for every λ, while ∂₁ alone is (1 −
    λ)A. The rule does not observe the past of the data: θ is the model that the client deployed, not the average to
    which the data reacted (which PoFL observes). A client's first H + 1 steps are repeated gradient descent. Near
    convergence deployments carry no information; the noise `spread` keeps them distinct. Memory: H·(d + 2p) numbers per
    client. Needs shift.deploy=step.

    Args:
        history: H; must exceed d + p to determine all directions.
        spread: σ of Gaussian noise added to deployed models, the same for all clients of a replicate.
        horizon: K, number of later reactions taken into account, Σ_{k≤K} ∂₂ᵏ ∂₁; None: all, in closed form.
        **options: of PoFL.
    """

    effective_if = (
        EffectiveIf(
            "spread", lambda component, run: component.estimator.size > 0, "data that react to the model: a shift"
        ),
        EffectiveIf(
            "horizon", lambda component, run: component.estimator.size > 0, "data that react to the model: a shift"
        ),
    )

    def __init__(
        self, history: Count = 10, spread: NonNegative = 0.0, horizon: CountOrZero | None = None, **options: Any
    ) -> None:
        super().__init__(history=history, **options)
        self.spread = spread
        self.horizon = horizon
        self.needs_round = self.spread > 0  # which the noise is drawn for
        if self.history.growing:
            raise ConfigError(
                "{growing}=true is for local=pofl; with the past as a regressor too the window is filled",
                mentions=("growing",),
            )

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        if shift.active and shift.deploy == "round":
            raise ConfigError(
                "local=stateful_perfgd regresses what each deployment of a client's changes; set shift.deploy=step"
            )
        super().setup(data, shift, model)
        self.trained = model.trained

    def memory(self, federation: Federation, dimension: int) -> Carry:
        memory = self.history.memory(federation, dimension + self.estimator.size, self.estimator.size)
        return memory | (replicate_seed_memory(federation) if self.spread else {})

    def deploys(self, carry: Carry) -> Tensor:
        if not self.spread:
            return carry["params"]
        noise = vmap(lambda row_carry: exploration_noise(row_carry, row_carry[STEPS], self.trained))(carry)
        return carry["params"] + self.spread * noise

    def point(self, carry: Carry, batch: Batch) -> Tensor:
        return torch.cat([self.deploys(carry), self.history.last_estimate(carry)], dim=1)  # (θ_t, f_{t−1}), [c, d + p]

    def shift_gradient(self, carry: Carry, draw: LocalStepSamples, moment_gradient: Tensor) -> tuple[Carry, Tensor]:
        # [c, H, d + p], [c, H, p]
        input_changes, estimate_changes = self.history.differences(carry, draw.theta, draw.f)
        inverse = torch.linalg.pinv(input_changes, rtol=self.history.rcond)
        by_theta, by_before = inverse.split(
            [inverse.shape[1] - moment_gradient.shape[1], moment_gradient.shape[1]], dim=1
        )
        # ∂₁ = Δfᵀ Pᵀ and ∂₂ = Δfᵀ Qᵀ of rank H: (∂₁ᵀ Σ (∂₂ᵀ)ᵏ) u = P Σ (Δf Q)ᵏ Δf u, with matrices of H alone
        recurrence_matrix, regression_coefficients = (
            estimate_changes @ by_before,
            estimate_changes @ moment_gradient[:, :, None],
        )
        if self.horizon is None:
            identity = torch.eye(self.history.length, dtype=recurrence_matrix.dtype, device=recurrence_matrix.device)
            regression_coefficients = (
                torch.linalg.pinv(identity - recurrence_matrix, rtol=self.history.rcond) @ regression_coefficients
            )
        else:
            term = regression_coefficients
            for _ in range(self.horizon):
                term = recurrence_matrix @ term
                regression_coefficients = regression_coefficients + term
        ready_mask = self.history.exceeds_window(carry, 1)[:, None]  # the first step has no earlier f
        return carry, torch.where(ready_mask, (by_theta @ regression_coefficients).squeeze(2), 0.0)
