"""The contract of an availability process: probabilities and counts, each a pure function of (seeds, round)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation


@dataclass
class Population:
    """What an availability process may know of the clients.

    Attributes:
        seeds: R of them.
        clients: m.
        class_fractions: [R, m, C] label distributions, or None.
        weights: [R, m] fraction of its replicate's data that each client holds; None is 1/m.
        names: what the clients are called in the data, m of them, or None.
    """

    seeds: tuple[int, ...]
    clients: int
    class_fractions: np.ndarray | None = None
    weights: np.ndarray | None = None
    names: tuple[str, ...] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(R, m)"""
        return len(self.seeds), self.clients


class Availability(ABC):
    """Says for every round how often each client takes part: 0 or 1, or a multiset's multiplicity.

    Attributes:
        law: for algorithms that are defined under one law alone: 'full' everybody, always; 'uniform_k' K clients
            uniformly without replacement; 'multiset' K draws with replacement by the data fractions; the name of any
            other; '' where a process of one's own does not say, which is then taken at its word.
    """

    law: str = ""
    population: Population
    federation: Federation | None = None

    def setup(self, population: Population) -> None:
        """Fix who exists. Override to precompute or to check the options against the population."""
        self.population = population

    def check_rounds(self, rounds: int) -> None:
        """Refuse a run of more rounds than the process knows (most know them all)."""

    @abstractmethod
    def probabilities(self, t: int) -> np.ndarray:
        """[R, m] the true p_i^t: the expected count, for those who may ask (`fedavg_known`). A probability in [0, 1],
        but for `Multiset`, where a client may be expected more than once."""

    @abstractmethod
    def counts(self, t: int) -> np.ndarray:
        """[R, m] how often each client takes part in round t."""

    def bind(self, federation: Federation) -> Availability:
        """Set up for a federation, so that `sample` can return cohorts."""
        weights = federation.data_fractions.reshape(federation.replicates, federation.clients)
        fractions, names = federation.class_fractions, federation.names
        self.setup(Population(federation.seeds, federation.clients, fractions, weights, names))
        self.federation = federation
        return self

    def sample(self, t: int) -> Cohort:
        """The clients that take part in round t, on the federation's device."""
        if self.federation is None:
            raise ConfigError(f"{type(self).__name__}.sample needs bind(federation) first")
        return self.federation.cohort(self.counts(t), self.probabilities(t))
