"""The objective that a local rule receives, for one client or, with its methods vmapped, for a whole chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedsim.data.samples import Batch
from fedsim.local.rule import Carry, LocalRule
from fedsim.trainer.objective import AutogradObjective, FunctionalObjective, Penalty, ShiftResponse

OBJECTIVE_METHODS = ("gradient", "value", "per_sample", "hessian_product", "mixed_outputs")


class BufferRecordingObjective:
    """An objective that records what each forward pass left in the columns of statistics.

    Args:
        inner_objective: `FunctionalObjective` or `AutogradObjective`.
        vectorise: makes a client's function one of a chunk, params [c, d] and batch [c, B, …]: vmap, or
            `vmap_by_loop`; None for a rule that steps one client.
    """

    def __init__(
        self,
        inner_objective: FunctionalObjective | AutogradObjective,
        vectorise: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
    ) -> None:
        self._recording_functions: dict[str, Callable[..., tuple[Tensor, ...]]] = {}
        for name in OBJECTIVE_METHODS:
            method = getattr(inner_objective, name)
            self._recording_functions[name] = method if vectorise is None else vectorise(method)
        self.model, self._gradient_through = inner_objective.model, inner_objective.gradient_through
        self._penalised, self.forward = inner_objective.penalised, inner_objective.forward
        self.renew_module = (
            inner_objective.renew_module if isinstance(inner_objective, AutogradObjective) else lambda: None
        )
        self.recorded_buffers: list[tuple[Tensor, Tensor]] = []

    def gradient(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        gradient, value, statistics = self._recording_functions["gradient"](params, batch)
        self._record_buffers((params, statistics))
        return gradient, value

    def value(self, params: Tensor, batch: Batch) -> Tensor:
        value, statistics = self._recording_functions["value"](params, batch)
        self._record_buffers((params, statistics))
        return value

    def gradient_through(self, params: Tensor, batch: Batch, shift_samples: ShiftResponse) -> tuple[Tensor, Tensor]:
        gradient, value, statistics = self._gradient_through(params, batch, shift_samples)
        self._record_buffers((params, statistics))
        return gradient, value

    def penalised(self, params: Tensor, batch: Batch, penalty: Penalty) -> tuple[Tensor, Tensor, Tensor]:
        gradient, value, features, statistics = self._penalised(params, batch, penalty)
        self._record_buffers((params, statistics))
        return gradient, value, features

    def per_sample(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        values, gradients, _ = self._recording_functions["per_sample"](params, batch)
        return values, gradients

    def hessian_product(self, params: Tensor, vector: Tensor, batch: Batch) -> Tensor:
        product, statistics = self._recording_functions["hessian_product"](params, vector, batch)
        self._record_buffers((params, statistics))
        return product

    def mixed_outputs(
        self, personal_params: Tensor, params: Tensor, alpha: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, slope, value, personal_statistics, global_statistics = self._recording_functions["mixed_outputs"](
            personal_params, params, alpha, batch
        )
        self._record_buffers((params, global_statistics), (personal_params, personal_statistics))
        return gradient, slope, value

    def _record_buffers(self, *forward_passes: tuple[Tensor, Tensor]) -> None:
        if self.model.statistics:
            self.recorded_buffers += forward_passes

    def step(self, local_rule: LocalRule, carry: Carry, batch: Batch, lr: Tensor) -> tuple[Carry, Tensor]:
        """Take the rule's step; the statistics of its models are carried along."""
        if not self.model.statistics:
            return local_rule.step(carry, batch, lr, self)
        self.recorded_buffers = []
        carry_after, loss = local_rule.step(carry, batch, lr, self)
        return self._carry_with_statistics(local_rule, carry, carry_after), loss

    def on_round_start(self, rule: LocalRule, carry: Carry, batch: Batch, lr: Tensor) -> Carry:
        """Call the rule's `on_round_start` before its first step; statistics are carried along."""
        if not self.model.statistics:
            return rule.on_round_start(carry, batch, lr, self)
        self.recorded_buffers = []
        return self._carry_with_statistics(rule, carry, rule.on_round_start(carry, batch, lr, self))

    def _carry_with_statistics(self, local_rule: LocalRule, carry_before: Carry, carry_after: Carry) -> Carry:
        """Return the carry with the statistics that the last forward pass of each of its models left.

        A pass belongs to the model it was taken at; one that was taken elsewhere (at a mixture, at an adapted point)
        to the models that have none of their own. A model that a step sets to 'params' is that model, statistics
        included.
        """
        models = {name: carry_before[name] for name in ("params", *local_rule.own_models)}
        other_descents = [
            columns for point, columns in self.recorded_buffers if not any(point is model for model in models.values())
        ]
        moved_statistics: Carry = {}
        for name, model in models.items():
            pass_statistics = [columns for point, columns in self.recorded_buffers if point is model] or other_descents
            statistics = pass_statistics[-1] if pass_statistics else model[..., self.model.trained :]
            moved_statistics[name] = torch.cat([carry_after[name][..., : self.model.trained], statistics], -1)
        copies = [name for name in local_rule.own_models if carry_after[name] is carry_after["params"]]
        return carry_after | moved_statistics | dict.fromkeys(copies, moved_statistics["params"])
