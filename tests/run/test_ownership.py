"""A part belongs to nobody: simulations that are given the same objects get what each gets from objects of its own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedsim import ConfigError, Simulation, Tracking
from fedsim.availability import Availability, Bernoulli, Markov, Uniform, UniformK
from fedsim.availability.clock import Devices, GeometricDelay, UniformWork
from fedsim.core.snapshot import differing_paths, snapshot
from fedsim.data.contamination import FeatureNoise
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Dirichlet
from fedsim.data.partition import FeatureNoise as FeatureSkew
from fedsim.local import SGD, Momentum
from fedsim.models import Linear
from fedsim.run.together import LockstepRunner, run_together
from fedsim.shift import Strategic
from fedsim.strategies import FedAsync, FedAWE, FedOpt, FedVARP
from fedsim.uplink import QSGD, Clip, RandK, TreeNoise, Uplink
from fedsim.uplink.attack import LabelFlip, SignFlip

QUIET = Tracking(progress="none", tensorboard=False)


class Hours(Availability):
    """A user's: it writes into itself what it was when it was set up, and adds to it."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.lock = threading.Lock()  # cannot be copied

    def setup(self, population: Any) -> None:
        super().setup(population)
        self.seeds += population.seeds

    def probabilities(self, t: int) -> np.ndarray:
        return np.full(self.population.shape, 0.5)

    def counts(self, t: int) -> np.ndarray:
        draws = [np.random.default_rng([seed, t]).random(self.population.clients) for seed in self.population.seeds]
        return (np.stack(draws) < 0.3 * len(self.seeds) / len(self.population.seeds)).astype(float)


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "bernoulli": lambda: {"availability": Bernoulli(Uniform(0.5))},
    "markov": lambda: {"availability": Markov(Uniform(0.5))},
    "uniform_k": lambda: {"availability": UniformK(2)},
    "a user's availability": lambda: {"availability": Hours()},
    "sign_flip": lambda: {"attack": SignFlip(fraction=0.5)},
    "label_flip": lambda: {"attack": LabelFlip(fraction=0.5)},
    "clock": lambda: {"clock": Devices([0.1, 0.3], jitter=0.6, deadline=1.5), "availability": UniformK(3)},
    "work": lambda: {"work": UniformWork(1), "local": SGD(steps=4, batch_size=4)},
    "delay": lambda: {"delay": GeometricDelay(0.5), "strategy": FedAsync(), "availability": Bernoulli(Uniform(0.6))},
    "tree noise": lambda: {"uplink": Uplink(Clip(1.0), TreeNoise(1.0))},
    "compression": lambda: {"uplink": Uplink(RandK(k=3), QSGD(levels=2))},
    "shift": lambda: {"shift": Strategic(1.0, 0.3, references="none")},
    "contamination": lambda: {"contamination": FeatureNoise(0.5)},
    "local rule": lambda: {"local": Momentum(steps=2, batch_size=4, state="client"), "availability": UniformK(3)},
    "client models": lambda: {"strategy": FedAWE(), "availability": UniformK(3)},
    "client memory": lambda: {"strategy": FedVARP(), "availability": UniformK(3)},
    "server optimiser": lambda: {"strategy": FedOpt()},
    "partition": lambda: {"partition": Dirichlet(0.5)},
    "partition with a skew": lambda: {"partition": FeatureSkew(0.5)},
}


