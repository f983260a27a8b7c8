"""Availability processes: all clients, k at random, or independent draws with given probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from fedsim.availability.availability import Availability, Population, draw_uniforms
from fedsim.availability.probabilities import Probability, Uniform
from fedsim.availability.trajectories import Stationary, Trajectory
from fedsim.core import rng
from fedsim.core.constraints import Count, Fraction
from fedsim.core.effects import EffectDeclarations, EffectiveIf
from fedsim.core.errors import ClientCountError


class Full(Availability):
    """All clients in all rounds."""

    law = "full"

    def probabilities(self, t: int) -> np.ndarray:
        return np.ones(self.population.shape)

    def counts(self, t: int) -> np.ndarray:
        return np.ones(self.population.shape, dtype=np.int8)


class UniformK(Availability):
    """k clients, uniformly without replacement (p-fedavg's scheme II draws like this)."""

    law = "uniform_k"

    def __init__(self, k: Count = 10) -> None:
        self.k = k

    def setup(self, population: Population) -> None:
        if self.k > population.clients:
            raise ClientCountError(f"availability.k={self.k} exceeds {{clients}}", clients=population.clients)
        super().setup(population)

    def probabilities(self, t: int) -> np.ndarray:
        return np.full(self.population.shape, self.k / self.population.clients)

    def counts(self, t: int) -> np.ndarray:
        counts = np.zeros(self.population.shape, dtype=np.int8)
        for replicate, seed in enumerate(self.population.seeds):
            draw = rng.generator(seed, rng.Purpose.AVAILABILITY, t)
            counts[replicate, draw.choice(self.population.clients, self.k, replace=False, shuffle=False)] = 1
        return counts


class Bernoulli(Availability):
    """Independent draws with probabilities p_i^t = clip(p_i · f_i(t), floor, 1) (fedawe §3, fedpbc §III).

    Args:
        base: p_i.
        trajectory: f_i(t).
        floor: least probability of any client in any round (0.02 in FedAU's experiments).

    Attributes:
        base_probabilities: [R, m] p_i.
    """

    effective_if: EffectDeclarations = (
        EffectiveIf(
            "floor",
            lambda component, run: run.any_probability(lambda p: p <= component.floor),
            "smaller probabilities of some client",
        ),
    )

    law = "bernoulli"

    def __init__(
        self, base: Probability | None = None, trajectory: Trajectory | None = None, floor: Fraction = 0.0
    ) -> None:
        self.base = base or Uniform()
        self.trajectory = trajectory or Stationary()
        self.floor = floor

    def setup(self, population: Population) -> None:
        super().setup(population)
        self.base_probabilities = self.base.base(population)

    def probabilities(self, t: int) -> np.ndarray:
        return np.clip(self.trajectory.at(t, self.base_probabilities, self.population), self.floor, 1.0)

    def counts(self, t: int) -> np.ndarray:
        return bernoulli(self.probabilities(t), self.population, t)


def bernoulli(probabilities: np.ndarray, population: Population, t: int) -> np.ndarray:
    """Return [R, m] independent draws of round t."""
    return (draw_uniforms(population, rng.Purpose.AVAILABILITY, t) < probabilities).astype(np.int8)


class Multiset(Availability):
    """K draws with replacement, with probabilities w_i, the data fractions (p-fedavg's scheme I)."""

    law = "multiset"

    def __init__(self, k: Count = 10) -> None:
        self.k = k

    def setup(self, population: Population) -> None:
        super().setup(population)
        uniform = np.full(population.shape, 1.0 / population.clients)
        weights = uniform if population.weights is None else np.asarray(population.weights, dtype=np.float64)
        self._weights = weights / weights.sum(1, keepdims=True)

    def probabilities(self, t: int) -> np.ndarray:
        """[R, m] expected counts K·w_i. Where K·w_i > 1 this is no probability: the client is expected more than once a
        round, and `fedavg_known` divides by that expectation."""
        return self.k * self._weights

    def counts(self, t: int) -> np.ndarray:
        draws = [
            rng.generator(seed, rng.Purpose.AVAILABILITY, t).multinomial(self.k, weights)
            for seed, weights in zip(self.population.seeds, self._weights, strict=True)
        ]
        return np.stack(draws)


S = TypeVar("S")


class RoundStates(Generic[S]):
    """The states of rounds 0, 1, …, computed from the last requested round; for an earlier round from the first.

    Args:
        step: the state of round t from that of round t − 1, which is None for t = 0 and must be left as it is. All that
            it draws is keyed by t.
    """

    def __init__(self, step: Callable[[S | None, int], S]) -> None:
        self._step = step
        self._round = -1
        self._state: S | None = None

    def at(self, t: int) -> S:
        """The state of round t."""
        if t < self._round:
            self._round, self._state = -1, None
        while self._round < t:
            self._state = self._step(self._state, self._round + 1)
            self._round += 1
        assert self._state is not None
        return self._state
