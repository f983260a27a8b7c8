"""Optimiser steps of several rows, taken in place: SGD, momentum, Adam.

A row's step is what `fedsim.local.rule.Descent` tells. The product of which a weight's gradient is made, dYᵀX, is added
to the weight itself, or to its velocity, and never stored; Adam, which needs its square, stores one parameter's at a
time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedsim.local.rule import AdamMoments, HeavyBall


def broadcastable_to_rows(numbers: Tensor, rows: Tensor) -> Tensor:
    """Return [c'] as [c', 1, …], to be combined with rows [c, …]."""
    return numbers.view(-1, *[1] * (rows.dim() - 1))


@dataclass(frozen=True)
class PendingStep:
    """A step of the first c' rows that has not been taken yet.

    Attributes:
        learning_rates: [c'] η.
        weight_decay: [c'] λ of a decay that is part of the gradient, or None.
        weight_decay_factor: [c'] 1 − ηλ of one that is not, or None.
        update_counts: [c'] steps the rows will have taken, this one included, where that matters.
    """

    learning_rates: Tensor
    weight_decay: Tensor | None = None
    weight_decay_factor: Tensor | None = None
    update_counts: Tensor | None = None


NO_PENDING_STEP = PendingStep(torch.empty(0))


@dataclass
class ParameterRows:
    """Rows of some parameters: lists in the same order, [c, …] each.

    Attributes:
        parameters: the parameters.
        gradient_terms: what is added to their gradients; empty where nothing is.
        optimiser_state: what is remembered of each, by name.
    """

    parameters: list[Tensor] = field(default_factory=list)
    gradient_terms: list[Tensor] = field(default_factory=list)
    optimiser_state: dict[str, list[Tensor]] = field(default_factory=dict)

    def map_views(self, view_of: Callable[[Tensor], Tensor]) -> ParameterRows:
        """Return views of all."""
        state = {name: list(map(view_of, rows)) for name, rows in self.optimiser_state.items()}
        return ParameterRows(list(map(view_of, self.parameters)), list(map(view_of, self.gradient_terms)), state)


class InPlaceStep(ABC):
    """Parameters of c rows. Each step that `begin` announces is taken once, also if no sample uses the parameters.

    Attributes:
        scales_by_rate: gradients come multiplied by the negative of their rows' rates already, which is done once for
            all parameters where the backward pass begins.
    """

    scales_by_rate = False

    def __init__(self) -> None:
        self.rows, self.pending_step = ParameterRows(), NO_PENDING_STEP
        self._is_applied, self._ones_buffer = True, torch.empty(0)

    def load(self, rows: ParameterRows) -> None:
        """Load parameters of some rows."""
        self.rows = rows

    def begin(self, step: PendingStep) -> None:
        """Announce a step of the first rows."""
        self.pending_step, self._is_applied = step, False

    def take_pending_step(self) -> None:
        """Take the step if it has not been taken, because no sample used the parameters."""
        if not self._is_applied:
            self.descend([None] * len(self.rows.parameters))

    def descend(self, gradients: list[Tensor | None]) -> None:
        """Take the step by the gradients [c', …] of the parameters, which may be overwritten; None if no sample
        used them."""
        for index, gradient in enumerate(gradients):
            self._step(index, gradient)
        self._is_applied = True

    def step_linear_layer(self, outputs: Tensor, inputs: Tensor) -> None:
        """That of a linear layer's weight [c, out, in], and its bias [c, 1, out] if it has one, by the gradients of its
        outputs [c', N, out] and its inputs [c', N, in]; where these are of a lower precision, so is their product, but
        not the step."""
        kind = self.rows.parameters[0].dtype
        bias = [outputs.sum(1, keepdim=True, dtype=kind)] if len(self.rows.parameters) > 1 else []
        self.descend([torch.bmm(outputs.mT, inputs).to(kind), *bias])

    @abstractmethod
    def _step(self, parameter_index: int, gradient: Tensor | None) -> None:
        """Take the step of one of the parameters."""

    def _active_rows(self, rows: list[Tensor], index: int) -> Tensor:
        """Return the rows of a parameter that take the step."""
        return rows[index][: len(self.pending_step.learning_rates)]

    def _ones_per_sample(self, outputs: Tensor) -> Tensor:
        """Return [c', 1, N] of ones, whose product with outputs [c', N, out] is their sum over the samples."""
        shape = (len(outputs), 1, outputs.shape[1])
        if self._ones_buffer.shape != shape or self._ones_buffer.dtype != outputs.dtype:
            self._ones_buffer = outputs.new_ones(shape)
        return self._ones_buffer

    def _gradient_term(self, index: int) -> Tensor | None:
        return self._active_rows(self.rows.gradient_terms, index) if self.rows.gradient_terms else None


class PlainStep(InPlaceStep):
    """x ← (1 − ηλ) x − η (drift + gradient); λ is in `PendingStep.weight_decay_factor`, and −η gradient is what
    comes."""

    scales_by_rate = True

    def _apply_sample_free_terms(self, parameter_index: int) -> Tensor:
        """Return the parameter after the terms that do not depend on the samples."""
        parameter, drift, step = (
            self._active_rows(self.rows.parameters, parameter_index),
            self._gradient_term(parameter_index),
            self.pending_step,
        )
        if step.weight_decay_factor is not None:
            parameter.mul_(broadcastable_to_rows(step.weight_decay_factor, parameter))
        return (
            parameter
            if drift is None
            else parameter.addcmul_(drift, broadcastable_to_rows(step.learning_rates, parameter), value=-1)
        )

    def _step(self, parameter_index: int, gradient: Tensor | None) -> None:
        parameter = self._apply_sample_free_terms(parameter_index)
        if gradient is not None:
            parameter.add_(gradient)

    def step_linear_layer(self, outputs: Tensor, inputs: Tensor) -> None:
        if outputs.dtype != self.rows.parameters[0].dtype:
            super().step_linear_layer(outputs, inputs)
            return
        self._apply_sample_free_terms(0).baddbmm_(outputs.mT, inputs)
        if len(self.rows.parameters) > 1:
            self._apply_sample_free_terms(1).baddbmm_(self._ones_per_sample(outputs), outputs)
        self._is_applied = True


class MomentumStep(InPlaceStep):
    """v ← μ v + g, g = gradient + drift + λx; x ← x − η v, or x − η (g + μ v) with `nesterov`.

    With the velocity from before the step the latter is x + ημ v, and then − η (1 + μ) (μ v + g): g itself is needed
    nowhere.
    """

    def __init__(self, settings: HeavyBall) -> None:
        super().__init__()
        self.momentum, self.nesterov = settings.momentum, settings.nesterov

    def _combine_velocity_terms(self, parameter_index: int) -> Tensor:
        """Return the velocity after the terms that do not depend on the samples."""
        parameter, velocity = (
            self._active_rows(self.rows.parameters, parameter_index),
            self._active_rows(self.rows.optimiser_state["velocity"], parameter_index),
        )
        drift, step, momentum = self._gradient_term(parameter_index), self.pending_step, self.momentum
        if self.nesterov:
            parameter.addcmul_(velocity, broadcastable_to_rows(step.learning_rates, parameter), value=momentum)
        if step.weight_decay is None:
            velocity.mul_(momentum)
        else:  # λ meets x as it was
            nesterov_factor = (
                1 - step.learning_rates * step.weight_decay if self.nesterov else torch.ones_like(step.learning_rates)
            )
            velocity.mul_(broadcastable_to_rows(momentum * nesterov_factor, parameter)).addcmul_(
                parameter, broadcastable_to_rows(step.weight_decay, parameter)
            )
        return velocity if drift is None else velocity.add_(drift)

    def _apply_velocity(self, index: int) -> None:
        parameter, velocity = (
            self._active_rows(self.rows.parameters, index),
            self._active_rows(self.rows.optimiser_state["velocity"], index),
        )
        parameter.addcmul_(
            velocity,
            broadcastable_to_rows(self.pending_step.learning_rates, parameter),
            value=-1 - self.momentum if self.nesterov else -1,
        )

    def _step(self, parameter_index: int, gradient: Tensor | None) -> None:
        velocity = self._combine_velocity_terms(parameter_index)
        if gradient is not None:
            velocity.add_(gradient)
        self._apply_velocity(parameter_index)

    def step_linear_layer(self, outputs: Tensor, inputs: Tensor) -> None:
        if outputs.dtype != self.rows.parameters[0].dtype:
            super().step_linear_layer(outputs, inputs)
            return
        self._combine_velocity_terms(0).baddbmm_(outputs.mT, inputs)
        self._apply_velocity(0)
        if len(self.rows.parameters) > 1:
            self._combine_velocity_terms(1).baddbmm_(self._ones_per_sample(outputs), outputs)
            self._apply_velocity(1)
        self._is_applied = True


class AdamStep(InPlaceStep):
    """m ← β₁ m + (1 − β₁) g, v ← β₂ v + (1 − β₂) g², g = gradient + drift + λx; x ← x − η m̂ / (√v̂ + ε), from
    (1 − ηλ') x for a decay λ' beside the step, which is in `PendingStep.weight_decay_factor`."""

    def __init__(self, settings: AdamMoments) -> None:
        super().__init__()
        self.settings = settings

    def begin(self, step: PendingStep) -> None:
        super().begin(step)
        assert step.update_counts is not None
        first_correction, second_correction = (
            1 - beta**step.update_counts for beta in (self.settings.beta1, self.settings.beta2)
        )
        self._corrected_rates, self._second_moment_correction = (
            step.learning_rates / first_correction,
            second_correction.rsqrt(),
        )

    def _step(self, parameter_index: int, gradient: Tensor | None) -> None:
        parameter, drift, step = (
            self._active_rows(self.rows.parameters, parameter_index),
            self._gradient_term(parameter_index),
            self.pending_step,
        )
        first_moment, second_moment = (
            self._active_rows(self.rows.optimiser_state[name], parameter_index)
            for name in ("first_moment", "second_moment")
        )
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        if step.weight_decay is not None:
            gradient.addcmul_(parameter, broadcastable_to_rows(step.weight_decay, parameter))
        if drift is not None:
            gradient.add_(drift)
        first_moment.lerp_(gradient, 1 - self.settings.beta1)
        second_moment.mul_(self.settings.beta2).addcmul_(gradient, gradient, value=1 - self.settings.beta2)
        if step.weight_decay_factor is not None:
            parameter.mul_(broadcastable_to_rows(step.weight_decay_factor, parameter))
        scale = (
            torch.sqrt(second_moment, out=gradient)
            .mul_(broadcastable_to_rows(self._second_moment_correction, parameter))
            .add_(self.settings.eps)
        )
        parameter.addcmul_(
            torch.div(first_moment, scale, out=scale), broadcastable_to_rows(self._corrected_rates, parameter), value=-1
        )


def make_in_place_step(optimiser: HeavyBall | AdamMoments | None) -> InPlaceStep:
    """Build the step of a `GradientStep.optimiser`."""
    if optimiser is None:
        return PlainStep()
    return MomentumStep(optimiser) if isinstance(optimiser, HeavyBall) else AdamStep(optimiser)
