"""The contract of a local rule: one local step of ONE client, which the trainer runs for all active rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor

from fedsim.core.constraints import Count, PositivePerSeed, Validated
from fedsim.core.effects import EffectDeclarations, EffectiveIf
from fedsim.core.federation import Cohort, Federation
from fedsim.data.samples import Batch, ClientData, LocalWork
from fedsim.data.samples.work import SamplingMode
from fedsim.local.schedules import Constant, Schedule
from fedsim.models import StatelessModel
from fedsim.models.features import ForwardPass
from fedsim.shift import Shift

Carry = dict[str, Tensor]


class Objective(Protocol):
    """What a rule may ask of the client's loss. Each executor brings its own implementation."""

    def gradient(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gradient [d] and value [] of the client's mean loss on the batch, at params [d]."""

    def value(self, params: Tensor, batch: Batch) -> Tensor:
        """Value [] of the client's mean loss on the batch, at params [d], without a gradient."""

    def gradient_through(
        self, params: Tensor, batch: Batch, shift_samples: Callable[[Batch, Tensor], Batch]
    ) -> tuple[Tensor, Tensor]:
        """As `gradient`, of the loss on `shift_samples(batch, θ)` at θ = params, by both its places; `shift_samples`
        can be differentiated in the trained parameters. Only for rules that step one client."""

    def penalised(
        self, params: Tensor, batch: Batch, penalty: Callable[[ForwardPass, Batch], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient [d] of the client's mean loss on the batch plus `penalty(forward pass, batch)` [], at params [d];
        the mean loss [] without the penalty, and the features [B, k] of the pass. Only for rules that step one
        client."""

    def forward(self, params: Tensor, batch: Batch) -> ForwardPass:
        """Output and features of the batch at params [d], as in evaluation, without a gradient. Only for rules that
        step one client."""

    def per_sample(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses [B] and their gradients [B, d] of every sample of the batch (padded ones too), at params [d].

        The ridge is part of every one. Only for models without dropout; set `LocalRule.per_sample`.
        """

    def hessian_product(self, params: Tensor, vector: Tensor, batch: Batch) -> Tensor:
        """∇²f(params) · vector [d] of the client's mean loss on the batch; costs about two gradients."""

    def mixed_outputs(
        self, personal_params: Tensor, params: Tensor, alpha: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the mean loss of α·output(personal) + (1 − α)·output(params): its gradients with respect to personal [d]
        and to α [], and its value []. The ridge is that of `personal`."""


@dataclass(frozen=True)
class HeavyBall:
    """v ← μ v + g; x ← x − η v, or x − η (g + μ v) with `nesterov`. The carry has v, [d], as 'velocity'."""

    momentum: float
    nesterov: bool = False

    rows: ClassVar[tuple[str, ...]] = ("velocity",)
    numbers: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class AdamMoments:
    """m ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) g²; x ← (1 − ηλ) x − η m̂ / (√v̂ + ε), where m̂ = m / (1 − β₁ⁿ) and v̂
    likewise. The carry has m and v, [d], as 'first_moment' and 'second_moment', and n, [], as 'updates'.

    Args:
        beta1, beta2, eps: β₁, β₂, ε.
        decay: λ, beside what is part of g.
    """

    beta1: float
    beta2: float
    eps: float
    decay: float = 0.0

    rows: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")
    numbers: ClassVar[tuple[str, ...]] = ("updates",)


@dataclass(frozen=True)
class GradientStep:
    """A plain step of one model of the carry: x ← x − η s (∇f(x) + λx); with an optimiser, its step by g = ∇f(x) + λx.

    Mixed with another model y of the carry, by a weight α of the client, f is taken at α x + (1 − α) y, or of the two
    models' outputs, α output(x) + (1 − α) output(y). Its gradient is that by x, models being as before the step.

    Args:
        name: x's name in the carry.
        scale: s.
        decay: λ.
        mix_with: y's name; y steps too, after x.
        mixing: α's name.
        outputs: whether outputs are mixed.
        optimiser: what steps x, without a mixture.
    """

    name: str = "params"
    scale: float = 1.0
    decay: float = 0.0
    mix_with: str | None = None
    mixing: str | None = None
    outputs: bool = False
    optimiser: HeavyBall | AdamMoments | None = None

    @property
    def state(self) -> tuple[str, ...]:
        """Names in the carry of what is remembered of every column of x."""
        return self.optimiser.rows if self.optimiser else ()

    @property
    def changed_entry_names(self) -> tuple[str, ...]:
        """Names in the carry of all that the step changes."""
        return (self.name, *self.state, *(self.optimiser.numbers if self.optimiser else ()))


class LocalRule(Validated, ABC):
    """A local rule: computes the end row of a client's local training from its start row.

    Args:
        lr: η_l, or a list with one value per replicate.
        steps, epochs, batch_size, sampling, drop_last: see `fedsim.data.samples.LocalWork`.
        schedule: factor on lr over rounds and steps.

    Attributes:
        rates: η_l, of all replicates or of each.
        work: how many steps, on which samples.
    """

    effective_if: EffectDeclarations = (
        EffectiveIf(
            "drop_last",
            lambda component, run: component.work.sampling == "pass",
            "{at}.sampling=pass",
            attribute="work.drop_last",
        ),
        EffectiveIf(
            "drop_last",
            lambda component, run: component.work.batch_size is not None,
            "a batch_size",
            attribute="work.drop_last",
        ),
        EffectiveIf(
            "drop_last",
            lambda component, run: run.has_incomplete_batches,
            "a client whose passes end, within a round, with fewer samples than batch_size",
            attribute="work.drop_last",
        ),
        EffectiveIf(
            "sampling",
            lambda component, run: not run.dataset.stream,
            "data that are stored, and not drawn for each batch",
            attribute="work.sampling",
        ),
    )

    def __init__(
        self,
        lr: PositivePerSeed = 0.1,
        steps: Count | None = None,
        epochs: Count | None = None,
        batch_size: Count | None = 32,
        sampling: SamplingMode = "pass",
        drop_last: bool = True,
        schedule: Schedule | None = None,
    ) -> None:
        self.work = LocalWork(steps, epochs, batch_size, sampling, drop_last)
        self.rates = list(lr) if isinstance(lr, (list, tuple)) else [lr]
        self.schedule = schedule or Constant()

    supported_keys: frozenset[str] = frozenset()  # carry entries besides 'params' that the rule uses
    batched: bool = False  # `step` takes whole chunks: one more leading axis [c, …] on everything, losses [c]
    per_sample: bool = False  # `step` asks the objective for gradients sample by sample
    needs_round: bool = False  # the carry holds 'round' [], int64
    own_models: tuple[str, ...] = ()  # names in the memory of models [d] that start as the server's initial one
    knows_deployed: bool = False  # the batch of a moving shift holds 'deployed' [d], the θ that the data react to
    pooled: bool = False  # one client holds everybody's data (see `fedsim.data.datasets.pooled`)
    indivisible: bool = False  # a round's local steps form a unit: a part of them is meaningless
    one_at_a_time: bool = False  # … and every batch belongs to one member, drawn at random

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        """Learn what data, shift and model are like, and refuse what cannot work; before `memory`."""

    def memory(self, federation: Federation, dimension: int) -> dict[str, Tensor]:
        """What every client remembers between rounds: name → [R·m, …], as before round 0.

        A client's entries are in the carry of its steps, which return them anew; no strategy sees them.
        """
        return {}

    def round_state(self, params: Tensor) -> Carry:
        """What a client remembers within a round only: name → [n, …], as before the first step from params [n, d]."""
        return {}

    def after_round(self, memory: dict[str, Tensor], cohort: Cohort) -> None:
        """What the server makes of the clients' memory after a round with this cohort, in place: sums over those who
        took part (`Cohort.sum`, `Cohort.mean`), handed back to every client of the replicate."""

    def extra_transmitted_numbers(self, dimension: int) -> tuple[int, int]:
        """How many numbers the server sends to each client that takes part in a round for the rule's own sake, and how
        many it gets from each: what `after_round` makes of the clients' memory, not the models; after `setup`."""
        return 0, 0

    def samples_used(self, planned_samples: np.ndarray, carry_before: Carry, carry_after: Carry) -> np.ndarray:
        """[n] training samples each row really used in a round, given those drawn [n] and the carries around it."""
        return planned_samples

    def personal(self, carry: Carry) -> list[tuple[Tensor, Tensor]] | None:
        """The client's own predictor at the start of a round: weights [] and rows [d] whose outputs are summed.

        For ONE client, from 'params' [d] and its memory. None where the rule makes none: then it is the model that the
        strategy keeps for the client, if it does.
        """
        return None

    def adaptation_rule(self) -> LocalRule | None:
        """The rule by which a client makes its predictor out of x^t whenever it needs it, if the paper has it so."""
        return None

    @property
    def has_round_start(self) -> bool:
        """Is there something to `on_round_start`?"""
        return type(self).on_round_start is not LocalRule.on_round_start

    def deploys(self, carry: Carry) -> Tensor:
        """[d] the model that the client deploys at this step, to which its data react where `shift.deploy` is 'step':
        its own current one, unless the rule explores. For what `step` is for: ONE client, or a chunk if `batched`."""
        return carry["params"]

    def gradient_weight(self, step: int) -> float | None:
        """What a step, counted from 0, weighs gradients in sum: it moves the model by its rate times that many of them.
        None where a model's move is no such sum."""
        return None

    def on_round_start(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> Carry:
        """What happens once a round, before the first local step, on that step's batch and at its rate."""
        return carry

    def descents(self) -> tuple[GradientStep, ...]:
        """What `step` is, if it is a plain descent, or several of different models: executors may then take them inside
        the backward pass. The loss is the last one's. To the gradient of 'params' come a strategy's correction and
        proximal term, as under local=sgd. Nothing where only `step` knows."""
        return ()

    @abstractmethod
    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        """One local step of one client.

        Args:
            carry: 'params' [d], and whatever the strategy and the rule's own memory put beside it.
            batch: 'x' [B, …]; 'y' [B, …] where there are labels; 'client' []; 'weight' [B] where the batch is padded;
                samples as they are after the shift.
            lr: [] this step's learning rate.
            objective: gradients of the client's loss.

        Returns:
            The new carry with the same keys and shapes, and the loss [] before the step.
        """
