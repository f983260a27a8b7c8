"""What a new strategy's test needs: a naive version client by client, five rounds of unequal clients, a comparison.

A naive version derives from `Naive` and says what a round does, in NumPy; it shares no code with fedsim's. Whatever
attributes it has under the names of the state's fields are compared with them after every round.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from naive_strategies import CLIENTS, LRS, SEEDS, UNIFORM, Learner
from torch import nn

from fedsim import Execution, Simulation
from fedsim.core.ties import tie_breakers
from fedsim.data.datasets import Quadratics
from fedsim.models import Mean

ROUNDS = 5
PROBABILITIES = (0.9, 0.5, 0.3, 0.8)  # what `availability.probabilities` says; the script is no draw from it


def script() -> np.ndarray:
    """[T, R, m]: round 2 is empty, round 3 for the second replicate; one client comes late, one alone."""
    words = ["1011 1100 0000 0011 0110", "0110 1000 0000 0000 1101"]
    return np.array([[list(map(int, word)) for word in one.split()] for one in words], dtype=np.int8).swapaxes(0, 1)


def everybody() -> np.ndarray:
    return np.ones((ROUNDS, len(SEEDS), CLIENTS), dtype=np.int8)


class Line(nn.Sequential):
    """Linear regression that starts at random, in a form that executors take whole stacks of."""

    samplewise = True

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(nn.Linear(shape[0], 1))


class Naive:
    """One replicate. `self.model` is what a run would report; memory of clients is a list of m rows."""

    def __init__(self, x: np.ndarray, learner: Learner, seed: int) -> None:
        self.model, self.learner, self.seed = x, learner, seed
        self.begin()

    def begin(self) -> None:
        """Memory before round 0."""

    def round(self, t: int, active: list[int]) -> None:
        raise NotImplementedError

    def rows(self) -> list[np.ndarray]:
        return [np.zeros_like(self.model) for _ in range(CLIENTS)]

    def innovation(self, i: int, t: int, **options) -> np.ndarray:
        return self.learner.innovation(i, self.model, t, **options)

    def tie(self, i: int, t: int) -> int:
        """By which client i goes before another of equal rank."""
        return int(tie_breakers(self.seed, np.array([i]), t)[0])

    def over(self, rows: dict[int, np.ndarray], weights=UNIFORM) -> np.ndarray:
        """The weighted mean over those who are there."""
        return sum(weights[i] * row for i, row in rows.items()) / sum(weights[i] for i in rows)


def with_(kind: type[Naive], **settings) -> type[Naive]:
    """The naive version under other settings."""
    return type(kind.__name__, (kind,), settings)


def compare(simulation, kind: type[Naive], play, tolerance: float = 1e-10) -> list[Naive]:
    """Play the simulation beside the naive version; the versions, as they are in the end."""
    starts, rate = simulation.initial_state().model.numpy(), simulation.trainer.local_rule.schedule.factor
    learners = [Learner(simulation.dataset, lr, rate) for lr in LRS]
    naive = [kind(x, one, seed) for x, one, seed in zip(starts, learners, SEEDS, strict=True)]
    fields = {field.name for field in dataclasses.fields(simulation.initial_state()) if hasattr(naive[0], field.name)}
    assert "model" in fields
    for played in play(simulation):
        counts = simulation.availability.counts(played.t)
        for r, one in enumerate(naive):
            one.round(played.t, list(np.flatnonzero(counts[r])))
            for name in fields:
                kept = getattr(played.after, name)
                kept = kept[r * CLIENTS : (r + 1) * CLIENTS] if len(kept) > len(SEEDS) else kept[r]
                where = f"round {played.t}, replicate {r}, {name}"
                wanted = np.array(getattr(one, name))
                assert np.isfinite(wanted).all()
                np.testing.assert_allclose(kept, wanted, atol=tolerance, rtol=0, err_msg=where)
    return naive


def points(strategy, points, rule, **options) -> Simulation:
    return Simulation(
        Quadratics(clients=len(points), points=list(points)),
        Mean,
        clients=len(points),
        strategy=strategy,
        local=rule,
        execution=Execution(dtype="float64"),
        **options,
    )


def one_by_one(simulation: Simulation, start: float, rounds: int, memory: list[float] | None = None) -> list[float]:
    """The models of some rounds from this one, and from this memory of clients."""
    strategy, found = simulation.strategy, []
    state = strategy.initial(torch.full((1, 1), start, dtype=torch.float64), simulation.federation)
    if memory is not None:
        state.memory[:, 0] = torch.tensor(memory, dtype=torch.float64)
        state.mean = state.memory.mean(0, keepdim=True)
    for t in range(rounds):
        cohort = strategy.cohort(state, simulation.availability.sample(t))
        report = simulation.trainer.run(strategy.start(state, cohort), cohort, t, state.model)
        state = strategy.aggregate(state, report, t)
        found.append(state.model.item())
    return found
