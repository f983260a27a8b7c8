"""Ditto: every client trains a personal model that is regularised towards the global one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedsim.core.constraints import NonNegative, Positive
from fedsim.data.samples import Batch
from fedsim.local.apfl import personal_rate_ratio
from fedsim.local.rule import Carry, Objective
from fedsim.local.sgd import SGD

RECEIVED_MODEL_NAME = "received"


class Ditto(SGD):
    """In addition to a step of SGD, v ← v − η_v (∇f(v) + λ (v − x^t)) on the same batch, x^t the client's row at the
    start of the round (Li, Hu, Beirami and Smith, ICML 2021).

    The global model does not depend on v: it is that of local=sgd. v starts as the initial model; λ = 0 trains it
    independently. Memory: one model per client, stored between rounds.

    Args:
        penalty: λ.
        personal_lr: η_v, with the same schedule; None: η.
        **options: of SGD; clip and weight_decay act on ∇f(v) too.
    """

    own_models = ("personal",)

    def __init__(self, penalty: NonNegative = 0.1, personal_lr: Positive | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.penalty = penalty
        self.ratio = personal_rate_ratio(personal_lr, self.rates)

    def round_state(self, params: Tensor) -> Carry:
        return {RECEIVED_MODEL_NAME: params.clone()}

    def personal(self, carry: Carry) -> list[tuple[Tensor, Tensor]]:
        v = carry["personal"]
        return [(v.new_ones(()), v)]

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        gradient, _ = objective.gradient(carry["personal"], batch)
        personal_carry = {
            "params": carry["personal"],
            "anchor": carry[RECEIVED_MODEL_NAME],
            "proximal": lr.new_full((), self.penalty),
        }
        v = self.descend(personal_carry, gradient, lr * self.ratio)
        carry, loss = super().step(carry, batch, lr, objective)
        return carry | {"personal": v}, loss
