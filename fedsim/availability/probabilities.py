"""Base probabilities p_i of clients, which trajectories multiply."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from fedsim.availability.availability import Population, draw_uniforms
from fedsim.core import rng
from fedsim.core.constraints import Fraction, NonNegative, Validated
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ClientCountError, ConfigError


class Probability(Validated, ABC):
    """Base probabilities of every virtual client."""

    @abstractmethod
    def base(self, population: Population) -> np.ndarray:
        """[R, m] p_i in [0, 1]."""


class Uniform(Probability):
    """The same probability p for all clients."""

    def __init__(self, p: Fraction = 0.5) -> None:
        self.p = p

    def base(self, population: Population) -> np.ndarray:
        return np.full((len(population.seeds), population.clients), self.p)


class Groups(Probability):
    """The first half of the clients has p0, the second p1 (fedpbc §VI); more groups: `p`, one entry each."""

    effective_if = (
        EffectiveIf(
            "p0",
            lambda component, run: component.settings["p"] is None,
            "{at}.p=null, which gives the probabilities of all groups",
            attribute="settings.p0",
        ),
        EffectiveIf(
            "p1",
            lambda component, run: component.settings["p"] is None,
            "{at}.p=null, which gives the probabilities of all groups",
            attribute="settings.p1",
        ),
    )

    def __init__(self, p0: Fraction = 0.1, p1: Fraction = 0.9, p: list[Fraction] | None = None) -> None:
        self.settings = {"p0": p0, "p1": p1, "p": p}
        if p is None:
            values = [p0, p1]
        else:
            values = list(p)
            if not values:
                raise ConfigError(key="p", value=[], needs="must hold one probability per group")
        self.p = np.array(values)

    def base(self, population: Population) -> np.ndarray:
        m = population.clients
        if len(self.p) > m:
            raise ClientCountError(f"availability.base has {len(self.p)} groups, more than {{clients}}", clients=m)
        group = np.arange(m) * len(self.p) // m
        return np.broadcast_to(self.p[group], (len(population.seeds), m)).copy()


class ClassCorrelated(Probability):
    """p_i = ⟨ν_i, φ⟩: availability is correlated with the client's labels (fedawe App. J.3).

    ν_i is the client's actual label distribution; φ_c ~ U(0, Φ_c), with Φ_c = `high` for the first half of the classes
    and `low` for the rest. φ is drawn once per replicate.
    """

    def __init__(self, high: Fraction = 1.0, low: Fraction = 0.5) -> None:
        self.high = high
        self.low = low

    def base(self, population: Population) -> np.ndarray:
        label_fractions = population.class_fractions
        if label_fractions is None:
            raise ConfigError(
                "availability/base=class_correlated needs class labels and this data set has none; "
                "use availability/base=uniform or groups"
            )
        classes = label_fractions.shape[-1]
        bound = np.where(np.arange(classes) < (classes + 1) // 2, self.high, self.low)
        phi = bound * draw_uniforms(population, rng.Purpose.PROBABILITY, size=classes)
        return np.einsum("rmc,rc->rm", label_fractions, phi)


class LabelOrdered(Probability):
    """Clients with small labels are rarely available: p_i = low + (1 − low) · (smallest label held) / (C − 1).

    Our reading of MIFA's construction (Gu et al. 2021), where every client holds two classes and low is its p_min.
    """

    def __init__(self, low: Fraction = 0.1) -> None:
        self.low = low

    def base(self, population: Population) -> np.ndarray:
        fractions = population.class_fractions
        if fractions is None:
            raise ConfigError("availability/base=label_ordered needs class labels and this data set has none")
        smallest_label = (fractions > 0).argmax(2)
        return self.low + (1 - self.low) * smallest_label / max(fractions.shape[2] - 1, 1)


class Lognormal(Probability):
    """p_i = T_i / max_j T_j with T_i ~ lognormal(0, σ²): home devices (Ribero et al. 2023, §5).

    With `trajectory: sine` it is their smartphones' day and night.
    """

    def __init__(self, sigma: NonNegative = 0.5) -> None:
        self.sigma = sigma

    def base(self, population: Population) -> np.ndarray:
        size = population.clients
        times = rng.draws_by_seed(
            population.seeds, lambda draw: draw.lognormal(0.0, self.sigma, size), rng.Purpose.PROBABILITY
        )
        return times / times.max(1, keepdims=True)
