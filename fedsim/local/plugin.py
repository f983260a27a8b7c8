"""Plug-in performative optimisation: first learn by regression how data react, then optimise what was learnt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.core.constraints import Count, Positive
from fedsim.core.effects import StopsTraining
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation
from fedsim.core.placement import capacity_bytes
from fedsim.data.samples import Batch, ClientData
from fedsim.local import laws
from fedsim.local.estimators import FractionEstimator
from fedsim.local.exploring import exploration_noise, replicate_seed_memory
from fedsim.local.performative import PFL
from fedsim.local.rule import Carry, Objective
from fedsim.models import StatelessModel
from fedsim.shift import Shift

GRAM_KEY, RIGHT_SIDE_KEY, LAST_LOCATION_KEY, OWN_STEPS_KEY, SLOPE_KEY = (
    "gram",
    "right_side",
    "last_location",
    "own_steps",
    "slope",
)
POOLED_GRAM_KEY, POOLED_RIGHT_SIDE_KEY, ROUND_STEP_KEY = "pooled_gram", "pooled_right_side", "step_of_round"


class PlugIn(PFL):
    """Two stages (Miller, Perdomo and Zrnic 2021, for location families; Lin and Zrnic 2024, for models of the reaction
    that need not be true; both by their abstracts): towards θ^PO where the model of the reaction is right.

    1. In whole rounds, until a client has taken `explore` steps: deploy θ_0 + σ·noise, the same for all clients of a
       replicate, and regress the location f̂ of the samples (see `fedsim.local.laws`) on what was deployed: f = a + B θ.
       The client's model stays where it is.
    2. Deploy θ_0, whatever the model; samples z^0 that react to it replace those for θ, z = z^0 + B̂ (θ − θ_0);
       θ ← Π(θ − η ∇_θ mean ℓ(z(θ); θ)), through z too.

    θ_0 is the middle of Θ, zero without a box. Data that move linearly, as under shift=location, demand, response and
    group_mean, are of that kind; shift=contribution is not. Memory: the normal equations, (d + 1)(d + 1 + p) + d p
    numbers of each client. Needs shift.deploy=step; under inertia B̂ is that of the first reaction.

    Args:
        explore: steps of the first stage; more than there are parameters.
        spread: σ.
        shared: one B̂ for all clients, from the sum of their equations: the wrong model where they react unequally.
        estimator: which f moves; auto: what the shift declares.
        **options: of PFL.
    """

    stops_training = (
        StopsTraining(
            "explore",
            lambda component, run: component.explore >= run.max_total_local_steps,
            "all local steps of the run explore; give fewer, or more rounds",
        ),
    )

    needs_round = True

    def __init__(
        self,
        explore: Count = 20,
        spread: Positive = 1.0,
        shared: bool = False,
        estimator: laws.LawName = "auto",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.explore, self.spread = explore, spread
        self.shared, self.estimator_name = shared, estimator
        self.base = 0.0 if self.project.box is None else 0.5 * sum(self.project.box)

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        if not shift.active or shift.deploy == "round":
            raise ConfigError(
                "local=plugin learns how data react to what each client deploys, and here they do not: set "
                "shift.deploy=step and a shift, or use local=pfl"
            )
        self.estimator, self.trained = laws.make_estimator(self.estimator_name, None, data, shift), model.trained
        if isinstance(self.estimator, FractionEstimator):
            raise ConfigError(
                f"local=plugin learns how a location moves, but shift={type(shift).__name__} moves fractions of "
                "groups; use local=profl, or another local.estimator"
            )
        if self.explore <= self.trained:
            raise ConfigError(
                f"local.explore={self.explore} deployments do not show how data react to {self.trained} parameters; "
                f"give at least {self.trained + 1}"
            )

    def memory(self, federation: Federation, dimension: int) -> Carry:
        history_width, num_estimates = self.trained + 1, self.estimator.size
        needed_bytes = (
            federation.num_memory_rows
            * (1 + self.shared)
            * history_width
            * (history_width + 2 * num_estimates)
            * federation.dtype.itemsize
        )
        if needed_bytes > capacity_bytes(federation.device, federation.storage):
            raise ConfigError(
                f"local=plugin needs {needed_bytes / 2**30:,.0f} GiB for the equations of "
                f"{federation.num_memory_rows} clients, more "
                f"than there is (trainer.memory={federation.storage}); use a smaller model, or local=dfo"
            )
        equations = {GRAM_KEY: (history_width, history_width), RIGHT_SIDE_KEY: (history_width, num_estimates)}
        pooled_shapes = (
            {POOLED_GRAM_KEY: (history_width, history_width), POOLED_RIGHT_SIDE_KEY: (history_width, num_estimates)}
            if self.shared
            else {}
        )
        shapes = (
            equations | pooled_shapes | {SLOPE_KEY: (self.trained, num_estimates), LAST_LOCATION_KEY: (num_estimates,)}
        )
        memory = {name: federation.zeros(*shape) for name, shape in shapes.items()}
        return memory | replicate_seed_memory(federation) | {OWN_STEPS_KEY: federation.zeros(dtype=torch.int64)}

    def round_state(self, params: Tensor) -> Carry:
        return {ROUND_STEP_KEY: torch.zeros(len(params), dtype=torch.int64, device=params.device)}

    def gradient_weight(self, step: int) -> float | None:
        return None

    def is_exploring(self, carry: Carry) -> Tensor:
        """[] bool: is the client in the first stage in this round?"""
        return carry[OWN_STEPS_KEY] - carry[ROUND_STEP_KEY] < self.explore

    def deploys(self, carry: Carry) -> Tensor:
        exploration = self.spread * exploration_noise(carry, carry[ROUND_STEP_KEY], self.trained)
        point = torch.where(self.is_exploring(carry), self.project(self.base + exploration), self.base)
        return torch.cat([point[: self.trained], carry["params"][self.trained :]])

    def on_round_start(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> Carry:
        gram, right = (
            (carry[POOLED_GRAM_KEY], carry[POOLED_RIGHT_SIDE_KEY])
            if self.shared
            else (carry[GRAM_KEY], carry[RIGHT_SIDE_KEY])
        )
        slope = (torch.linalg.pinv(gram, hermitian=True) @ right)[1:] / self.spread
        return carry | {SLOPE_KEY: torch.where(self.is_exploring(carry), carry[SLOPE_KEY], slope)}

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        is_exploring_step, slope = self.is_exploring(carry), carry[SLOPE_KEY]

        def shift_samples(samples: Batch, theta: Tensor) -> Batch:
            return self.estimator.shift_batch(samples, (theta - self.base) @ slope)

        gradient, loss = objective.gradient_through(carry["params"], batch, shift_samples)
        next_carry = self.updated(carry, gradient, lr)
        step_carry = {name: torch.where(is_exploring_step, carry[name], value) for name, value in next_carry.items()}
        chunk = {name: value[None] for name, value in batch.items()}
        weight = chunk.get("weight", torch.ones_like(chunk["x"].flatten(2)[:, :, 0]))
        f = self.estimator.estimate_statistic(chunk, weight, carry[LAST_LOCATION_KEY][None])[0]
        exploration = (self.deploys(carry)[: self.trained] - self.base) / self.spread
        row = torch.cat([exploration.new_ones(1), exploration]) * is_exploring_step
        return step_carry | {
            GRAM_KEY: carry[GRAM_KEY] + row[:, None] * row,
            RIGHT_SIDE_KEY: carry[RIGHT_SIDE_KEY] + row[:, None] * f,
            LAST_LOCATION_KEY: f,
            OWN_STEPS_KEY: carry[OWN_STEPS_KEY] + 1,
            ROUND_STEP_KEY: carry[ROUND_STEP_KEY] + 1,
        }, loss

    def after_round(self, memory: dict[str, Tensor], cohort: Cohort) -> None:
        if not self.shared:
            return
        for name, pooled in ((GRAM_KEY, POOLED_GRAM_KEY), (RIGHT_SIDE_KEY, POOLED_RIGHT_SIDE_KEY)):
            client_values = cohort.gather(memory[name])
            sums_by_replicate = memory[pooled].unflatten(0, (cohort.federation.num_replicates, -1))
            sums_by_replicate += cohort.sum(client_values).to(sums_by_replicate.device)[:, None]
            cohort.scatter(memory[name], torch.zeros_like(client_values))

    def extra_transmitted_numbers(self, dimension: int) -> tuple[int, int]:
        size, p = self.trained + 1, self.estimator.size
        return (size * (size + p), size * (size + p)) if self.shared else (0, 0)
