"""FedNTD: local training keeps the global model's scores of the classes that are not a sample's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.core.constraints import NonNegative, Positive
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.data.samples import Batch, ClientData
from fedsim.local.penalised import RECEIVED_MODEL_KEY, PenalisedSGD, require_classes
from fedsim.local.rule import Carry, Objective
from fedsim.models import StatelessModel
from fedsim.models.features import ForwardPass
from fedsim.models.losses import cross_entropy
from fedsim.shift import Shift

TEACHER_OUTPUT = "teacher's output"


class FedNTD(PenalisedSGD):
    """Steps of SGD on f(x) + β · mean_b KL(q̃_g ‖ q̃), where q̃ is the softmax of output/τ over the classes other than
    the sample's own, and q̃_g that under the model which the client received in this round (Lee et al., NeurIPS 2022,
    Eq. 3–5: not-true distillation).

    As in the authors' program (algorithms/fedntd/criterion.py), the divergence is not multiplied by τ². q̃_g is computed
    as in evaluation: without dropout, with running statistics. β = 0 is SGD. A step costs a gradient and an evaluation.

    Args:
        beta: β.
        temperature: τ.
        **options: of SGD; clip acts on the gradient of the sum.
    """

    effective_if = (
        EffectiveIf("temperature", lambda component, run: component.penalty_weight > 0, "{at}.beta above 0"),
    )

    uses_features = False

    def __init__(self, beta: NonNegative = 1.0, temperature: Positive = 1.0, **options: Any) -> None:
        super().__init__(beta, **options)
        self.temperature = temperature

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        super().setup(data, shift, model)
        require_classes("fedntd", "distils the scores of the classes that are not a sample's own", data)
        if model.loss is not cross_entropy:
            raise ConfigError(
                "local=fedntd distils scores of classes, for model.loss=cross_entropy alone; use local=sgd"
            )

    def round_state(self, params: Tensor) -> Carry:
        return {RECEIVED_MODEL_KEY: params.clone()}

    def penalty_context(self, carry: Carry, batch: Batch, objective: Objective) -> Carry:
        return {TEACHER_OUTPUT: objective.forward(carry[RECEIVED_MODEL_KEY], batch).output}

    def penalty(self, forward: ForwardPass, context: Carry, batch: Batch) -> Tensor:
        return not_true_divergence(
            forward.output / self.temperature, context[TEACHER_OUTPUT] / self.temperature, batch["y"]
        )


def not_true_divergence(student_output: Tensor, teacher_output: Tensor, labels: Tensor) -> Tensor:
    """Scores [B, C] of a model and its teacher, labels [B] → [B] KL(teacher ‖ model) without the label's class."""
    is_true_label = labels[:, None] == torch.arange(student_output.shape[1], device=student_output.device)

    def not_true_log_probabilities(scores: Tensor) -> Tensor:
        return scores - scores.masked_fill(is_true_label, -torch.inf).logsumexp(1, keepdim=True)

    log_teacher = not_true_log_probabilities(teacher_output)
    probabilities = torch.where(is_true_label, 0.0, log_teacher.exp())
    return (probabilities * (log_teacher - not_true_log_probabilities(student_output))).sum(1)
