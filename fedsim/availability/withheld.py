"""An availability process for all clients but the last few, which never come."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedsim.availability.base import Availability, Population


class Withheld(Availability):
    """The process `inner`, as it would be without the last clients of every replicate; these are never available.

    Args:
        inner: what the others follow; it knows nothing of the withheld.
        clients: how many are withheld.
    """

    def __init__(self, inner: Availability, clients: int) -> None:
        self.inner, self.withheld = inner, clients

    def setup(self, population: Population) -> None:
        super().setup(population)
        kept = population.clients - self.withheld
        fractions, weights = population.class_fractions, population.weights
        if weights is not None:
            weights = weights[:, :kept] / weights[:, :kept].sum(1, keepdims=True)
        fractions = None if fractions is None else fractions[:, :kept]
        self.inner.setup(replace(population, clients=kept, class_fractions=fractions, weights=weights))

    def check_rounds(self, rounds: int) -> None:
        self.inner.check_rounds(rounds)

    def probabilities(self, t: int) -> np.ndarray:
        return np.pad(self.inner.probabilities(t), ((0, 0), (0, self.withheld)))

    def counts(self, t: int) -> np.ndarray:
        return np.pad(self.inner.counts(t), ((0, 0), (0, self.withheld)))
