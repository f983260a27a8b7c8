"""Stochastic gradient descent, the local rule of most papers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.core.constraints import NonNegative, Positive
from fedsim.data.samples import Batch
from fedsim.local.rule import Carry, GradientStep, LocalRule, Objective


class SGD(LocalRule):
    """x ← x − η (g + λx), with g clipped to norm `clip` first; a 'correction' [d] in the carry is added
    to g, and so is 'proximal' · (x − 'anchor'). A 'scale' [] in the carry multiplies the step; a 'gradient' [d] becomes
    the g + λx of the last step.

    Args:
        weight_decay: λ.
        clip: maximal Euclidean norm of a step's gradient (of the mean loss over the batch); None: no clipping.
        **options: of every local rule.
    """

    supported_keys = frozenset({"correction", "proximal", "anchor", "scale", "gradient"})

    def __init__(self, weight_decay: NonNegative = 0.0, clip: Positive | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.weight_decay = weight_decay
        self.clip = clip

    def gradient_weight(self, step: int) -> float | None:
        return 1.0

    def descents(self) -> tuple[GradientStep, ...]:
        # only of this class: a subclass defines its own step
        return (GradientStep(decay=self.weight_decay),) if type(self) is SGD and self.clip is None else ()

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        gradient, loss = objective.gradient(carry["params"], batch)
        return self.updated(carry, gradient, lr), loss

    def updated(self, carry: Carry, gradient: Tensor, lr: Tensor) -> Carry:
        """The carry after a step along the gradient of the mean loss, which it notes if it is asked to."""
        noted_gradient = (
            {"gradient": self.direction({"params": carry["params"]}, gradient)} if "gradient" in carry else {}
        )
        return carry | {"params": self.descend(carry, gradient, lr)} | noted_gradient

    def descend(self, carry: Carry, gradient: Tensor, lr: Tensor) -> Tensor:
        """The new parameters from the gradient of the mean loss: [d] with lr [], or a chunk's [c, d] with lr [c, 1]."""
        return torch.addcmul(carry["params"], lr, self.direction(carry, gradient), value=-1)

    def direction(self, carry: Carry, gradient: Tensor) -> Tensor:
        """What is stepped along: the gradient of the mean loss, clipped, and whatever else there is."""
        params = carry["params"]
        if self.clip is not None:
            gradient = gradient * (self.clip / (gradient.norm(dim=-1, keepdim=True) + 1e-12)).clamp(max=1.0)
        if "correction" in carry:
            gradient = gradient + carry["correction"]
        if "proximal" in carry:
            mu = carry["proximal"]  # one number for the row, or one for each column
            mu = mu if mu.dim() == params.dim() else mu[..., None]
            gradient = gradient + mu * (params - carry["anchor"])
        if self.weight_decay:
            gradient = gradient + self.weight_decay * params
        if "scale" in carry:
            scale = carry["scale"]
            gradient = (scale if scale.dim() == params.dim() else scale[..., None]) * gradient
        return gradient
