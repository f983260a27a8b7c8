"""FedRep and FedBABU: private and shared layers are trained one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.core.constraints import CountOrZero
from fedsim.core.errors import ConfigError
from fedsim.data.samples import Batch, ClientData
from fedsim.local.rule import Carry, Objective
from fedsim.local.sgd import SGD
from fedsim.models import StatelessModel
from fedsim.shift import Shift

STEP_COUNT_NAME = "steps taken"


class FedRep(SGD):
    """The first steps of a round train the private columns (the head), the others the shared ones, the representation
    (Collins et al., ICML 2021, Alg. 1). Without steps for the head it is FedBABU, whose head stays at its initial value
    and is trained only in fine-tuning (Oh et al., ICLR 2022, §4.1). Requires `columns` with private columns.

    Args:
        head_steps: number of the round's local steps that train the head.
        **options: of SGD.
    """

    supported_keys = SGD.supported_keys - {"gradient"}
    indivisible = True  # a client that stops while training the head has nothing to send

    def __init__(self, head_steps: CountOrZero = 1, **options: Any) -> None:
        super().__init__(**options)
        self.head_steps = head_steps
        if self.work.steps is not None and self.head_steps >= self.work.steps:
            raise ConfigError(
                f"{{head_steps}}={head_steps} leaves none of local_steps={self.work.steps} for what travels; raise "
                "local_steps",
                mentions=("head_steps",),
            )
        self.head = torch.empty(0)

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        if not len(model.columns.private):
            raise ConfigError(
                "local=fedrep trains what stays with the client and what travels in turn, but everything travels; "
                "choose columns=fedper"
            )
        self.head = torch.zeros(model.dimension, dtype=model.dtype, device=model.device)
        self.head[model.columns.private] = 1.0

    def gradient_weight(self, step: int) -> float | None:
        return float(step >= self.head_steps)  # of what travels

    def round_state(self, params: Tensor) -> Carry:
        return {STEP_COUNT_NAME: params.new_zeros(len(params))}

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        gradient, loss = objective.gradient(carry["params"], batch)
        trained = torch.where(carry[STEP_COUNT_NAME] < self.head_steps, self.head, 1 - self.head)
        params = carry["params"] - lr * trained * self.direction(carry, gradient)
        return carry | {"params": params, STEP_COUNT_NAME: carry[STEP_COUNT_NAME] + 1}, loss
