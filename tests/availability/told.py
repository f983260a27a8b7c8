"""What processes are told: probabilities, distributions of labels, populations of seeds, a recorded trace, a log."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsim.availability import (
    Availability,
    Population,
    Probability,
)


class Given(Probability):
    """The p_i it is told, for every replicate."""

    def __init__(self, *p: float) -> None:
        self.p = np.array(p)

    def base(self, population: Population) -> np.ndarray:
        return np.broadcast_to(self.p, (len(population.seeds), len(self.p))).copy()


def ready_for(process: Availability, seeds: tuple[int, ...] = (0, 1), clients: int = 6, **known) -> Availability:
    process.setup(Population(seeds, clients, **known))
    return process


TRACE = np.round(np.random.default_rng(0).random((7, 5)), 2)

CLIENTS, CLASSES = 12, 10


def fractions_of(seed: int, clients: int = CLIENTS) -> np.ndarray:
    """[m, C] label distributions that belong to a seed, as a partition's would."""
    return np.random.default_rng(seed).dirichlet(np.full(CLASSES, 0.3), clients)


def people(*seeds: int, clients: int = CLIENTS) -> Population:
    return Population(seeds, clients, np.stack([fractions_of(s, clients) for s in seeds]))


def ready(process: Availability, population: Population) -> Availability:
    process.setup(population)
    return process


PEOPLE = ("ann", "bob", "cem")
LOG = "client,from,to\nann,0,10\nbob,5,25\nbob,20,30\ncem,12,12\n"  # rounds of 10: ann; bob; bob


def file(folder: Path, text: str, name: str = "log.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def played(process: Availability, rounds: int, names: tuple[str, ...] | None = PEOPLE, clients: int = 3) -> list:
    """[T][m] of one replicate."""
    ready_for(process, (0,), clients if names is None else len(names), names=names)
    return [process.counts(t)[0].tolist() for t in range(rounds)]
