"""The objective that a local rule meets, for one client or, where its methods are lifted, for a whole chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedsim.data.samples import Batch
from fedsim.local.rule import Carry, LocalRule
from fedsim.trainer.objective import FunctionalObjective, PlainObjective, ShiftResponse

OBJECTIVE_METHODS = ("gradient", "value", "per_sample", "hessian_product", "mixed_outputs")


class BufferRecordingObjective:
    """The objective that a rule meets: it keeps what each forward pass left in the columns of statistics.

    Args:
        inner: `FunctionalObjective` or `PlainObjective`.
        lift: makes a client's function one of a chunk, params [c, d] and batch [c, B, …]: vmap, or
            `loop_over_rows`; None for a rule that steps one client.
    """

    def __init__(
        self,
        inner: FunctionalObjective | PlainObjective,
        lift: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
    ) -> None:
        self._functions: dict[str, Callable[..., tuple[Tensor, ...]]] = {}
        for name in OBJECTIVE_METHODS:
            method = getattr(inner, name)
            self._functions[name] = method if lift is None else lift(method)
        self.model, self._gradient_through = inner.model, inner.gradient_through
        self.renew = inner.renew if isinstance(inner, PlainObjective) else lambda: None
        self.recorded: list[tuple[Tensor, Tensor]] = []

    def gradient(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        gradient, value, statistics = self._functions["gradient"](params, batch)
        self._record_buffers((params, statistics))
        return gradient, value

    def value(self, params: Tensor, batch: Batch) -> Tensor:
        value, statistics = self._functions["value"](params, batch)
        self._record_buffers((params, statistics))
        return value

    def gradient_through(self, params: Tensor, batch: Batch, answer: ShiftResponse) -> tuple[Tensor, Tensor]:
        gradient, value, statistics = self._gradient_through(params, batch, answer)
        self._record_buffers((params, statistics))
        return gradient, value

    def per_sample(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        values, gradients, _ = self._functions["per_sample"](params, batch)
        return values, gradients

    def hessian_product(self, params: Tensor, vector: Tensor, batch: Batch) -> Tensor:
        product, statistics = self._functions["hessian_product"](params, vector, batch)
        self._record_buffers((params, statistics))
        return product

    def mixed_outputs(
        self, personal: Tensor, params: Tensor, alpha: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, slope, value, personal_statistics, global_statistics = self._functions["mixed_outputs"](
            personal, params, alpha, batch
        )
        self._record_buffers((params, global_statistics), (personal, personal_statistics))
        return gradient, slope, value

    def _record_buffers(self, *passes: tuple[Tensor, Tensor]) -> None:
        if self.model.statistics:
            self.recorded += passes

    def step(self, rule: LocalRule, carry: Carry, batch: Batch, lr: Tensor) -> tuple[Carry, Tensor]:
        """The rule's step; its models' statistics are carried along."""
        if not self.model.statistics:
            return rule.step(carry, batch, lr, self)
        self.recorded = []
        after, loss = rule.step(carry, batch, lr, self)
        return self._carry_statistics(rule, carry, after), loss

    def on_round_start(self, rule: LocalRule, carry: Carry, batch: Batch, lr: Tensor) -> Carry:
        """What the rule does before its first step, likewise."""
        if not self.model.statistics:
            return rule.on_round_start(carry, batch, lr, self)
        self.recorded = []
        return self._carry_statistics(rule, carry, rule.on_round_start(carry, batch, lr, self))

    def _carry_statistics(self, rule: LocalRule, before: Carry, after: Carry) -> Carry:
        """The carry with the statistics that the last forward pass of each of its models left.

        A pass belongs to the model it was taken at; one that was taken elsewhere (at a mixture, at an adapted point)
        to the models that have none of their own.
        """
        models = {name: before[name] for name in ("params", *rule.own_models)}
        other_descents = [
            columns for point, columns in self.recorded if not any(point is model for model in models.values())
        ]
        for name, model in models.items():
            pass_statistics = [columns for point, columns in self.recorded if point is model] or other_descents
            statistics = pass_statistics[-1] if pass_statistics else model[..., self.model.trained :]
            after = after | {name: torch.cat([after[name][..., : self.model.trained], statistics], -1)}
        return after
