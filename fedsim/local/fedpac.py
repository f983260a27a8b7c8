"""FedPAC's local steps: the last layer first, then the others, whose features are pulled towards prototypes."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from fedsim.core.constraints import CountOrZero, NonNegative, OneOf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.samples import Batch, ClientData
from fedsim.local.fedproto import AVERAGE_KINDS, FedProto
from fedsim.local.fedrep import STEP_COUNT_NAME
from fedsim.local.rule import Carry, Objective
from fedsim.models import StatelessModel
from fedsim.models.selectors import columns_of_last_layers
from fedsim.shift import Shift

SQUARED_NORMS = "sum of squared norms"  # of the features of a client's last round


class FedPAC(FedProto):
    """The first steps of a round train the last layer, on f(x); the others train the layers before it, on f(x) + λ ·
    mean_b ‖z − P_y‖² / k as in local=fedproto (Xu, Tong and Huang, ICLR 2023).

    With strategy=fedpac clients receive combined last layers; the statistics that it needs are the sums of
    local=fedproto, and the sum of ‖z‖² over the samples of the round, one more number per client.

    Args:
        lam: λ.
        head_steps: number of the round's local steps that train the last layer.
        average, features, **options: see `FedProto`.
    """

    supported_keys = FedProto.supported_keys - {"gradient"}
    indivisible = True  # a client that stops while training the last layer has not trained the others

    def __init__(
        self,
        lam: NonNegative = 1.0,
        head_steps: CountOrZero = 1,
        average: Annotated[str, OneOf(*AVERAGE_KINDS)] = "samples",
        features: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(lam, average, features, **options)
        self.head_steps = head_steps
        if self.work.steps is not None and self.head_steps >= self.work.steps:
            raise ConfigError(
                f"{{head_steps}}={head_steps} leaves none of local_steps={self.work.steps} for the layers before the "
                "last one; raise local_steps",
                mentions=("head_steps",),
            )
        self.head = torch.empty(0)

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        super().setup(data, shift, model)
        self.head = torch.zeros(model.dimension, dtype=model.dtype, device=model.device)
        self.head[columns_of_last_layers(model.shapes, 1)] = 1.0

    def gradient_weight(self, step: int) -> float | None:
        return None

    def memory(self, federation: Federation, dimension: int) -> dict[str, Tensor]:
        return super().memory(federation, dimension) | {SQUARED_NORMS: federation.zeros()}

    def extra_transmitted_numbers(self, dimension: int) -> tuple[int, int]:
        down, up = super().extra_transmitted_numbers(dimension)
        return down, up + 1

    def round_state(self, params: Tensor) -> Carry:
        return {STEP_COUNT_NAME: params.new_zeros(len(params))}

    def on_round_start(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> Carry:
        carry = super().on_round_start(carry, batch, lr, objective)
        return carry | {SQUARED_NORMS: torch.zeros_like(carry[SQUARED_NORMS])}

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        gradient, loss, features = self.penalised_gradient(carry, batch, objective)
        trained = torch.where(carry[STEP_COUNT_NAME] < self.head_steps, self.head, 1 - self.head)
        params = carry["params"] - lr * trained * self.direction(carry, gradient)
        statistics = self.class_statistics(carry, batch, features)
        return carry | statistics | {"params": params, STEP_COUNT_NAME: carry[STEP_COUNT_NAME] + 1}, loss

    def class_statistics(self, carry: Carry, batch: Batch, features: Tensor) -> Carry:
        squared = features.square().sum(1)
        squared = squared * batch["weight"] if "weight" in batch else squared
        return super().class_statistics(carry, batch, features) | {SQUARED_NORMS: carry[SQUARED_NORMS] + squared.sum()}
