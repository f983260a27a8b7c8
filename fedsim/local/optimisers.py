"""Local optimisers with a state: momentum, Adam, AdamW. The state is reset in every round, or stored per client."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any

import torch
from torch import Tensor

from fedsim.core.constraints import Fraction, OneOf, Positive
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.samples import Batch
from fedsim.local.rule import AdamMoments, Carry, GradientStep, HeavyBall, Objective
from fedsim.local.sgd import SGD

STATE_LIFETIMES = ("round", "client")


class LocalOptimiser(SGD):
    """A local rule whose steps depend on the gradient and an optimiser state.

    A proximal term (FedProx) is part of the gradient. SCAFFOLD's correction is not supported: its control variates are
    mean gradients only for plain steps.

    Args:
        state: 'round': reset to zero in every round; 'client': stored per client between rounds.
        **options: of SGD.
    """

    supported_keys = frozenset({"proximal", "anchor"})
    rows: tuple[str, ...] = ()  # names of its client memory, [d] each
    numbers: tuple[str, ...] = ()  # and [] each

    def __init__(self, state: Annotated[str, OneOf(*STATE_LIFETIMES)] = "round", **options: Any) -> None:
        super().__init__(**options)
        self.state = state

    def memory(self, federation: Federation, dimension: int) -> Carry:
        if self.state == "round":
            return {}
        return {name: federation.zeros(dimension) for name in self.rows} | {n: federation.zeros() for n in self.numbers}

    def round_state(self, params: Tensor) -> Carry:
        if self.state == "client":
            return {}
        of_rows = {name: torch.zeros_like(params) for name in self.rows}
        return of_rows | {name: params.new_zeros(len(params)) for name in self.numbers}

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        gradient, loss = objective.gradient(carry["params"], batch)
        return carry | self.take_step(carry, self.direction(carry, gradient), lr), loss

    def gradient_weight(self, step: int) -> float | None:
        return None

    def _gradient_steps(self, optimiser: HeavyBall | AdamMoments) -> tuple[GradientStep, ...]:
        return (GradientStep(decay=self.weight_decay, optimiser=optimiser),) if self.clip is None else ()

    @abstractmethod
    def take_step(self, carry: Carry, gradient: Tensor, lr: Tensor) -> Carry:
        """The new 'params', and what is remembered."""


class Momentum(LocalOptimiser):
    """v ← μ v + g; x ← x − η v, or x − η (g + μ v) with `nesterov`. g includes weight decay, as in torch.optim.SGD.

    Args:
        momentum: μ.
        nesterov: Nesterov momentum.
        **options: of `LocalOptimiser`.
    """

    effective_if = (
        EffectiveIf("nesterov", lambda component, run: component.momentum > 0, "{at}.momentum above 0"),
        EffectiveIf("state", lambda component, run: component.momentum > 0, "{at}.momentum above 0"),
    )

    rows = HeavyBall.rows

    def __init__(self, momentum: Fraction = 0.9, nesterov: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.momentum = momentum
        if self.momentum == 1:
            raise ConfigError(key="momentum", value=momentum, needs="never forgets; it must be below 1")
        self.nesterov = nesterov

    def descents(self) -> tuple[GradientStep, ...]:
        return self._gradient_steps(HeavyBall(self.momentum, self.nesterov)) if type(self) is Momentum else ()

    def gradient_weight(self, step: int) -> float | None:
        if self.state == "client":
            return None  # its velocity starts from gradients of earlier rounds
        velocity = (1 - self.momentum ** (step + 1)) / (1 - self.momentum)
        return 1 + self.momentum * velocity if self.nesterov else velocity

    def take_step(self, carry: Carry, gradient: Tensor, lr: Tensor) -> Carry:
        velocity = self.momentum * carry["velocity"] + gradient
        direction = gradient + self.momentum * velocity if self.nesterov else velocity
        return {"params": carry["params"] - lr * direction, "velocity": velocity}


class Adam(LocalOptimiser):
    """m ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) g²; x ← x − η m̂ / (√v̂ + ε), where m̂ = m / (1 − β₁ⁿ) and v̂
    likewise (Kingma and Ba, ICLR 2015, Alg. 1).

    Args:
        beta1, beta2, eps: β₁, β₂, ε.
        decoupled: decoupled weight decay λ, x ← (1 − ηλ) x (AdamW; Loshchilov and Hutter, ICLR 2019, Alg. 2); otherwise
            it is part of g.
        **options: of `LocalOptimiser`; lr 0.001 is usual.
    """

    effective_if = (EffectiveIf("decoupled", lambda component, run: component.decay > 0, "{at}.weight_decay above 0"),)

    rows, numbers = AdamMoments.rows, AdamMoments.numbers

    def __init__(
        self,
        beta1: Fraction = 0.9,
        beta2: Fraction = 0.999,
        eps: Positive = 1e-8,
        decoupled: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.beta1, self.beta2 = beta1, beta2
        if 1 in (self.beta1, self.beta2):
            raise ConfigError(f"{{beta1}}={beta1} and {{beta2}}={beta2} must be below 1", mentions=("beta1", "beta2"))
        self.eps = eps
        self.decay, self.decoupled = self.weight_decay, decoupled
        if decoupled:
            self.weight_decay = 0.0

    def descents(self) -> tuple[GradientStep, ...]:
        decoupled_decay = self.decay if self.decoupled else 0.0
        return (
            self._gradient_steps(AdamMoments(self.beta1, self.beta2, self.eps, decoupled_decay))
            if type(self) is Adam
            else ()
        )

    def take_step(self, carry: Carry, gradient: Tensor, lr: Tensor) -> Carry:
        params, updates = carry["params"], carry["updates"] + 1
        first = self.beta1 * carry["first_moment"] + (1 - self.beta1) * gradient
        second = self.beta2 * carry["second_moment"] + (1 - self.beta2) * gradient.square()
        if self.decoupled:
            params = params * (1 - lr * self.decay)
        scale = (second / (1 - self.beta2**updates)).sqrt() + self.eps
        params = params - lr * (first / (1 - self.beta1**updates)) / scale
        return {"params": params, "first_moment": first, "second_moment": second, "updates": updates}
