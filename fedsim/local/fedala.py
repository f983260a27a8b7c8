"""FedALA: local training starts from a learnt elementwise mixture of the client's last model and the global one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.core.constraints import Count, CountOrZero, Fraction, NonNegative
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.samples import Batch, ClientData
from fedsim.local.ditto import RECEIVED_MODEL_NAME
from fedsim.local.fedrep import STEP_COUNT_NAME
from fedsim.local.rule import Carry, Objective
from fedsim.local.sgd import SGD
from fedsim.models import StatelessModel
from fedsim.models.selectors import columns_of_last_layers
from fedsim.shift import Shift

MIXING_MEMORY_NAME = "mixing"


class FedALA(SGD):
    """In its last layers a client starts from v + (x^t − v) ⊙ W, v its model at the end of its last round; in the
    others from x^t. The first steps of a round update W ← clip(W − η_W ∇f ⊙ (x^t − v), 0, 1) and thereby the starting
    point, the others train the model (Zhang et al., AAAI 2023). The personal model is the starting point.

    In the paper W is learnt on a fraction of the client's data, the first time until the loss converges; here on the
    batches of the first steps of every round. With W fixed at 1 it is FedAvg, at 0 FedPer. Memory: a model and W per
    client.

    Args:
        layers: number of last layers that are mixed, of those with parameters.
        mixing_steps: number of the round's local steps that update W.
        mixing_lr: η_W.
        mixing: initial W.
        **options: of SGD.
    """

    effective_if = (
        EffectiveIf("mixing_lr", lambda component, run: component.mixing_steps > 0, "{at}.mixing_steps above 0"),
    )

    own_models = ("personal",)
    indivisible = True  # a client that stops while learning weights has trained nothing
    supported_keys = frozenset({"proximal", "anchor", "scale"})  # a round's update is not a sum of gradients

    def __init__(
        self,
        layers: Count = 1,
        mixing_steps: CountOrZero = 1,
        mixing_lr: NonNegative = 1.0,
        mixing: Fraction = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.layers = layers
        self.mixing_steps = mixing_steps
        self.mixing_lr = mixing_lr
        self.mixing = mixing
        if self.work.steps is not None and self.mixing_steps >= self.work.steps:
            raise ConfigError(
                f"{{mixing_steps}}={mixing_steps} leaves none of local_steps={self.work.steps} to train; raise "
                "local_steps",
                mentions=("mixing_steps",),
            )
        self.last_layer_columns = torch.empty(0, dtype=torch.int64)

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        self.last_layer_columns = columns_of_last_layers(model.shapes, self.layers).to(model.device)

    def gradient_weight(self, step: int) -> float | None:
        return None

    def memory(self, federation: Federation, dimension: int) -> Carry:
        initial_mixing = torch.full(
            (federation.num_replicates, len(self.last_layer_columns)), self.mixing, dtype=federation.dtype
        )
        return {MIXING_MEMORY_NAME: federation.broadcast(initial_mixing.to(federation.device))}

    def round_state(self, params: Tensor) -> Carry:
        return {
            RECEIVED_MODEL_NAME: params[:, self.last_layer_columns].clone(),
            STEP_COUNT_NAME: params.new_zeros(len(params)),
        }

    def personal(self, carry: Carry) -> list[tuple[Tensor, Tensor]]:
        row = self.mix_last_layers(carry, carry["params"][self.last_layer_columns], carry[MIXING_MEMORY_NAME])
        return [(row.new_ones(()), row)]

    def mix_last_layers(self, carry: Carry, received: Tensor, mixing: Tensor) -> Tensor:
        """[d] the row with last layers between the client's own and those received."""
        return carry["params"].index_copy(
            0, self.last_layer_columns, torch.lerp(carry["personal"][self.last_layer_columns], received, mixing)
        )

    def on_round_start(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> Carry:
        return carry | {"params": self.mix_last_layers(carry, carry[RECEIVED_MODEL_NAME], carry[MIXING_MEMORY_NAME])}

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        gradient, loss = objective.gradient(carry["params"], batch)
        is_mixing_step, received_model = carry[STEP_COUNT_NAME] < self.mixing_steps, carry[RECEIVED_MODEL_NAME]
        slope = gradient[self.last_layer_columns] * (received_model - carry["personal"][self.last_layer_columns])
        mixing_weights = torch.where(
            is_mixing_step,
            (carry[MIXING_MEMORY_NAME] - self.mixing_lr * slope).clamp(0.0, 1.0),
            carry[MIXING_MEMORY_NAME],
        )
        trained = self.descend(carry, gradient, lr)
        params = torch.where(is_mixing_step, self.mix_last_layers(carry, received_model, mixing_weights), trained)
        personal = torch.where(is_mixing_step, carry["personal"], trained)
        return carry | {
            "params": params,
            "personal": personal,
            MIXING_MEMORY_NAME: mixing_weights,
            STEP_COUNT_NAME: carry[STEP_COUNT_NAME] + 1,
        }, loss
