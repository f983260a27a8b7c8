"""MOON: features are pulled towards those of the global model and away from those of the client's last one."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fedsim.core.constraints import NonNegative, Positive
from fedsim.core.effects import EffectiveIf
from fedsim.data.samples import Batch
from fedsim.local.penalised import RECEIVED_MODEL_KEY, PenalisedSGD
from fedsim.local.rule import Carry, Objective
from fedsim.models.features import ForwardPass

LAST_MODEL, PREVIOUS = "last model", "previous"
GLOBAL_FEATURES, PREVIOUS_FEATURES = "global features", "previous features"


class MOON(PenalisedSGD):
    """Steps of SGD on f(x) + μ · mean_b −log(e^{cos(z, z_g)/τ} / (e^{cos(z, z_g)/τ} + e^{cos(z, z_p)/τ})), where z, z_g
    and z_p are a sample's features under x, under the model that the client received in this round, and under that at
    which it ended its last round (Li, He and Song, CVPR 2021, Alg. 1).

    Before a client's first round its last model is the initial one, as in the authors' program (main.py): in round 0
    z_g = z_p, so that the penalty has no gradient. In the paper features are the outputs of a projection head in front
    of the last layer. z_g and z_p are computed as in evaluation: without dropout, with running statistics. μ = 0 is
    SGD. Memory: one model per client. A step costs a gradient and two evaluations.

    Args:
        mu: μ.
        temperature: τ.
        features, **options: see `PenalisedSGD`.
    """

    effective_if = (EffectiveIf("temperature", lambda component, run: component.penalty_weight > 0, "{at}.mu above 0"),)

    own_models = (LAST_MODEL,)

    def __init__(
        self, mu: NonNegative = 1.0, temperature: Positive = 0.5, features: str | None = None, **options: Any
    ) -> None:
        super().__init__(mu, features, **options)
        self.temperature = temperature

    def round_state(self, params: Tensor) -> Carry:
        return {RECEIVED_MODEL_KEY: params.clone(), PREVIOUS: params.clone()}

    def on_round_start(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> Carry:
        return carry | {PREVIOUS: carry[LAST_MODEL].clone()}

    def penalty_context(self, carry: Carry, batch: Batch, objective: Objective) -> Carry:
        return {
            GLOBAL_FEATURES: objective.forward(carry[RECEIVED_MODEL_KEY], batch).features,
            PREVIOUS_FEATURES: objective.forward(carry[PREVIOUS], batch).features,
        }

    def penalty(self, forward: ForwardPass, context: Carry, batch: Batch) -> Tensor:
        attraction, repulsion = (
            F.cosine_similarity(forward.features, context[name], dim=1) for name in (GLOBAL_FEATURES, PREVIOUS_FEATURES)
        )
        return F.softplus((repulsion - attraction) / self.temperature)

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        carry, loss = super().step(carry, batch, lr, objective)
        return carry | {LAST_MODEL: carry["params"]}, loss
