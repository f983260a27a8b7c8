"""Heavy-ball steps: a client's velocity outlives the round, also while the client is away."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedsim.core import Federation
from fedsim.core.constraints import Fraction
from fedsim.data.samples import Batch
from fedsim.local import SGD, Objective
from fedsim.local.rule import Carry


class HeavyBall(SGD):
    """u ← β u + ∇f(x), x ← x − η u. Memory: one row per client.

    Args:
        momentum: β.
        **options: of SGD; weight_decay and clip act on u.
    """

    def __init__(self, momentum: Fraction = 0.9, **options: Any) -> None:
        super().__init__(**options)
        self.momentum = momentum

    def memory(self, federation: Federation, dimension: int) -> Carry:
        return {"velocity": federation.zeros(dimension)}

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        gradient, loss = objective.gradient(carry["params"], batch)
        velocity = self.momentum * carry["velocity"] + gradient
        return carry | {"params": self.descend(carry, velocity, lr), "velocity": velocity}, loss
