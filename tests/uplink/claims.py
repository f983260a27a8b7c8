"""Runs that claim an ε: stages, who takes part, the strategy and the rounds, each small enough to be audited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedsim import Execution, Simulation
from fedsim.availability import Availability, Bernoulli, Cyclic, Full, Groups, Lognormal, Sine, Uniform, UniformK
from fedsim.data.datasets import Quadratics
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.strategies import MIFA, FedAvg, FedAvgAll, FedAvgM, FedOpt, FedProx, Strategy
from fedsim.uplink import QSGD, Clip, GaussianNoise, Stage, TopK, TreeNoise, Uplink

SUM, MEAN, ROWS = FedAvgAll, FedAvg, MIFA  # strategies, by what their server makes of the rows


@dataclass(frozen=True)
class Case:
    """One run of ten clients; its parts are built anew for each simulation."""

    stages: Callable[[], list[Stage]]
    availability: Callable[[], Availability] = Full
    strategy: Callable[[], Strategy[Any]] = FedAvg
    rounds: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def simulation(self) -> Simulation:
        return Simulation(
            Quadratics(clients=10), Mean, clients=10, availability=self.availability(), rounds=self.rounds,
            strategy=self.strategy(), local=SGD(lr=0.1, steps=1), uplink=Uplink(*self.stages()),
            execution=Execution(dtype="float64"), **self.options,
        )  # fmt: skip


def noise(**options: Any) -> Callable[[], list[Stage]]:
    return lambda: [GaussianNoise(**options)]


def coins(p: float) -> Callable[[], Availability]:
    return lambda: Bernoulli(Uniform(p))


CORRECT = {
    "everybody": Case(noise(multiplier=1.0)),
    "everybody, four rounds": Case(noise(multiplier=2.0), rounds=4),
    "everybody, an adaptive norm": Case(noise(multiplier=2.0, quantile=0.5, count_noise=1.01)),
    "everybody, an adaptive norm, three rounds": Case(
        noise(multiplier=1.0, quantile=0.5, count_noise=1.0), rounds=3, strategy=FedAvgM
    ),
    "everybody, little noise in the count": Case(
        noise(multiplier=1.0, quantile=0.3, count_noise=0.6), strategy=FedProx
    ),
    "in turn": Case(noise(multiplier=1.5, quantile=0.7, count_noise=2.0), lambda: Cyclic(2), rounds=4),
    "coins that are known": Case(noise(multiplier=1.5), coins(0.6), lambda: FedOpt(), rounds=2),
    "secret coins": Case(noise(multiplier=1.0), coins(0.9), SUM, rounds=2),
    "secret coins, an adaptive norm": Case(
        noise(multiplier=1.5, quantile=0.5, count_noise=1.5), coins(0.8), SUM, rounds=2
    ),
    "secret coins of two kinds that move": Case(
        noise(multiplier=2.0), lambda: Bernoulli(Groups(0.7, 0.9), Sine(0.2, 4)), SUM, rounds=3
    ),
    "k of m": Case(noise(multiplier=2.0), lambda: UniformK(4), rounds=2),
    "k of m, an adaptive norm": Case(
        noise(multiplier=2.0, quantile=0.5, count_noise=1.6), lambda: UniformK(8), SUM, rounds=2
    ),
    "noise in each row": Case(noise(multiplier=3.0, per="client"), strategy=MIFA, rounds=2),
    "noise in each row, an adaptive norm": Case(
        noise(multiplier=2.0, quantile=0.4, count_noise=2.0, per="client"), coins(0.6), MIFA, rounds=2
    ),
    "a tree": Case(lambda: [TreeNoise(multiplier=2.0)], lambda: Cyclic(5), SUM, rounds=5),
    "a tree, in an order that is drawn": Case(
        lambda: [TreeNoise(multiplier=2.0)], lambda: Cyclic(4, reshuffle="order"), rounds=4
    ),
    "a tree, by coins that happen to come up once": Case(
        lambda: [TreeNoise(multiplier=2.0)], lambda: Bernoulli(Uniform(0.1)), rounds=3
    ),
    "a norm of its own before the noise": Case(
        lambda: [Clip(quantile=0.4, count_noise=1.2), GaussianNoise(multiplier=2.0)], rounds=2
    ),
    "a tree after a norm of its own": Case(
        lambda: [Clip(quantile=0.4, count_noise=1.5), TreeNoise(multiplier=2.0)], lambda: Cyclic(3), rounds=3
    ),
    "compressed before": Case(lambda: [TopK(k=1), QSGD(4), GaussianNoise(multiplier=2.0)], rounds=2),
    "noise in each row, compressed after": Case(
        lambda: [GaussianNoise(multiplier=3.0, per="client"), QSGD(8)], strategy=MIFA
    ),
    "secret coins, unequal": Case(noise(multiplier=2.0), lambda: Bernoulli(Lognormal(), floor=0.7), FedAvgAll),
}
