"""Plug-in performative optimisation: first learn by regression how data answer, then optimise what was learnt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.core.constraints import Count, Positive
from fedsim.core.effects import StopsTraining
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation
from fedsim.core.placement import available_bytes
from fedsim.data.samples import Batch, ClientData
from fedsim.local import laws
from fedsim.local.estimators import FractionEstimator
from fedsim.local.exploring import exploration_noise, seed_memory
from fedsim.local.performative import PFL
from fedsim.local.rule import Carry, Objective
from fedsim.models import RowModel
from fedsim.shift import Shift

GRAM, RIGHT, LAST, STEPS, SLOPE = "gram", "right_side", "last_location", "own_steps", "slope"
POOLED_GRAM, POOLED_RIGHT, STEP = "pooled_gram", "pooled_right_side", "step_of_round"


class PlugIn(PFL):
    """Two stages (Miller, Perdomo and Zrnic 2021, for location families; Lin and Zrnic 2024, for models of the answer
    that need not be true; both by their abstracts): towards θ^PO where the model of the answer is right.

    1. In whole rounds, until a client has taken `explore` steps: deploy θ_0 + σ·noise, the same for all clients of a
       replicate, and regress the location f̂ of the samples (see `fedsim.local.laws`) on what was deployed: f = a + B θ.
       The client's model stays where it is.
    2. Deploy θ_0, whatever the model; samples z^0 that answer it stand for those that answer θ, z = z^0 + B̂ (θ − θ_0);
       θ ← Π(θ − η ∇_θ mean ℓ(z(θ); θ)), through z too.

    θ_0 is the middle of Θ, zero without a box. Data that move linearly, as under shift=location, demand, response and
    group_mean, are of that kind; shift=contribution is not. Memory: the normal equations, (d + 1)(d + 1 + p) + d p
    numbers of each client. Needs shift.deploy=step; under inertia B̂ is that of the first answer.

    Args:
        explore: steps of the first stage; more than there are parameters.
        spread: σ.
        shared: one B̂ for all clients, from the sum of their equations: the wrong model where they answer unequally.
        estimator: which f moves; auto: what the shift declares.
        **options: of PFL.
    """

    stops_training = (
        StopsTraining(
            "explore",
            lambda component, run: component.explore >= run.most_local_steps,
            "all local steps of the run explore; give fewer, or more rounds",
        ),
    )

    knows_round = True

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

    def setup(self, data: ClientData, shift: Shift, model: RowModel) -> None:
        if not shift.active or shift.deploy == "round":
            raise ConfigError(
                "local=plugin learns how data answer what each client deploys, and here they do not: set "
                "shift.deploy=step and a shift, or use local=pfl"
            )
        self.estimator, self.trained = laws.estimator(self.estimator_name, None, data, shift), model.trained
        if isinstance(self.estimator, FractionEstimator):
            raise ConfigError(
                f"local=plugin learns how a location moves, but shift={type(shift).__name__} moves fractions of "
                "groups; use local=profl, or another local.estimator"
            )
        if self.explore <= self.trained:
            raise ConfigError(
                f"local.explore={self.explore} deployments do not determine how data answer {self.trained} parameters; "
                f"give at least {self.trained + 1}"
            )

    def memory(self, federation: Federation, dimension: int) -> Carry:
        size, p = self.trained + 1, self.estimator.size
        needed_bytes = federation.rows * (1 + self.shared) * size * (size + 2 * p) * federation.dtype.itemsize
        if needed_bytes > available_bytes(federation.device, federation.storage):
            raise ConfigError(
                f"local=plugin needs {needed_bytes / 2**30:,.0f} GiB for the equations of "
                f"{federation.rows} clients, more "
                f"than there is (trainer.memory={federation.storage}); use a smaller model, or local=dfo"
            )
        equations = {GRAM: (size, size), RIGHT: (size, p)}
        pooled_shapes = {POOLED_GRAM: (size, size), POOLED_RIGHT: (size, p)} if self.shared else {}
        shapes = equations | pooled_shapes | {SLOPE: (self.trained, p), LAST: (p,)}
        memory = {name: federation.zeros(*shape) for name, shape in shapes.items()}
        return memory | seed_memory(federation) | {STEPS: federation.zeros(dtype=torch.int64)}

    def round_state(self, params: Tensor) -> Carry:
        return {STEP: torch.zeros(len(params), dtype=torch.int64, device=params.device)}

    def gradient_weight(self, step: int) -> float | None:
        return None

    def is_exploring(self, carry: Carry) -> Tensor:
        """[] bool: is the client in the first stage in this round?"""
        return carry[STEPS] - carry[STEP] < self.explore

    def deploys(self, carry: Carry) -> Tensor:
        exploration = self.spread * exploration_noise(carry, carry[STEP], self.trained)
        point = torch.where(self.is_exploring(carry), self.project(self.base + exploration), self.base)
        return torch.cat([point[: self.trained], carry["params"][self.trained :]])

    def on_round_start(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> Carry:
        gram, right = (carry[POOLED_GRAM], carry[POOLED_RIGHT]) if self.shared else (carry[GRAM], carry[RIGHT])
        slope = (torch.linalg.pinv(gram, hermitian=True) @ right)[1:] / self.spread
        return carry | {SLOPE: torch.where(self.is_exploring(carry), carry[SLOPE], slope)}

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        explores, slope = self.is_exploring(carry), carry[SLOPE]

        def answer(samples: Batch, theta: Tensor) -> Batch:
            return self.estimator.shift_batch(samples, (theta - self.base) @ slope)

        gradient, loss = objective.gradient_through(carry["params"], batch, answer)
        next_carry = self.updated(carry, gradient, lr)
        after = {name: torch.where(explores, carry[name], value) for name, value in next_carry.items()}
        chunk = {name: value[None] for name, value in batch.items()}
        weight = chunk.get("weight", torch.ones_like(chunk["x"].flatten(2)[:, :, 0]))
        f = self.estimator.fit(chunk, weight, carry[LAST][None])[0]
        exploration = (self.deploys(carry)[: self.trained] - self.base) / self.spread
        row = torch.cat([exploration.new_ones(1), exploration]) * explores
        return after | {
            GRAM: carry[GRAM] + row[:, None] * row,
            RIGHT: carry[RIGHT] + row[:, None] * f,
            LAST: f,
            STEPS: carry[STEPS] + 1,
            STEP: carry[STEP] + 1,
        }, loss

    def after_round(self, memory: dict[str, Tensor], cohort: Cohort) -> None:
        if not self.shared:
            return
        for name, pooled in ((GRAM, POOLED_GRAM), (RIGHT, POOLED_RIGHT)):
            new = cohort.gather(memory[name])
            sums_by_replicate = memory[pooled].unflatten(0, (cohort.federation.replicates, -1))
            sums_by_replicate += cohort.sum(new).to(sums_by_replicate.device)[:, None]
            cohort.scatter(memory[name], torch.zeros_like(new))

    def traffic(self, dimension: int) -> tuple[int, int]:
        size, p = self.trained + 1, self.estimator.size
        return (size * (size + p), size * (size + p)) if self.shared else (0, 0)
