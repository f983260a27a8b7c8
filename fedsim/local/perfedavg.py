"""Per-FedAvg: learns an initial model from which one gradient step gives a good personal model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import Count, Positive
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.data.samples import Batch
from fedsim.local.rule import Carry, LocalRule, Objective
from fedsim.local.sgd import SGD


class PerFedAvg(SGD):
    """Model-agnostic meta-learning on the client (Fallah et al. 2020): x ← x − β ∇f(x − α ∇f(x; b₁); b₂).

    A step draws one batch of twice the size and halves it: b₁ is every other sample, b₂ the rest, so that they are
    disjoint within an epoch (a batch of one sample is used for both). Under a shift both react to x. β is `lr`. The
    first-order version omits the factor I − α ∇²f(x; b₁). Fallah et al. draw a third batch for the Hessian; here it is
    computed on b₁, so that the step is the exact gradient of f(x − α ∇f(x; b₁); b₂). The personal model is
    `adapt_steps` steps of SGD with rate α from x.

    Args:
        inner_lr: α, without a schedule.
        second_order: multiply by I − α ∇²f(x; b₁), which costs about two gradients more.
        keep_inner: also apply the inner step, x ← x' − β ∇f(x'; b₂) at x' = x − α ∇f(x; b₁), as in the program of
            APFL's authors; the client's own model is then the fine-tuned one.
        adapt_steps: steps from x to the personal model.
        batch_size: size of b₁ and of b₂; None: half of the client's samples each.
        **options: of SGD.
    """

    effective_if = (
        EffectiveIf(
            "adapt_steps",
            lambda component, run: run.has_personal_evaluation,
            "personal.over=all, online or honest, or personal.newcomers",
        ),
    )

    def __init__(
        self,
        inner_lr: Positive = 0.01,
        second_order: bool = False,
        keep_inner: bool = False,
        adapt_steps: Count = 1,
        batch_size: Count | None = 32,
        **options: Any,
    ) -> None:
        super().__init__(batch_size=None if batch_size is None else 2 * batch_size, **options)
        self.inner_lr = inner_lr
        self.second_order, self.keep_inner = second_order, keep_inner
        if second_order and keep_inner:
            raise ConfigError(
                "{keep_inner}=true has no second order; set {second_order}=false",
                mentions=("keep_inner", "second_order"),
            )
        self.adapt_steps, self.adapt_size = adapt_steps, batch_size

    def adaptation_rule(self) -> LocalRule | None:
        if self.keep_inner:
            return None
        return SGD(lr=self.inner_lr, steps=self.adapt_steps, batch_size=self.adapt_size, sampling=self.work.sampling)

    def gradient_weight(self, step: int) -> float | None:
        return None if self.keep_inner else 1.0

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        params = carry["params"]
        inner_batch, outer_batch = split_into_batches(batch, 2)
        slope, loss = objective.gradient(params, inner_batch)
        adapted = params - self.inner_lr * slope
        gradient, _ = objective.gradient(adapted, outer_batch)
        if self.keep_inner:
            carry = carry | {"params": adapted}
        if self.second_order:
            gradient = gradient - self.inner_lr * objective.hessian_product(params, gradient, inner_batch)
        return self.updated(carry, gradient, lr), loss


def split_into_batches(batch: Batch, num_batches: int) -> list[Batch]:
    """One client's batch dealt out, sample j of it to part j mod `num_batches`; a part that gets none is the first
    part.

    Every part draws dropout masks of its own.
    """
    first_batch, *remaining_batches = (
        {k: v[start::num_batches] if v.dim() else v for k, v in batch.items()} for start in range(num_batches)
    )
    batch_parts = [first_batch]
    for batch_number, sub_batch in enumerate(remaining_batches, 1):
        if not len(sub_batch["x"]):
            batch_parts.append(first_batch)
            continue
        if "weight" in sub_batch:
            is_empty = sub_batch["weight"].sum() == 0
            sub_batch |= {
                k: torch.where(is_empty, first_batch[k][: len(v)], v) for k, v in sub_batch.items() if v.dim()
            }
        if "key" in batch:
            sub_batch |= {"key": rng.fold_in(batch["key"], batch_number)}
        batch_parts.append(sub_batch)
    return batch_parts
