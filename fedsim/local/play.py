"""Gradient play: towards the stable equilibrium, the Nash equilibrium or the social optimum."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from fedsim.core.constraints import Count, OneOf, Positive
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.samples import Batch, ClientData
from fedsim.local.exploring import exploration_noise, replicate_seed_memory
from fedsim.local.performative import PFL
from fedsim.local.rule import Carry, Objective
from fedsim.models import StatelessModel
from fedsim.shift import Players, Shift

SOLUTION_CONCEPTS, SLOPE_KNOWLEDGE = ("stable", "nash", "social"), ("learnt", "known")
GRAM_KEY, RIGHT_SIDE_KEY, OWN_STEPS_KEY, SLOPE_KEY, ROUND_STEP_KEY = (
    "gram",
    "right_side",
    "own_steps",
    "slope",
    "step_of_round",
)


class Play(PFL):
    """Gradient play in the game of `shift=players` (after Narang et al. 2023, from its abstract; the formulas are
    ours).

    A player's loss depends on its own decision x_i and on data that react to the decisions of all. `stable`: it steps
    along its gradient on the current data (repeated gradient play). `nash`: the gradient includes the reaction of its
    data to its own decision. `social`: the gradient includes the reaction to all decisions, and decisions move along
    the sum of all players' gradients.

    Each player estimates the reaction of its data by regression of z̄_i on all deployed decisions, which are visible to
    all: after `explore` steps the estimate enters its gradient (adaptive gradient play). For this, players deploy θ +
    σ·noise. Alternatively the reaction is known. The decisions of other players are those of the start of the round;
    with local_steps=1 all steps are simultaneous. An absent player keeps its decision. Memory with `learnt`: the normal
    equations, (p + 1)(2p + 1) + p² numbers of each client for p = m·d decisions. Needs shift.deploy=step.

    Args:
        concept: 'stable', 'nash' or 'social'.
        slopes: 'learnt' or 'known'; for nash and social.
        explore: steps before what was learnt is used; more than there are decisions.
        spread: σ.
        **options: of PFL.
    """

    effective_if = (
        EffectiveIf(
            "explore",
            lambda component, run: component.learns_slope,
            "{at}.slopes=learnt, and a {at}.concept other than stable",
        ),
        EffectiveIf(
            "spread",
            lambda component, run: component.learns_slope,
            "{at}.slopes=learnt, and a {at}.concept other than stable",
        ),
        EffectiveIf(
            "explore",
            lambda component, run: component.explore < run.max_total_local_steps,
            "more local steps in the run",
        ),
    )

    def __init__(
        self,
        concept: Annotated[str, OneOf(*SOLUTION_CONCEPTS)] = "nash",
        slopes: Annotated[str, OneOf(*SLOPE_KNOWLEDGE)] = "learnt",
        explore: Count = 20,
        spread: Positive = 0.3,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.concept = concept
        self.explore, self.spread = explore, spread
        self.learns_slope = slopes == "learnt" and concept != "stable"
        self.needs_round = self.learns_slope

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        if not isinstance(shift, Players) or shift.deploy == "round":
            raise ConfigError("local=play is a game: use dataset=market shift=players shift.deploy=step, or local=pfl")
        self.game, self.trained = shift, model.trained
        if self.learns_slope and self.explore <= model.trained:
            raise ConfigError(
                f"local.explore={self.explore} deployments do not show how data react to {model.trained} decisions; "
                f"give at least {model.trained + 1}"
            )

    def memory(self, federation: Federation, dimension: int) -> Carry:
        if not self.learns_slope:
            return {}
        size, p = self.trained + 1, self.trained
        memory = {
            GRAM_KEY: federation.zeros(size, size),
            RIGHT_SIDE_KEY: federation.zeros(size, p),
            SLOPE_KEY: federation.zeros(p, p),
        }
        return memory | replicate_seed_memory(federation) | {OWN_STEPS_KEY: federation.zeros(dtype=torch.int64)}

    def round_state(self, params: Tensor) -> Carry:
        return (
            {ROUND_STEP_KEY: torch.zeros(len(params), dtype=torch.int64, device=params.device)}
            if self.learns_slope
            else {}
        )

    def gradient_weight(self, step: int) -> float | None:
        return None if self.concept == "social" else super().gradient_weight(step)

    def deploys(self, carry: Carry) -> Tensor:
        if not self.learns_slope:
            return carry["params"]
        return carry["params"] + self.spread * exploration_noise(carry, carry[ROUND_STEP_KEY], self.trained)

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        if self.concept == "stable":
            return super().step(carry, batch, lr, objective)
        params = carry["params"]
        if self.learns_slope:
            carry = self.add_observation(carry, batch["x"].mean(0))

        def shift_samples(samples: Batch, theta: Tensor) -> Batch:
            model_change = theta - params  # zero, with a gradient
            if self.concept == "nash":
                model_change = model_change * self.game.client_block_mask(samples["client"], model_change)
            if not self.learns_slope:
                return self.game(samples, model_change)  # linear: what it adds to samples that have reacted
            return samples | {"x": samples["x"] + model_change @ carry[SLOPE_KEY]}

        gradient, loss = objective.gradient_through(params, batch, shift_samples)
        return self.updated(carry, gradient, lr), loss

    def add_observation(self, carry: Carry, z: Tensor) -> Carry:
        """The regression, with the mean z [p] of this step's batch."""
        deployed = self.deploys(carry)
        row = torch.cat([deployed.new_ones(1), deployed])
        gram, right = carry[GRAM_KEY] + row[:, None] * row, carry[RIGHT_SIDE_KEY] + row[:, None] * z
        slope = (torch.linalg.pinv(gram, hermitian=True) @ right)[1:]
        slope = torch.where(carry[OWN_STEPS_KEY] + 1 >= self.explore, slope, torch.zeros_like(slope))
        return carry | {
            GRAM_KEY: gram,
            RIGHT_SIDE_KEY: right,
            SLOPE_KEY: slope,
            OWN_STEPS_KEY: carry[OWN_STEPS_KEY] + 1,
            ROUND_STEP_KEY: carry[ROUND_STEP_KEY] + 1,
        }
