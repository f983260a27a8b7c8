"""Attacks with knowledge of all honest rows, at the largest distance that does not exceed those between honest rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import Count, CountOrZero, Fraction, OneOf
from fedsim.core.effects import RoundParameter
from fedsim.core.federation import Federation
from fedsim.uplink import StageContext
from fedsim.uplink.attack.attack import Omniscient

PERTURBATION_DIRECTIONS = ("unit", "sign", "std")


class MaxDistanceAttack(Omniscient):
    """Sends μ + γ p of the honest rows, with the largest γ at which it is no farther away than one of them.

    γ is found by 20 halvings, as in the authors' program, which begins at 10: to 2e-5, and below 20. Where the largest
    γ is at least 20 or below 0.1 the search begins at another power of two times 10, so that γ follows the scale of the
    rows.

    Args:
        direction: p: 'unit' −μ/‖μ‖, 'sign' −sign(μ), or 'std' −σ.
        fraction, clients, since: see `fedsim.uplink.attack.Attack`.
    """

    def __init__(
        self,
        direction: Annotated[str, OneOf(*PERTURBATION_DIRECTIONS)] = "unit",
        fraction: Fraction = 0.2,
        clients: Sequence[CountOrZero] | None = None,
        since: CountOrZero = 0,
    ) -> None:
        super().__init__(fraction, clients, since)
        self.direction = direction

    @abstractmethod
    def distance(self, row: Tensor, honest_rows: Tensor) -> Tensor:
        """Return the distance [] of a row [d] from the honest rows [k, d]."""

    @abstractmethod
    def bound(self, centre: Tensor, direction: Tensor, honest_rows: Tensor, limit: Tensor) -> Tensor:
        """Return [] the largest γ at which `centre + γ along` is at distance `limit`, up to rounding: the scale of
        the search."""

    def attack_vector(self, honest_rows: Tensor, n: int) -> Tensor:
        centre = honest_rows.mean(0)
        if self.direction == "unit":
            direction = -centre / centre.norm().clamp(min=torch.finfo(centre.dtype).tiny)
        elif self.direction == "sign":
            direction = -centre.sign()
        else:
            direction = -honest_rows.std(0) if len(honest_rows) > 1 else torch.zeros_like(centre)
        limit = torch.stack([self.distance(row, honest_rows) for row in honest_rows]).max()
        bound = self.bound(centre.double(), direction.double(), honest_rows.double(), limit.double())
        power = torch.where((bound >= 20) | (bound < 0.1), (bound / 10).log2().floor(), 0.0)
        scale = torch.where(bound > 0, power.exp2(), 1.0).to(limit)  # a power of two: exact
        gamma, step = torch.zeros_like(limit), 10.0
        while step > 1e-5:
            distance = self.distance(centre + (gamma + step * scale) * direction, honest_rows)
            gamma = torch.where(distance <= limit, gamma + step * scale, gamma)
            step /= 2
        return centre + gamma * direction


def _positive_quadratic_root(square: Tensor, linear: Tensor, constant: Tensor) -> Tensor:
    """The largest γ of square γ² + 2 linear γ = rest, where square and rest are not negative; 0 without a square."""
    constant = constant.clamp(min=0.0)
    root = (linear.square() + square * constant).sqrt()
    gamma = torch.where(linear > 0, constant / (linear + root), (root - linear) / square)  # without cancellation
    return torch.where(square > 0, gamma, 0.0)


class MinMax(MaxDistanceAttack):
    """μ + γ p with the largest γ at which no honest row is farther than two honest ones are from each other
    (Shejwalkar and Houmansadr 2021).

    Args:
        direction, fraction, clients, since: see `MaxDistanceAttack`.
    """

    def distance(self, row: Tensor, honest_rows: Tensor) -> Tensor:
        return (row - honest_rows).norm(dim=1).max()

    def bound(self, centre: Tensor, direction: Tensor, honest_rows: Tensor, limit: Tensor) -> Tensor:
        differences = centre - honest_rows
        return _positive_quadratic_root(
            direction.square().sum(), differences @ direction, limit.square() - differences.square().sum(1)
        ).min()


class MinSum(MaxDistanceAttack):
    """μ + γ p with the largest γ at which the squared distances to the honest rows are in sum no more than those of one
    honest row (Shejwalkar and Houmansadr 2021; in their program: than the smallest of these sums).

    Args:
        direction, fraction, clients, since: see `MaxDistanceAttack`.
    """

    def distance(self, row: Tensor, honest_rows: Tensor) -> Tensor:
        return (row - honest_rows).square().sum()

    def bound(self, centre: Tensor, direction: Tensor, honest_rows: Tensor, limit: Tensor) -> Tensor:
        differences = centre - honest_rows
        return _positive_quadratic_root(
            len(honest_rows) * direction.square().sum(),
            (differences @ direction).sum(),
            limit - differences.square().sum(),
        )


class Mimic(Omniscient):
    """All Byzantine clients copy the same honest client, which thereby gets too much weight; no row is an outlier
    (Karimireddy, He and Jaggi 2022).

    It is the available client with the largest Σ_t ⟨z, G_i⟩ over the first rounds; z is the direction along which
    honest rows differ most, updated by one step of the power method in each of these rounds. After them z is fixed.
    Memory: z, and one number per client.

    Args:
        warmup: number of these rounds, from `since` on.
        fraction, clients, since: see `fedsim.uplink.attack.Attack`.
    """

    effective_if = (RoundParameter("warmup", added_to_round=lambda attack: attack.since),)

    def __init__(
        self,
        warmup: Count = 10,
        fraction: Fraction = 0.2,
        clients: Sequence[CountOrZero] | None = None,
        since: CountOrZero = 0,
    ) -> None:
        super().__init__(fraction, clients, since)
        self.warmup = warmup

    def memory(self, federation: Federation, dimension: int) -> dict[str, Tensor]:
        return {"score": federation.zeros()}

    def initial_server_memory(self, federation: Federation, dimension: int) -> dict[str, Tensor]:
        shape = federation.num_replicates, dimension
        return {"direction": torch.zeros(shape, dtype=federation.dtype, device=federation.device)}

    def byzantine_rows(self, rows: Tensor, byzantine: Tensor, link: StageContext) -> Tensor:
        score = link.gather("score")
        if link.cohort.round < self.since + self.warmup:
            score = score + (rows * link.cohort.broadcast(self.power_method_direction(rows, byzantine, link))).sum(1)
            link.scatter("score", score)
        return super().byzantine_rows(torch.cat([rows, score[:, None]], 1), byzantine, link)[:, :-1]

    def attack_vector(self, honest_rows: Tensor, n: int) -> Tensor:
        return honest_rows[honest_rows[:, -1].argmax(0, keepdim=True)][0]

    def power_method_direction(self, rows: Tensor, byzantine: Tensor, link: StageContext) -> Tensor:
        """Return [R, d] z after a step of the power method on the differences of honest rows; it may begin anywhere."""
        direction, cohort = link.server("direction"), link.cohort
        columns = torch.arange(rows.shape[1], device=rows.device)
        random_start = rng.normal(link.round_independent_keys[:, None], columns, rows.dtype)
        previous_direction = torch.where(
            direction.any(1, keepdim=True), direction, random_start / random_start.norm(dim=1, keepdim=True)
        )
        new_directions = []
        replicates = zip(
            cohort.split_by_replicate(rows),
            cohort.split_by_replicate(byzantine.to(rows.dtype)),
            previous_direction,
            strict=True,
        )
        for replicate_rows, lying_mask, z in replicates:
            honest_rows = replicate_rows[lying_mask == 0]
            deviations = honest_rows - honest_rows.mean(0)
            iterate = (deviations @ z) @ deviations if len(honest_rows) > 1 else torch.zeros_like(z)
            new_directions.append(torch.where(iterate.any(), iterate / iterate.norm(), z))
        direction.copy_(torch.stack(new_directions))
        return direction