def data() -> Dataset:
    x = torch.sin(torch.arange(240.0)).reshape(60, 4)
    return Dataset("waves", x, (torch.arange(60) * 7 // 3) % 2, x[:9], torch.arange(9) % 2, classes=2, loss="logistic")


def simulation(parts: dict[str, Any], dataset: Dataset, seed: int, clients: int) -> Simulation:
    settings = {"rounds": 3, "local": SGD(steps=2, batch_size=4), "model": Linear}
    return Simulation(dataset, seeds=[seed], clients=clients, **(settings | parts))


def model(run: Simulation) -> torch.Tensor:
    found: torch.Tensor = run.run(tracking=QUIET).state.model
    return found


@pytest.mark.parametrize("name", PARTS)
def test_a_part_serves_several_simulations(name: str) -> None:
    """Built before any of them runs, run in another order, with other numbers of clients, and again."""
    make, settings = PARTS[name], [(0, 5), (1, 5), (0, 7)]
    alone = [model(simulation(make(), data(), *own)) for own in settings]
    assert not torch.equal(alone[0], alone[1]) or name == "server optimiser"
    shared, samples = make(), data()
    before = snapshot([shared, samples])
    runs = [simulation(shared, samples, *own) for own in settings]
    assert differing_paths(before, snapshot([shared, samples])) == []
    for place in (2, 0, 1):
        assert torch.equal(model(runs[place]), alone[place])
    assert torch.equal(model(simulation(shared, samples, *settings[0])), alone[0])  # the cell of a notebook, again


@pytest.mark.parametrize("name", [name for name in PARTS if name not in ("client models", "compression")])
def test_in_lockstep_too(name: str) -> None:
    make, settings = PARTS[name], [(0, 5), (1, 5)]
    alone = [model(simulation(make(), data(), *own)) for own in settings]
    shared, samples = make(), data()
    together = run_together([simulation(shared, samples, *own) for own in settings])
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one.state.model, other, rtol=1e-5, atol=1e-6)


def test_rounds_of_two_simulations_may_alternate() -> None:
    """Round by round, as two generators that advance in turn."""
    shared, samples = PARTS["bernoulli"](), data()
    alone = [model(simulation(PARTS["bernoulli"](), data(), seed, 5)) for seed in (0, 1)]
    runs = [simulation(shared, samples, seed, 5) for seed in (0, 1)]
    ended = dict(LockstepRunner[Any](at_once=2)([lambda run=run: run.run_as_generator(tracking=QUIET) for run in runs]))  # type: ignore[misc]
    for number, expected in enumerate(alone):
        torch.testing.assert_close(ended[number].state.model, expected, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_copied_is_shared_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "fedsim"):
        run = simulation({"availability": (hours := Hours())}, data(), 0, 5)
    assert run.availability is not hours
    assert run.availability.lock is hours.lock
    assert "Hours.lock (lock) cannot be copied" in caplog.text


def test_data_are_shared() -> None:
    samples = data()
    one, other = (simulation({}, samples, seed, 5) for seed in (0, 1))
    assert one.dataset is not other.dataset
    assert one.dataset.train_x is other.dataset.train_x is samples.train_x


def test_what_parts_have_in_common_their_copies_have_in_common() -> None:
    process = Hours()
    strategy = FedOpt()
    strategy.process = process  # type: ignore[attr-defined]
    run = simulation({"availability": process, "strategy": strategy}, data(), 0, 5)
    assert run.strategy.process is run.availability


def test_stages_in_a_list_are_an_uplink() -> None:
    stages = [Clip(1.0), QSGD(levels=2)]
    runs = [simulation({"uplink": given}, data(), 0, 5) for given in (Uplink(*stages), Uplink(stages), stages)]
    models = [model(run) for run in runs]
    for one, other in itertools.pairwise(models):
        assert torch.equal(one, other)
    assert torch.equal(
        model(simulation({"uplink": stages[0]}, data(), 0, 5)),
        model(simulation({"uplink": Uplink(stages[0])}, data(), 0, 5)),
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1], "stage 0 is a int; give a class of fedsim.uplink.Stage"),
        ([Clip], r"stage 0 is the class Clip; give an object of it: Clip\(…\)"),
        ([[Clip(1.0)], Clip(1.0)], "stage 0 is a list"),
        ("clip", "stage 0 is a str"),
    ],
)
def test_what_is_no_stage_is_refused_at_once(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulation({"uplink": given}, data(), 0, 5)
