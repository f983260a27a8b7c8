"""The interface of an availability process: probabilities and counts, each a pure function of (seeds, round)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.core import rng
from fedsim.core.constraints import Validated
from fedsim.core.errors import ClientCountError, ConfigError
from fedsim.core.federation import Cohort, Federation


@dataclass
class Population:
    """The properties of clients that an availability process may use.

    Attributes:
        seeds: R of them.
        clients: m.
        class_fractions: [R, m, C] label distributions, or None.
        weights: [R, m] fraction of its replicate's data that each client holds; None is 1/m.
        names: what the clients are called in the data, m of them, or None.
        names_by_replicate: the same, R lists of m, where every replicate has its own clients (partition.shuffle=true).
    """

    seeds: tuple[int, ...]
    clients: int
    class_fractions: np.ndarray | None = None
    weights: np.ndarray | None = None
    names: tuple[str, ...] | None = None
    names_by_replicate: tuple[tuple[str, ...], ...] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(R, m)"""
        return len(self.seeds), self.clients


def draw_uniforms(
    population: Population, purpose: rng.Purpose, *counters: int, size: int | tuple[int, ...] | None = None
) -> np.ndarray:
    """[R, *size] numbers in [0, 1) by replicate, keyed by its seed, the purpose and the counters; one for each client
    where no size is given."""
    size = population.clients if size is None else size
    return rng.draws_by_seed(population.seeds, lambda draw: draw.random(size), purpose, *counters)


def client_groups(clients: int, groups: int) -> np.ndarray:
    """[m] the group of every client: as many in a row, as evenly as can be."""
    return np.arange(clients) * groups // clients


def expand_group_values(key: str, group_values: Sequence[float], clients: int) -> np.ndarray:
    """[m] every client's value: one for all, or one for each of as many groups in order."""
    if not group_values:
        raise ConfigError(f"{key}=[] is empty; give one number, or one for each of several groups")
    if len(group_values) > clients:
        raise ClientCountError(f"{key} has {len(group_values)} groups, more than {{clients}}", clients=clients)
    return np.asarray(group_values, dtype=np.float64)[client_groups(clients, len(group_values))]


class Availability(Validated, ABC):
    """Determines how often each client participates in each round: 0 or 1, or its multiplicity in a multiset.

    Attributes:
        law: for algorithms that are defined under one law alone: 'full' everybody, always; 'uniform_k' K clients
            uniformly without replacement; 'multiset' K draws with replacement by the data fractions; the name of any
            other; '' where a process of one's own does not say, which is then taken at its word.
        changes_population: whether clients join after round 0, or leave for good.
        unknown_reason: why the true p_i^t are unknown, as the rest of a sentence; '' where `probabilities` are true.
    """

    changes_population: bool = False
    law: str = ""
    unknown_reason: str = ""
    population: Population
    federation: Federation | None = None

    def setup(self, population: Population) -> None:
        """Fix who exists. Override to precompute or to check the options against the population."""
        self.population = population

    def present(self, t: int) -> np.ndarray:
        """[R, m] bool: the clients that have joined by round t and have not left for good."""
        return np.ones(self.population.shape, dtype=bool)

    def departed(self, t: int) -> np.ndarray:
        """[R, m] bool: the clients that have left for good by round t."""
        return np.zeros(self.population.shape, dtype=bool)

    def check_rounds(self, rounds: int) -> None:
        """Refuse a run of more rounds than the process knows (most know them all)."""

    def loaded_arrays(self) -> dict[str, np.ndarray]:
        """What was read from a file, by names of its own: a resumed run must meet the same."""
        return {}

    def require_known_probabilities(self, strategy: str) -> None:
        """Refuse a strategy that divides by p_i^t where the process does not know it."""
        if self.unknown_reason:
            raise ConfigError(
                f"{strategy} divides by the true probabilities, and availability={type(self).__name__} "
                f"{self.unknown_reason}; choose a strategy that does not need them, such as fedau, fedawe or mifa"
            )

    @abstractmethod
    def probabilities(self, t: int) -> np.ndarray:
        """[R, m] the true p_i^t: the expected count, for those who may ask (`fedavg_known`). A probability in [0, 1],
        but for `Multiset`, where a client may be expected more than once. Where it is unknown, an estimate."""

    @abstractmethod
    def counts(self, t: int) -> np.ndarray:
        """[R, m] how often each client takes part in round t."""

    def bind(
        self, federation: Federation, names_by_replicate: tuple[tuple[str, ...], ...] | None = None
    ) -> Availability:
        """Set up for a federation, so that `sample` can return cohorts.

        `names_by_replicate` are R lists of m names of clients, where replicates do not share them.
        """
        weights = federation.data_fractions.reshape(federation.num_replicates, federation.clients)
        fractions, names = federation.class_fractions, federation.client_names
        self.population = Population(
            federation.seeds, federation.clients, fractions, weights, names, names_by_replicate
        )
        self.setup(self.population)
        self.federation = federation
        return self

    def sample(self, t: int) -> Cohort:
        """The clients that take part in round t, on the federation's device."""
        if self.federation is None:
            raise ConfigError(f"{type(self).__name__}.sample needs bind(federation) first")
        probabilities, counts = self.probabilities(t), self.counts(t)
        self.check_numbers(t, "probabilities", probabilities)
        self.check_numbers(t, "counts", counts)
        return self.federation.make_cohort(counts, probabilities, t)

    def check_numbers(self, t: int, quantity_name: str, quantity_values: np.ndarray) -> None:
        """Refuse probabilities that are none, and counts below 0, of round t."""
        upper_bound = 1.0 if quantity_name == "probabilities" and self.law != "multiset" else np.inf
        shape = quantity_values.shape if isinstance(quantity_values, np.ndarray) else None
        if shape != self.population.shape:
            raise ConfigError(
                f"availability={type(self).__name__}: {quantity_name}({t}) must be an array "
                f"{list(self.population.shape)}, one "
                f"row per seed, and is {type(quantity_values).__name__ if shape is None else list(shape)}"
            )
        if quantity_values.dtype.kind not in "biuf":
            raise ConfigError(
                f"availability={type(self).__name__}: {quantity_name}({t}) must be numbers, and is an array of "
                f"{quantity_values.dtype}"
            )
        if quantity_values.size and not (quantity_values.min() >= 0 and quantity_values.max() <= upper_bound):
            bad_position = np.argwhere(~((quantity_values >= 0) & (quantity_values <= upper_bound)))[0]
            raise ConfigError(
                f"availability={type(self).__name__}: {quantity_name}({t}) of client {bad_position[1]} is "
                f"{quantity_values[tuple(bad_position)]:g}, which is not "
                f"{'in [0, 1]' if upper_bound == 1 else '0 or more'}"
            )
        if quantity_name == "counts" and quantity_values.dtype.kind == "f" and (quantity_values % 1).any():
            bad_position = np.argwhere(quantity_values % 1)[0]
            raise ConfigError(
                f"availability={type(self).__name__}: {quantity_name}({t}) of client {bad_position[1]} is "
                f"{quantity_values[tuple(bad_position)]:g}, and a client participates a whole number of times"
            )
