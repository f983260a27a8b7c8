"""FedProto: clients share the mean features of each class, their prototypes, instead of parameters."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from fedsim.core.constraints import NonNegative, OneOf
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Cohort, Federation
from fedsim.data.samples import Batch, ClientData
from fedsim.local.penalised import PenalisedSGD, require_classes
from fedsim.local.rule import Carry, Objective
from fedsim.models import StatelessModel
from fedsim.models.features import ForwardPass
from fedsim.shift import Shift

CLASS_SUMS, CLASS_COUNTS = "class sums", "class counts"  # of the features of a client's last round
PROTOTYPES, HAS_PROTOTYPE = "prototypes", "has prototype"
AVERAGE_KINDS = ("samples", "clients")


class FedProto(PenalisedSGD):
    """Steps of SGD on f(x) + λ · mean_b ‖z − P_y‖² / k, where z are a sample's features, k their number, and P_y is the
    prototype of its class y (Tan et al., AAAI 2022, Alg. 1). A class without a prototype has no penalty.

    Client i sends for each class c the mean of the features of the samples that it trained on in this round, each at
    the model before the step on it, and their number n_{i,c}; P_c becomes the mean over the clients of the round that
    have class c. A class that none of them has keeps its prototype. With one local epoch these means are those of the
    authors' program (lib/update.py), which takes the last epoch's; its penalty is the same. In the paper no parameters
    travel: choose strategy=local_only, and personal.over=all for the clients' models, which predict by their last layer
    (the program also reports predictions by the nearest prototype). With strategy=fedavg the model is averaged too.
    λ = 0 is SGD. A strategy reads the sums [n, C, k] and numbers [n, C] by `report.client_memory('class sums')` and
    `'class counts'`. Memory: 2 C (k + 1) numbers per client.

    Args:
        lam: λ.
        average: 'samples': the mean over clients is weighted by n_{i,c}, as in the paper's Eq. 6; 'clients': it is not,
            as in the program.
        features, **options: see `PenalisedSGD`.
    """

    effective_if = (EffectiveIf("average", lambda component, run: component.penalty_weight > 0, "{at}.lam above 0"),)

    classes: int

    def __init__(
        self,
        lam: NonNegative = 1.0,
        average: Annotated[str, OneOf(*AVERAGE_KINDS)] = "samples",
        features: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(lam, features, **options)
        self.average = average

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        super().setup(data, shift, model)
        self.classes = require_classes(type(self).__name__.lower(), "averages the features of each class", data)

    def memory(self, federation: Federation, dimension: int) -> dict[str, Tensor]:
        sums, counts = (self.classes, self.num_features), (self.classes,)
        shapes = {CLASS_SUMS: sums, CLASS_COUNTS: counts, PROTOTYPES: sums, HAS_PROTOTYPE: counts}
        return {name: federation.zeros(*shape) for name, shape in shapes.items()}

    def extra_transmitted_numbers(self, dimension: int) -> tuple[int, int]:
        prototypes = self.classes * self.num_features
        return prototypes, prototypes + self.classes

    def on_round_start(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> Carry:
        return carry | {name: torch.zeros_like(carry[name]) for name in (CLASS_SUMS, CLASS_COUNTS)}

    def penalty_context(self, carry: Carry, batch: Batch, objective: Objective) -> Carry:
        return {name: carry[name] for name in (PROTOTYPES, HAS_PROTOTYPE)}

    def penalty(self, forward: ForwardPass, context: Carry, batch: Batch) -> Tensor:
        labels = batch["y"]
        squared = (forward.features - context[PROTOTYPES][labels]).square().mean(1)
        return context[HAS_PROTOTYPE][labels] * squared

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        gradient, loss, features = self.penalised_gradient(carry, batch, objective)
        return self.updated(carry, gradient, lr) | self.class_statistics(carry, batch, features), loss

    def class_statistics(self, carry: Carry, batch: Batch, features: Tensor) -> Carry:
        """What the client notes of its features in this round, after a batch with these features [B, k]."""
        of_class = (batch["y"][:, None] == torch.arange(self.classes, device=features.device)).to(features.dtype)
        if "weight" in batch:
            of_class = of_class * batch["weight"][:, None]
        return {
            CLASS_SUMS: carry[CLASS_SUMS] + of_class.T @ features,
            CLASS_COUNTS: carry[CLASS_COUNTS] + of_class.sum(0),
        }

    def after_round(self, memory: dict[str, Tensor], cohort: Cohort) -> None:
        sums, counts = cohort.gather(memory[CLASS_SUMS]), cohort.gather(memory[CLASS_COUNTS])
        weights = counts if self.average == "samples" else (counts > 0).to(counts.dtype)
        class_weights = cohort.sum(weights)  # [R, C]
        class_means = sums / torch.where(counts > 0, counts, 1.0)[..., None]
        prototypes = (
            cohort.sum(weights[..., None] * class_means) / torch.where(class_weights > 0, class_weights, 1.0)[..., None]
        )
        for name, value in ((PROTOTYPES, prototypes), (HAS_PROTOTYPE, torch.ones_like(class_weights))):
            prototypes_of_clients = memory[name].unflatten(0, (len(class_weights), -1))
            has_new_prototype = (
                (class_weights > 0)
                .reshape(*class_weights.shape, *[1] * (value.dim() - 2))
                .to(prototypes_of_clients.device)[:, None]
            )
            prototypes_of_clients.copy_(
                torch.where(has_new_prototype, value.to(prototypes_of_clients.device)[:, None], prototypes_of_clients)
            )
