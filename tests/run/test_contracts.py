"""Parts that a user wrote: one that breaks its contract is refused in one sentence, and nothing is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim import ConfigError, Simulation, Tracking
from fedsim.availability import Availability, Bernoulli, Uniform
from fedsim.core import rng
from fedsim.data.contamination import Contamination
from fedsim.data.datasets import Dataset
from fedsim.data.partition import IID, Natural
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.models.selectors import ByName
from fedsim.run.contracts import contains_user_code
from fedsim.run.wiring import resolve_data_and_client_count
from fedsim.shift import Shift
from fedsim.strategies import FedAvg, State, Strategy


@dataclass
class Two(State):
    """One tensor more."""

    other: Any


class Mine(Strategy[Any]):
    """FedAvg, written by somebody; cases change a method."""

    def aggregate(self, state, report, t):
        return replace(state, model=state.model - report.cohort.mean(report.innovation))


def strategy(**methods: Any) -> dict[str, Any]:
    return {"strategy": type("Mine", (Mine,), methods)()}


class Own(Availability):
    """Everybody, always."""

    def probabilities(self, t):
        return np.ones(self.population.shape)

    def counts(self, t):
        return np.ones(self.population.shape)


def process(**methods: Any) -> dict[str, Any]:
    return {"availability": type("Own", (Own,), methods)()}


def shift(move: Any) -> dict[str, Any]:
    return {
        "shift": type("Moving", (Shift,), {"__call__": lambda self, batch, theta: move(batch, theta)})(
            references="none"
        )
    }


def local(step: Any) -> dict[str, Any]:
    return {"local": type("Rule", (SGD,), {"step": step, "descents": lambda self: ()})(steps=1, batch_size=4)}


def rotten(call: Any) -> dict[str, Any]:
    return {"contamination": type("Rot", (Contamination,), {"__call__": lambda self, batch, keys: call(batch)})()}


def written(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    batch["x"].add_(1)
    return batch


class Keeps(Mine):
    """Momentum in an attribute, which no checkpoint holds."""

    velocity: Any = 0.0

    def aggregate(self, state, report, t):
        self.velocity = 0.5 * self.velocity + report.cohort.mean(report.innovation)
        return replace(state, model=state.model - self.velocity)


def of_all(self, state, report, t):
    return replace(state, model=state.model - report.innovation.median(0).values)


def means(self, state, report, t):
    return replace(state, model=state.model - report.innovation.mean(0))


def shared(self, model, federation):
    return Two(model, model)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a median over the clients of all seeds": (strategy(aggregate=of_all), "mixes the clients of different seeds"),
    "a mean over them": (strategy(aggregate=means), "change in those of seed 0 changes the model of seed 1"),
    "memory in attributes": ({"strategy": Keeps()}, "make it a field of its State"),
    "no next state": (strategy(aggregate=lambda *_: None), "aggregate must return a State, and returns None"),
    "rows for models": (
        strategy(aggregate=lambda self, state, report, t: State(report.end)),
        r"model must stay \[2, 15\] float32 in the next state, and becomes \[6, 15\]",
    ),
    "another precision": (
        strategy(aggregate=lambda self, state, report, t: State(state.model.double())),
        "becomes .* float64",
    ),
    "no first state": (strategy(initial=lambda *_: None), "initial must return a State, and returns None"),
    "a first model of one seed": (
        strategy(initial=lambda self, model, federation: State(model[0])),
        r"model must be \[2, 15\], one row per seed, and is \[15\]",
    ),
    "a number in the state": (
        strategy(initial=lambda self, model, federation: Two(model, 3)),
        "other of the state must be a tensor, .* and is int",
    ),
    "memory that is shared": (strategy(initial=shared), "other and model of the state share memory"),
    "no start": (
        strategy(start=lambda *_: None),
        r"start must return rows \[6, 15\] float32, one per client, and returns None",
    ),
    "models for start rows": (strategy(start=lambda self, state, cohort: state.model), r"rows \[6, 15\]"),
    "no cohort": (strategy(cohort=lambda self, state, active: [1]), "cohort must return a Cohort, and returns list"),
    "its own error": (
        strategy(aggregate=lambda self, state, report, t: report.nothing),
        r"raised AttributeError: .*nothing.* \(test_contracts.py, line \d+\)",
    ),
    "its own error at first": (strategy(initial=lambda *_: 1 / 0), "initial raised ZeroDivisionError"),
    "a strategy that draws": (
        strategy(aggregate=lambda self, state, report, t: State(state.model + torch.rand(()))),
        "draws from a global random stream",
    ),
    "probabilities above 1": (
        process(probabilities=lambda self, t: np.full((2, 5), 1.5)),
        r"probabilities\(0\) of client 0 is 1.5, which is not in \[0, 1\]",
    ),
    "probabilities that are no numbers": (process(probabilities=lambda self, t: np.full((2, 5), np.nan)), "is nan"),
    "counts below 0": (process(counts=lambda self, t: -np.ones((2, 5))), "is -1, which is not 0 or more"),
    "counts of one seed": (
        process(counts=lambda self, t: np.ones(5)),
        r"array \[2, 5\], one row per seed, and is \[5\]",
    ),
    "no counts": (process(counts=lambda self, t: None), "is NoneType"),
    "counts of chance": (
        process(counts=lambda self, t: np.random.default_rng().integers(0, 99, (2, 5))),
        r"counts\(0\) is not the same when called twice",
    ),
    "counts from a stream": (process(counts=lambda self, t: np.random.rand(2, 5)), "global random stream"),  # noqa: NPY002
    "a shift to nothing": (shift(lambda batch, theta: None), "must return a batch, .* and returns None"),
    "a shift that drops x": (shift(lambda batch, theta: {"y": batch["y"]}), "loses 'x' of the batch"),
    "a shift that cuts": (shift(lambda batch, theta: batch | {"x": batch["x"][:2]}), r"must return x \[4, 4\] float32"),
    "a shift that writes": (
        shift(lambda batch, theta: written(batch)),
        r"writes into the batch that it is given \(x\)",
    ),
    "a shift that draws": (
        shift(lambda batch, theta: batch | {"x": batch["x"] + torch.randn(())}),
        "Moving draws from a global random stream",
    ),
    "contamination to nothing": (rotten(lambda batch: None), "contamination=Rot"),
    "contamination that writes": (rotten(written), "contamination=Rot writes into the batch"),
    "a step to nothing": (local(lambda *_: None), "step must return the new carry and the loss, and returns None"),
    "a step without loss": (local(lambda self, carry, *_: carry), "step must return the new carry and the loss"),
    "losses of samples": (
        local(lambda self, carry, batch, lr, objective: (carry, batch["x"].sum(1))),
        r"loss must be one number per client, a tensor \[\], and is \[4\]",
    ),
    "a carry that grows": (
        local(lambda self, carry, batch, lr, objective: (carry | {"more": lr}, lr)),
        "step adds 'more'",
    ),
    "a carry that shrinks": (local(lambda self, carry, batch, lr, objective: ({}, lr)), "step loses 'params'"),
    "a step in place": (
        local(lambda self, carry, batch, lr, objective: (carry, carry["params"].add_(1).sum())),
        "step writes into 'params'",
    ),
    "parameters of another shape": (
        local(lambda self, carry, batch, lr, objective: ({"params": carry["params"][:3]}, lr)),
        r"step must return 'params' \[15\] float32, and returns \[3\]",
    ),
}


def simulation(**own: Any) -> Simulation:
    x = torch.sin(torch.arange(120.0)).reshape(30, 4)
    data = Dataset("waves", x, torch.arange(30) % 3, classes=3)
    settings = {"clients": 5, "rounds": 2, "seeds": (0, 1), "local": SGD(steps=1, batch_size=4), "model": Linear}
    return Simulation(data, **(settings | own))


@pytest.mark.parametrize(("own", "message"), BAD.values(), ids=BAD)
def test_what_breaks_its_contract_is_refused_before_a_folder_is_made(own, message, tmp_path: Path):
    with pytest.raises(ConfigError, match=message) as told:
        simulation(**own).run(tmp_path / "run", tracking=Tracking(progress="none"))
    assert "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()


def test_what_keeps_it_runs_as_ours_does():
    """The rehearsal leaves no trace: the numbers are those of the part that is not tried."""
    own = simulation(**strategy()).run()
    ours = simulation(strategy=FedAvg()).run()
    assert torch.equal(own.state.model, ours.state.model)
    simulation(**strategy(), **process(), seeds=(0,)).run()
    simulation(**shift(lambda batch, theta: batch | {"x": batch["x"] + theta.mean()})).run()
    simulation(**local(SGD.step)).run()


def test_a_rule_is_tried_on_whole_rows_where_columns_stay_with_the_client():
    own, ours = (simulation(columns=ByName(stays=["bias"]), **rule).run() for rule in (local(SGD.step), {}))
    torch.testing.assert_close(own.state.model, ours.state.model)


def test_draws_that_are_functions_are_welcome():
    draw = lambda self, t: rng.generator(3, rng.Purpose.AVAILABILITY, t).integers(0, 2, (2, 5))  # noqa: E731
    simulation(**process(counts=draw)).run()


def test_a_later_round_is_looked_at_too():
    late = process(probabilities=lambda self, t: np.full((2, 5), 1.0 + t))
    with pytest.raises(ConfigError, match=r"probabilities\(1\) of client 0 is 2"):
        simulation(**late).run()


def of_the_largest_cohort(self, state, report, t):
    """In the second round, the steps of every seed are divided by the number of clients of that which has most."""
    cohort = report.cohort
    most = max(*np.diff(cohort.replicate_bounds), 1)
    step = cohort.sum(report.innovation) / most if t == 1 else cohort.mean(report.innovation)
    return replace(state, model=state.model - step)


def test_seeds_that_are_mixed_in_the_second_round_are_told_apart_where_numbers_of_clients_differ() -> None:
    own = strategy(aggregate=of_the_largest_cohort) | {"availability": Bernoulli(Uniform(0.5))}
    with pytest.raises(ConfigError, match=r"mixes the clients of different seeds.* in round 1"):
        simulation(**own).run()


def with_number_of_rounds(self, model, federation):
    return Two(model, torch.zeros(len(model), 1))


def mean_over_rounds_from_the_third_on(self, state, report, t):
    rounds = state.other + report.cohort.is_nonempty[:, None]
    step = report.cohort.mean(report.innovation)
    return Two(state.model - (step / rounds if t >= 2 else step), rounds)


def test_a_seed_of_which_nobody_has_come_yet_in_the_third_round_is_tried() -> None:
    own = strategy(initial=with_number_of_rounds, aggregate=mean_over_rounds_from_the_third_on)
    with pytest.raises(ConfigError, match=r"not finite after a round in which few clients took part.*\(round 2\)"):
        simulation(**own, availability=Bernoulli(Uniform(0.5)), rounds=3).run()


class FirstAsked(Own):
    """A class that keeps its counts round by round, for whoever asks first."""

    kept: ClassVar[dict[int, np.ndarray]] = {}

    def setup(self, population):
        super().setup(population)
        self.kept.clear()

    def counts(self, t):
        draw = rng.generator(self.population.seeds[0], rng.Purpose.AVAILABILITY, t)
        return self.kept.setdefault(t, draw.integers(0, 99, self.population.shape))


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_process_whose_answers_another_simulation_changes_is_refused(rounds: int) -> None:
    with pytest.raises(ConfigError, match=r"counts\(\d\) is not the same when called twice"):
        simulation(availability=FirstAsked(), rounds=rounds, seeds=(0,)).run()


@pytest.mark.parametrize(
    ("group", "given", "message"),
    [
        ("strategy", SGD(), "strategy=SGD is no Strategy; derive from fedsim.strategies.Strategy"),
        ("strategy", FedAvg, r"strategy is the class FedAvg; give an object of it: FedAvg\(…\)"),
        ("local", FedAvg(), r"local=FedAvg is no LocalRule; derive from fedsim\.local\.LocalRule"),
        ("local", FedAvg, "local is the class FedAvg; give a LocalRule"),
        ("availability", 0.5, "availability=float is no Availability"),
        ("shift", SGD(), "shift=SGD is no Shift"),
        ("dataset", torch.zeros(3), r"dataset=Tensor is no Dataset; derive from fedsim\.data\.datasets\.Dataset"),
        ("partition", [[0], [1]], "partition=list is no Partition"),
        ("attack", "sign_flip", "attack=str is no Attack"),
        ("clock", SGD(), "clock=SGD is no Clock"),
    ],
)
def test_a_part_of_another_kind_is_refused_by_its_group(group: str, given: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        Simulation(**{"dataset": Dataset("x", torch.zeros(4, 1)), "model": Linear, group: given})


class PartOfUser:
    """Of nobody's package."""


def test_a_part_of_a_users_is_found_in_lists_and_dictionaries() -> None:
    for holder in (PartOfUser(), [1, PartOfUser()], (PartOfUser(),), {"a": PartOfUser()}, [[PartOfUser()]]):
        assert contains_user_code(holder)
    for holder in (None, [], [1, "a"], {"a": np.zeros(2)}, [torch.zeros(1)], SGD(lr=0.1, steps=1)):
        assert not contains_user_code(holder)


def test_owners_are_clients_unless_a_partition_says_otherwise() -> None:
    """Of 4 owners 2 are drawn, by default as by partition=natural; another partition takes all of them."""
    data = Dataset("owned", torch.arange(8.0)[:, None], torch.zeros(8), owners=torch.arange(8) % 4, loss="squared")
    for partition, owners in ((None, 2), (Natural(), 2), (IID(), 4)):
        drawn, clients = resolve_data_and_client_count(data, partition, 2)
        assert (drawn.natural_clients, clients) == (owners, 2)
    assert resolve_data_and_client_count(data, None, "all")[1] == 4
