"""Derivative-free optimisation: deploys perturbed models and observes their losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.core.constraints import Count, Positive
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.samples import Batch, ClientData
from fedsim.local.exploring import exploration_noise, replicate_seed_memory
from fedsim.local.performative import PFL
from fedsim.local.projection import Projection
from fedsim.local.rule import Carry, Objective
from fedsim.models import StatelessModel
from fedsim.shift import Shift

ASKED_POINTS_KEY, HEARD_LOSS_KEY, MEAN_LOSS_KEY, LOSS_COUNT_KEY = (
    "points_asked",
    "loss_heard",
    "mean_loss_heard",
    "losses_heard",
)


class DFO(PFL):
    """Derivative-free optimisation with one or two points (Flaxman et al. 2004): towards θ^PO, without a model of the
    data's reaction.

    A local step deploys a point and observes the mean loss on a batch that reacts to it. Two points give one step of
    the model: θ ← Π(θ − η (d/2δ) (ℓ(θ + δu) − ℓ(θ − δu)) u), u on the unit sphere, the same for all clients of a
    replicate. With one point, each step updates the model: θ ← Π(θ − η (d/δ) (ℓ(θ + δu) − b) u). Both points are
    evaluated by the same clients, on different batches; d is the number of trained parameters. On quadratic risks two
    points are unbiased for each δ, and exact for d = 1. With local_steps=2 `fedavg` averages the clients' differences;
    with more steps, clients continue independently within the round.

    Π projects so that points stay in Θ. One point has a variance of about (d PR/δ)², so it needs learning rates two
    orders of magnitude smaller. With inertia, losses are observed before the data have fully reacted. Needs
    shift.deploy=step. Memory: the replicate's seed, and with a baseline two numbers.

    Args:
        radius: δ.
        points: 1 or 2.
        baseline: for one point, b is the mean of the losses that the client has observed so far (its first step does
            not change the model); otherwise 0.
        **options: of PFL.
    """

    needs_round = True

    def __init__(self, radius: Positive = 0.1, points: Count = 2, baseline: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.radius = radius
        self.points, self.baseline = points, baseline
        self.indivisible = points == 2  # a step takes both
        if points > 2:
            raise ConfigError(key="points", value=points, needs="must be 1 or 2")
        if baseline and points == 2:
            raise ConfigError(
                "{baseline}=true is for one point; two have each other: set {points}=1",
                mentions=("baseline", "points"),
            )
        if points == 2 and (self.work.steps or 1) % 2:
            setting = (
                f"local_epochs={self.work.epochs}" if self.work.steps is None else f"local_steps={self.work.steps}"
            )
            raise ConfigError(
                f"{setting}, but {{points}}=2 makes a step of two; give an even number of local_steps",
                mentions=("points",),
            )
        projection_box, ball_radius = self.project.box, self.project.ball
        if 2 * self.radius >= (
            2 * ball_radius
            if ball_radius is not None
            else projection_box[1] - projection_box[0]
            if projection_box is not None
            else float("inf")
        ):
            raise ConfigError(
                key="radius",
                value=radius,
                needs="leaves no room in {box} or {ball}; lower it",
                mentions=("box", "ball"),
            )
        inner_box = (
            None if projection_box is None else [projection_box[0] + self.radius, projection_box[1] - self.radius]
        )
        self.project = Projection(inner_box, None if ball_radius is None else ball_radius - self.radius)

    def setup(self, data: ClientData, shift: Shift, model: StatelessModel) -> None:
        if shift.active and shift.deploy == "round":
            raise ConfigError("local=dfo learns from points that data react to one by one; set shift.deploy=step")
        self.trained = model.trained

    def memory(self, federation: Federation, dimension: int) -> Carry:
        baseline_memory = (
            {MEAN_LOSS_KEY: federation.zeros(), LOSS_COUNT_KEY: federation.zeros(dtype=torch.int64)}
            if self.baseline
            else {}
        )
        return replicate_seed_memory(federation) | baseline_memory

    def round_state(self, params: Tensor) -> Carry:
        count = torch.zeros(len(params), dtype=torch.int64, device=params.device)
        return {ASKED_POINTS_KEY: count, HEARD_LOSS_KEY: params.new_zeros(len(params))}

    def gradient_weight(self, step: int) -> float | None:
        return float(self.points == 1 or step % 2 == 1)

    def exploration_direction(self, carry: Carry) -> Tensor:
        """[d] u of this step."""
        noise = exploration_noise(carry, carry[ASKED_POINTS_KEY] // self.points, self.trained)
        return noise / noise.norm()

    def deploys(self, carry: Carry) -> Tensor:
        side = 1 - 2 * (carry[ASKED_POINTS_KEY] % self.points)
        return carry["params"] + self.radius * (side * self.exploration_direction(carry))

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        loss, u = objective.value(self.deploys(carry), batch), self.exploration_direction(carry)
        after = carry | {ASKED_POINTS_KEY: carry[ASKED_POINTS_KEY] + 1, HEARD_LOSS_KEY: loss}
        if self.points == 2:
            slope = self.trained / (2 * self.radius) * (carry[HEARD_LOSS_KEY] - loss)
            next_carry, pair_complete = self.updated(after, slope * u, lr), carry[ASKED_POINTS_KEY] % 2 == 1
            return {name: torch.where(pair_complete, value, after[name]) for name, value in next_carry.items()}, loss
        base_loss = torch.zeros_like(loss)
        if self.baseline:
            base_loss = torch.where(carry[LOSS_COUNT_KEY] > 0, carry[MEAN_LOSS_KEY], loss)
            count = carry[LOSS_COUNT_KEY] + 1
            after = after | {
                MEAN_LOSS_KEY: carry[MEAN_LOSS_KEY] + (loss - carry[MEAN_LOSS_KEY]) / count,
                LOSS_COUNT_KEY: count,
            }
        return self.updated(after, self.trained / self.radius * (loss - base_loss) * u, lr), loss
