"""Office hours: clients all over the world, who take part while they are at work."""

from __future__ import annotations

import numpy as np

from fedsim.availability import Availability, Population, bernoulli
from fedsim.core import rng
from fedsim.core.constraints import Count, Fraction


class OfficeHours(Availability):
    """A round lasts an hour; client i, in its time zone, takes part with probability `day` from 9 to 17, else `night`.

    Args:
        day, night: the two probabilities.
        zones: number of time zones; each client of each replicate gets one at random.
    """

    def __init__(self, day: Fraction = 0.9, night: Fraction = 0.05, zones: Count = 24) -> None:
        self.day = day
        self.night = night
        self.zones = zones

    def setup(self, population: Population) -> None:
        super().setup(population)
        draws = [rng.generator(seed, rng.Purpose.PROBABILITY) for seed in population.seeds]
        self.zone = np.stack([draw.integers(self.zones, size=population.clients) for draw in draws])

    def probabilities(self, t: int) -> np.ndarray:
        hour = (t + self.zone) % 24
        return np.where((hour >= 9) & (hour < 17), self.day, self.night)

    def counts(self, t: int) -> np.ndarray:
        return bernoulli(self.probabilities(t), self.population, t)
