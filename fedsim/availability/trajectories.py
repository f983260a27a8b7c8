"""Trajectories f_i(t): how a base probability changes over rounds (fedawe App. J.3; fedpbc §VI)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from fedsim.availability.availability import Population, draw_uniforms
from fedsim.core import rng
from fedsim.core.constraints import Count, Fraction, Validated
from fedsim.core.effects import EffectiveIf


class Trajectory(Validated, ABC):
    """A factor on base probabilities that depends on the round."""

    @abstractmethod
    def at(self, t: int, base_probabilities: np.ndarray, population: Population) -> np.ndarray:
        """[R, m] p_i^t before clipping to [0, 1].

        Args:
            t: round, from 0.
            base_probabilities: [R, m] p_i.
            population: for trajectories that draw.
        """


class Stationary(Trajectory):
    """f(t) = 1."""

    def at(self, t: int, base_probabilities: np.ndarray, population: Population) -> np.ndarray:
        return base_probabilities


class _Periodic(Trajectory):
    """A trajectory that repeats.

    Args:
        period: rounds.
        zones: time zones; client i is in zone z = ⌊i · zones / m⌋, where it is z/zones of a period later.
    """

    def __init__(self, period: Count, zones: Count = 1) -> None:
        self.period = period
        self.zones = zones

    def period_position(self, t: int, population: Population) -> np.ndarray:
        """Return [m] in [0, period): the position in each client's own period when round t begins."""
        zone_number = np.arange(population.clients) * self.zones // population.clients
        return (t + zone_number * self.period / self.zones) % self.period


class Staircase(_Periodic):
    """f(t) = 1 in the first part of each period, `low` in the rest of it.

    Args:
        period: rounds.
        low: f(t) in the second part of a period.
        share: fraction of a period that the first part takes.
    """

    effective_if = (
        EffectiveIf(
            "low",
            lambda component, run: component.zones > 1 or run.rounds > component.share * component.period,
            "more rounds than the first part of the period",
        ),
        EffectiveIf(
            "share",
            lambda component, run: component.zones > 1 or run.rounds > component.share * component.period,
            "more rounds than the first part of the period",
        ),
        EffectiveIf(
            "period",
            lambda component, run: component.zones > 1 or run.rounds > component.share * component.period,
            "more rounds than the first part of the period",
        ),
    )

    def __init__(self, period: Count = 20, low: Fraction = 0.4, share: Fraction = 0.5, zones: Count = 1) -> None:
        super().__init__(period, zones)
        self.low = low
        self.share = share

    def at(self, t: int, base_probabilities: np.ndarray, population: Population) -> np.ndarray:
        return np.where(
            self.period_position(t, population) < self.share * self.period,
            base_probabilities,
            base_probabilities * self.low,
        )


class Sine(_Periodic):
    """f(t) = γ sin(2πt / P) + (1 − γ)."""

    def __init__(self, gamma: Fraction = 0.3, period: Count = 20, zones: Count = 1) -> None:
        super().__init__(period, zones)
        self.gamma = gamma

    def at(self, t: int, base_probabilities: np.ndarray, population: Population) -> np.ndarray:
        if self.zones == 1:
            return base_probabilities * (self.gamma * math.sin(2 * math.pi * t / self.period) + (1 - self.gamma))
        angle = 2 * math.pi * self.period_position(t, population) / self.period
        return base_probabilities * (self.gamma * np.sin(angle) + (1 - self.gamma))


class InterleavedSine(Sine):
    """The sine, set to zero where p_i·f(t) < δ₀: clients with different p_i are unavailable at different times."""

    effective_if = (
        EffectiveIf(
            "cutoff",
            lambda component, run: run.any_probability(lambda p: p < component.cutoff),
            "smaller probabilities of some client",
        ),
    )

    def __init__(self, gamma: Fraction = 0.3, period: Count = 20, cutoff: Fraction = 0.1, zones: Count = 1) -> None:
        super().__init__(gamma, period, zones)
        self.cutoff = cutoff

    def at(self, t: int, base_probabilities: np.ndarray, population: Population) -> np.ndarray:
        probabilities = super().at(t, base_probabilities, population)
        return np.where(probabilities >= self.cutoff, probabilities, 0.0)


class Jitter(Trajectory):
    """p_i^t = p_i + U(−width, width), fresh for every round and client (fedpbc §VI)."""

    def __init__(self, width: Fraction = 0.02) -> None:
        self.width = width

    def at(self, t: int, base_probabilities: np.ndarray, population: Population) -> np.ndarray:
        return base_probabilities + self.width * (2.0 * draw_uniforms(population, rng.Purpose.TRAJECTORY, t) - 1.0)
