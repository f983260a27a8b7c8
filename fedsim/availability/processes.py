"""Who shows up, given the probabilities: everybody, k at random, or each client by its own coin."""

from __future__ import annotations

import numpy as np

from fedsim import checks, rng
from fedsim.availability.base import Availability, Population
from fedsim.availability.probabilities import Probability, Uniform
from fedsim.availability.trajectories import Stationary, Trajectory
from fedsim.errors import ConfigError


class Full(Availability):
    """Everybody, always."""

    def probabilities(self, t: int) -> np.ndarray:
        return np.ones((len(self.population.seeds), self.population.clients))

    def counts(self, t: int) -> np.ndarray:
        return np.ones((len(self.population.seeds), self.population.clients), dtype=np.int8)


class UniformK(Availability):
    """k clients, uniformly without replacement (p-fedavg's scheme II draws like this)."""

    def __init__(self, k: int = 10) -> None:
        self.k = checks.whole("availability.k", k)

    def setup(self, population: Population) -> None:
        if self.k > population.clients:
            raise ConfigError(f"availability.k={self.k} exceeds clients={population.clients}")
        super().setup(population)

    def probabilities(self, t: int) -> np.ndarray:
        m = self.population.clients
        return np.full((len(self.population.seeds), m), self.k / m)

    def counts(self, t: int) -> np.ndarray:
        counts = np.zeros((len(self.population.seeds), self.population.clients), dtype=np.int8)
        for replicate, seed in enumerate(self.population.seeds):
            draw = rng.generator(seed, rng.Purpose.AVAILABILITY, t)
            counts[replicate, draw.choice(self.population.clients, self.k, replace=False, shuffle=False)] = 1
        return counts


class Bernoulli(Availability):
    """Every client by its own independent coin with p_i^t = clip(p_i · f_i(t), 0, 1) (fedawe §3, fedpbc §III)."""

    def __init__(self, base: Probability | None = None, trajectory: Trajectory | None = None) -> None:
        self.base = base or Uniform()
        self.trajectory = trajectory or Stationary()

    def setup(self, population: Population) -> None:
        super().setup(population)
        self._base = self.base.base(population)

    def probabilities(self, t: int) -> np.ndarray:
        return np.clip(self.trajectory.at(t, self._base, self.population), 0.0, 1.0)

    def counts(self, t: int) -> np.ndarray:
        coins = [
            rng.generator(s, rng.Purpose.AVAILABILITY, t).random(self.population.clients) for s in self.population.seeds
        ]
        return (np.stack(coins) < self.probabilities(t)).astype(np.int8)
