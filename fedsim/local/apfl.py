"""APFL: every client trains a personal model in addition to the global one, and predicts with a mixture of both."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from fedsim.core.constraints import FractionPerSeed, NonNegative, OneOf, Positive
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.per_seed import as_per_seed
from fedsim.data.samples import Batch
from fedsim.local.rule import Carry, GradientStep, Objective
from fedsim.local.sgd import SGD

MIXING_MODES = ("params", "outputs")
ADAPTATION_INTERVALS = ("round", "step")


def personal_rate_ratio(personal_lr: float | None, learning_rates: list[float]) -> float:
    """η_v / η of a rule's rates; 1 where η_v is None."""
    if personal_lr is None:
        return 1.0
    if len(learning_rates) > 1:
        raise ConfigError(
            f"{{personal_lr}}={personal_lr} beside a list lr={learning_rates} is not defined; give one lr, or "
            "{personal_lr}=null",
            mentions=("personal_lr",),
        )
    return personal_lr / learning_rates[0]


class APFL(SGD):
    """Adaptive personalized federated learning (apfl Alg. 1); under strategy=fedavg it is the paper's algorithm.

    With v̄ = α v + (1 − α) w, a step is w ← w − η ∇f(w) (as SGD, options and all) and v ← v − η_v α ∇f(v̄), both from
    the values before it (eq. 5). Adaptive: first α ← clip(α − η (⟨v − w, ∇f(v̄)⟩ + λ_α α), 0, 1) (eq. 6), on the same
    batch. v starts as the initial model. Memory: one model and one number per client, stored between rounds.

    Args:
        alpha: initial α of every client, or a list of one per seed; 0 is FedAvg, 1 trains v independently.
        adaptive: whether α is trained.
        alpha_every: 'round': α is updated once per round, before the local steps (the paper: "at every communication
            round"); 'step': before each of them, as in other programs. Each update costs one gradient.
        mix: 'params' mixes parameters, as in the paper; 'outputs' mixes the outputs of the two models, as in the
            authors' program: v and α then follow the gradient of that loss, and the ridge penalty is that of v.
        personal_lr: η_v, with the same schedule; None: η.
        alpha_decay: λ_α, a weight decay of α; 0.02 in the authors' program.
        **options: of SGD; clip and weight_decay act on v too.
    """

    effective_if = (
        EffectiveIf("alpha_every", lambda component, run: component.adaptive, "{at}.adaptive=true", attribute="every"),
        EffectiveIf("alpha_decay", lambda component, run: component.adaptive, "{at}.adaptive=true"),
    )

    own_models = ("personal",)

    def __init__(
        self,
        alpha: FractionPerSeed = 0.25,
        adaptive: bool = False,
        alpha_every: Annotated[str, OneOf(*ADAPTATION_INTERVALS)] = "round",
        mix: Annotated[str, OneOf(*MIXING_MODES)] = "params",
        personal_lr: Positive | None = None,
        alpha_decay: NonNegative = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.alpha = as_per_seed(alpha)
        self.adaptive = adaptive
        self.every = alpha_every
        self.mix = mix
        self.alpha_decay = alpha_decay
        self.ratio = personal_rate_ratio(personal_lr, self.rates)

    def memory(self, federation: Federation, dimension: int) -> Carry:
        per_replicate = torch.ones(federation.num_replicates, dtype=federation.dtype, device=federation.device)
        return {"alpha": federation.broadcast(self.alpha * per_replicate)}

    def personal(self, carry: Carry) -> list[tuple[Tensor, Tensor]]:
        w, v, alpha = carry["params"], carry["personal"], carry["alpha"]
        if self.mix == "outputs":
            return [(alpha, v), (1 - alpha, w)]
        return [(torch.ones_like(alpha), torch.lerp(w, v, alpha))]

    def descents(self) -> tuple[GradientStep, ...]:
        is_alpha_moving = self.adaptive and self.every == "step"
        if type(self) is not APFL or self.clip is not None or is_alpha_moving:
            return ()
        personal_step = GradientStep(
            "personal", self.ratio, self.weight_decay, "params", "alpha", self.mix == "outputs"
        )
        return personal_step, GradientStep(decay=self.weight_decay)

    @property
    def has_round_start(self) -> bool:
        return self.adaptive and self.every == "round"

    def on_round_start(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> Carry:
        return self.update_alpha(carry, batch, lr, objective)

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        if self.adaptive and self.every == "step":
            carry = self.update_alpha(carry, batch, lr, objective)
        gradient = self.personal_gradient(carry, batch, objective)
        personal_carry = {"params": carry["personal"]}  # no correction or proximal term: they are the federation's
        v = self.descend(personal_carry, gradient, lr * self.ratio)
        carry, loss = super().step(carry, batch, lr, objective)
        return carry | {"personal": v}, loss

    def update_alpha(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> Carry:
        """The carry with α moved (eq. 6)."""
        alpha = carry["alpha"]
        slope = self.alpha_gradient(carry, batch, objective)
        return carry | {"alpha": (alpha - lr * (slope + self.alpha_decay * alpha)).clamp(0.0, 1.0)}

    def personal_gradient(self, carry: Carry, batch: Batch, objective: Objective) -> Tensor:
        """[d] the gradient of the mixture's loss with respect to v."""
        w, v, alpha = carry["params"], carry["personal"], carry["alpha"]
        if self.mix == "outputs":
            return objective.mixed_outputs(v, w, alpha, batch)[0]
        return alpha * objective.gradient(torch.lerp(w, v, alpha), batch)[0]

    def alpha_gradient(self, carry: Carry, batch: Batch, objective: Objective) -> Tensor:
        """[] and with respect to α."""
        w, v, alpha = carry["params"], carry["personal"], carry["alpha"]
        if self.mix == "outputs":
            return objective.mixed_outputs(v, w, alpha, batch)[1]
        return torch.dot(v - w, objective.gradient(torch.lerp(w, v, alpha), batch)[0])
