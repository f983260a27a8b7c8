"""FedRoD: a personal head in addition to the global model, which is trained with balanced softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.core.constraints import NonNegative, Positive
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.samples import Batch, ClientData
from fedsim.local.apfl import personal_rate_ratio
from fedsim.local.fedlc import FedLC, MarginKind
from fedsim.local.rule import Carry, Objective
from fedsim.models import StatelessModel
from fedsim.models.selectors import columns_of_last_layers
from fedsim.shift import Shift

PERSONAL_HEAD_NAME = "head"


class FedRoD(FedLC):
    """Steps of FedLC with balanced softmax, each with a step p ← p − η_p ∇_p f, where f is the cross-entropy of the sum
    of the outputs of two heads on one body (Chen and Chao, ICLR 2022): the global head, which is shared, and the
    personal head p. Body and global head are not trained on f and do not depend on p.

    The head is the last layer. It must be linear in its parameters, so that the sum of the outputs of two heads is the
    output of a head with the summed parameters; other heads raise an error. p starts at zero: a client that has not
    participated predicts with the global model. Memory: one head per client, stored between rounds.

    Args:
        tau, margin: see `FedLC`.
        personal_lr: η_p, with the same schedule; None: η.
        **options: of SGD; clip and weight_decay act on p too. A ridge is then that of the summed heads.
    """

    def __init__(
        self,
        tau: NonNegative = 1.0,
        margin: MarginKind = "balanced",
        personal_lr: Positive | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tau, margin, **options)
        self.ratio = personal_rate_ratio(personal_lr, self.rates)
        self.head = torch.empty(0, dtype=torch.int64)

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        super().setup(data, shift, model)
        self.head = columns_of_last_layers(model.shapes, 1).to(model.device)
        row, inputs = model.initial([0])[0], model.call.inputs(data.two_samples(model.dtype))
        angle = torch.arange(len(self.head), device=row.device).to(row.dtype)
        head_weights = angle.sin(), angle.cos(), angle.sin() + angle.cos()
        first_output, second_output, sum_output = (
            model.evaluate(row.index_copy(0, self.head, head), inputs) for head in head_weights
        )
        if not torch.allclose(first_output + second_output, sum_output, rtol=1e-4, atol=1e-4):
            raise ConfigError(
                f"local=fedrod adds the outputs of two heads, but those of {type(model.training_module).__name__} are "
                "not linear in its last layer; use a model that ends with one"
            )

    def memory(self, federation: Federation, dimension: int) -> Carry:
        return {PERSONAL_HEAD_NAME: federation.zeros(len(self.head))}

    def personal(self, carry: Carry) -> list[tuple[Tensor, Tensor]]:
        return [(carry["params"].new_ones(()), self.model_with_summed_heads(carry))]

    def model_with_summed_heads(self, carry: Carry) -> Tensor:
        """[d] the body under both heads."""
        return carry["params"].index_add(0, self.head, carry[PERSONAL_HEAD_NAME])

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        gradient, _ = objective.gradient(self.model_with_summed_heads(carry), batch)
        personal_head = self.descend({"params": carry[PERSONAL_HEAD_NAME]}, gradient[self.head], lr * self.ratio)
        carry, loss = super().step(carry, batch, lr, objective)
        return carry | {PERSONAL_HEAD_NAME: personal_head}, loss
