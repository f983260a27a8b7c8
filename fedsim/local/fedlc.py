"""Logits calibrated by label frequencies: FedLC (Zhang et al., ICML 2022), balanced softmax (Ren 2020)."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.constraints import NonNegative, OneOf
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.heterogeneity import entry_of_client
from fedsim.data.samples import Batch, ClientData
from fedsim.local.rule import Carry, GradientStep, Objective
from fedsim.local.sgd import SGD
from fedsim.models import StatelessModel
from fedsim.models.losses import MARGIN_NAME, cross_entropy
from fedsim.shift import Shift

MARGIN_KINDS = ("fedlc", "balanced")
MarginKind = Annotated[str, OneOf(*MARGIN_KINDS)]
ABSENT_CLASS_COUNT = 1e-8  # assumed count of a class that a client does not have, as in FL-bench


class FedLC(SGD):
    """Steps of SGD on the cross-entropy of output_y − τ n_{i,y}^{−1/4}, n_{i,y} the client's training samples of y.

    Classes with few samples at a client are trained with a margin, so that its steps do not unlearn them. Models are
    evaluated without the margin. For a client with equally many samples of each class it is SGD.

    Args:
        tau: τ.
        margin: 'fedlc', or 'balanced' for balanced softmax, output_y + τ log n_{i,y}.
        **options: of SGD.
    """

    effective_if = (EffectiveIf("margin", lambda component, run: component.tau > 0, "{at}.tau above 0"),)

    def __init__(self, tau: NonNegative = 1.0, margin: MarginKind = "fedlc", **options: Any) -> None:
        super().__init__(**options)
        self.tau = tau
        self.margin = margin
        self.margins = torch.empty(0)

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        federation = data.federation
        if federation.class_fractions is None or model.loss is not cross_entropy:
            raise ConfigError(
                f"local={type(self).__name__.lower()} calibrates the scores of classes by how many samples of each a "
                f"client has, but dataset={data.dataset.name} with this loss has no classes; use local=sgd"
            )
        counts = federation.class_fractions.reshape(len(federation.num_samples), -1) * federation.num_samples[:, None]
        counts = np.maximum(counts, ABSENT_CLASS_COUNT)
        margins = counts**-0.25 if self.margin == "fedlc" else -np.log(counts)
        self.margins = torch.as_tensor(self.tau * margins, dtype=model.dtype).to(model.device)

    def descents(self) -> tuple[GradientStep, ...]:
        return ()

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        return super().step(carry, batch | {MARGIN_NAME: entry_of_client(self.margins, batch["row"])}, lr, objective)
