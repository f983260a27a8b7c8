"""Steps that parameters of several rows take where they lie: SGD's, momentum's, Adam's.

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

from fedsim.local.rule import HeavyBall, Moments


def broadcast_rows(numbers: Tensor, rows: Tensor) -> Tensor:
    """[c'] as [c', 1, …], to meet rows [c, …]."""
    return numbers.view(-1, *[1] * (rows.dim() - 1))


@dataclass(frozen=True)
class PendingStep:
    """A step of the first c' rows that is to come.

    Attributes:
        rates: [c'] η.
        decay: [c'] λ of a decay that is part of the gradient, or None.
        shrinking: [c'] 1 − ηλ of one that is not, or None.
        updates: [c'] steps the rows will have taken, this one included, where that matters.
    """

    rates: Tensor
    decay: Tensor | None = None
    shrinking: Tensor | None = None
    updates: Tensor | None = None


NO_PENDING_STEP = PendingStep(torch.empty(0))


@dataclass
class Parameters:
    """Rows of some parameters: lists in one order, [c, …] each.

    Attributes:
        parameters: the parameters.
        drift: what is added to their gradients; empty where nothing is.
        state: what is remembered of each, by name.
    """

    parameters: list[Tensor] = field(default_factory=list)
    drift: list[Tensor] = field(default_factory=list)
    state: dict[str, list[Tensor]] = field(default_factory=dict)

    def map_views(self, view: Callable[[Tensor], Tensor]) -> Parameters:
        """Views of all."""
        state = {name: list(map(view, rows)) for name, rows in self.state.items()}
        return Parameters(list(map(view, self.parameters)), list(map(view, self.drift)), state)


class InPlaceStep(ABC):
    """Parameters of c rows, which take every step that `begin` announces once, also where no sample meets them.

    Attributes:
        scaled: gradients come multiplied by the negative of their rows' rates already, which is done once for all
            parameters where the backward pass begins.
    """

    scaled = False

    def __init__(self) -> None:
        self.rows, self.pending_step = Parameters(), NO_PENDING_STEP
        self._is_taken, self._ones_buffer = True, torch.empty(0)

    def load(self, rows: Parameters) -> None:
        """Take over parameters of some rows."""
        self.rows = rows

    def begin(self, step: PendingStep) -> None:
        """A step of the first rows is to come."""
        self.pending_step, self._is_taken = step, False

    def apply_remaining(self) -> None:
        """The step, where it has not been taken: no sample met the parameters."""
        if not self._is_taken:
            self.descend([None] * len(self.rows.parameters))

    def descend(self, gradients: list[Tensor | None]) -> None:
        """The step by the gradients [c', …] of the parameters, which may be written to; None where no sample met
        them."""
        for index, gradient in enumerate(gradients):
            self._step(index, gradient)
        self._is_taken = True

    def descend_along(self, outputs: Tensor, inputs: Tensor) -> None:
        """That of a linear layer's weight [c, out, in], and its bias [c, 1, out] if it has one, by the gradients of its
        outputs [c', N, out] and its inputs [c', N, in]; where these are of a lower precision, so is their product, but
        not the step."""
        kind = self.rows.parameters[0].dtype
        bias = [outputs.sum(1, keepdim=True, dtype=kind)] if len(self.rows.parameters) > 1 else []
        self.descend([torch.bmm(outputs.mT, inputs).to(kind), *bias])

    @abstractmethod
    def _step(self, index: int, gradient: Tensor | None) -> None:
        """That of one of the parameters."""

    def _active_rows(self, rows: list[Tensor], index: int) -> Tensor:
        """A parameter's rows that take the step."""
        return rows[index][: len(self.pending_step.rates)]

    def _sample_ones(self, outputs: Tensor) -> Tensor:
        """[c', 1, N], of which the product with outputs [c', N, out] is their sum over the samples."""
        shape = (len(outputs), 1, outputs.shape[1])
        if self._ones_buffer.shape != shape or self._ones_buffer.dtype != outputs.dtype:
            self._ones_buffer = outputs.new_ones(shape)
        return self._ones_buffer

    def _drift(self, index: int) -> Tensor | None:
        return self._active_rows(self.rows.drift, index) if self.rows.drift else None


class PlainStep(InPlaceStep):
    """x ← (1 − ηλ) x − η (drift + gradient); λ is in `PendingStep.shrinking`, and −η gradient is what comes."""

    scaled = True

    def _apply_drift(self, index: int) -> Tensor:
        """The parameter after what does not depend on the samples."""
        parameter, drift, step = (
            self._active_rows(self.rows.parameters, index),
            self._drift(index),
            self.pending_step,
        )
        if step.shrinking is not None:
            parameter.mul_(broadcast_rows(step.shrinking, parameter))
        return (
            parameter if drift is None else parameter.addcmul_(drift, broadcast_rows(step.rates, parameter), value=-1)
        )

    def _step(self, index: int, gradient: Tensor | None) -> None:
        parameter = self._apply_drift(index)
        if gradient is not None:
            parameter.add_(gradient)

    def descend_along(self, outputs: Tensor, inputs: Tensor) -> None:
        if outputs.dtype != self.rows.parameters[0].dtype:
            super().descend_along(outputs, inputs)
            return
        self._apply_drift(0).baddbmm_(outputs.mT, inputs)
        if len(self.rows.parameters) > 1:
            self._apply_drift(1).baddbmm_(self._sample_ones(outputs), outputs)
        self._is_taken = True


class MomentumStep(InPlaceStep):
    """v ← μ v + g, g = gradient + drift + λx; x ← x − η v, or x − η (g + μ v) with `nesterov`.

    With the velocity from before the step the latter is x + ημ v, and then − η (1 + μ) (μ v + g): g itself is needed
    nowhere.
    """

    def __init__(self, settings: HeavyBall) -> None:
        super().__init__()
        self.momentum, self.nesterov = settings.momentum, settings.nesterov

    def _apply_drift(self, index: int) -> Tensor:
        """The velocity after what does not depend on the samples."""
        parameter, velocity = (
            self._active_rows(self.rows.parameters, index),
            self._active_rows(self.rows.state["velocity"], index),
        )
        drift, step, momentum = self._drift(index), self.pending_step, self.momentum
        if self.nesterov:
            parameter.addcmul_(velocity, broadcast_rows(step.rates, parameter), value=momentum)
        if step.decay is None:
            velocity.mul_(momentum)
        else:  # λ meets x as it was
            nesterov_factor = 1 - step.rates * step.decay if self.nesterov else torch.ones_like(step.rates)
            velocity.mul_(broadcast_rows(momentum * nesterov_factor, parameter)).addcmul_(
                parameter, broadcast_rows(step.decay, parameter)
            )
        return velocity if drift is None else velocity.add_(drift)

    def _apply_velocity(self, index: int) -> None:
        parameter, velocity = (
            self._active_rows(self.rows.parameters, index),
            self._active_rows(self.rows.state["velocity"], index),
        )
        parameter.addcmul_(
            velocity,
            broadcast_rows(self.pending_step.rates, parameter),
            value=-1 - self.momentum if self.nesterov else -1,
        )

    def _step(self, index: int, gradient: Tensor | None) -> None:
        velocity = self._apply_drift(index)
        if gradient is not None:
            velocity.add_(gradient)
        self._apply_velocity(index)

    def descend_along(self, outputs: Tensor, inputs: Tensor) -> None:
        if outputs.dtype != self.rows.parameters[0].dtype:
            super().descend_along(outputs, inputs)
            return
        self._apply_drift(0).baddbmm_(outputs.mT, inputs)
        self._apply_velocity(0)
        if len(self.rows.parameters) > 1:
            self._apply_drift(1).baddbmm_(self._sample_ones(outputs), outputs)
            self._apply_velocity(1)
        self._is_taken = True


class AdamStep(InPlaceStep):
    """m ← β₁ m + (1 − β₁) g, v ← β₂ v + (1 − β₂) g², g = gradient + drift + λx; x ← x − η m̂ / (√v̂ + ε), from
    (1 − ηλ') x for a decay λ' beside the step, which is in `PendingStep.shrinking`."""

    def __init__(self, settings: Moments) -> None:
        super().__init__()
        self.settings = settings

    def begin(self, step: PendingStep) -> None:
        super().begin(step)
        assert step.updates is not None
        first, second = (1 - beta**step.updates for beta in (self.settings.beta1, self.settings.beta2))
        self._rates, self._root = step.rates / first, second.rsqrt()

    def _step(self, index: int, gradient: Tensor | None) -> None:
        parameter, drift, step = (
            self._active_rows(self.rows.parameters, index),
            self._drift(index),
            self.pending_step,
        )
        first, second = (self._active_rows(self.rows.state[name], index) for name in ("first_moment", "second_moment"))
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        if step.decay is not None:
            gradient.addcmul_(parameter, broadcast_rows(step.decay, parameter))
        if drift is not None:
            gradient.add_(drift)
        first.lerp_(gradient, 1 - self.settings.beta1)
        second.mul_(self.settings.beta2).addcmul_(gradient, gradient, value=1 - self.settings.beta2)
        if step.shrinking is not None:
            parameter.mul_(broadcast_rows(step.shrinking, parameter))
        scale = torch.sqrt(second, out=gradient).mul_(broadcast_rows(self._root, parameter)).add_(self.settings.eps)
        parameter.addcmul_(torch.div(first, scale, out=scale), broadcast_rows(self._rates, parameter), value=-1)


def in_place(optimiser: HeavyBall | Moments | None) -> InPlaceStep:
    """Of a `Descent.optimiser`."""
    if optimiser is None:
        return PlainStep()
    return MomentumStep(optimiser) if isinstance(optimiser, HeavyBall) else AdamStep(optimiser)
