"""What the classes promise, and that the command line finds them."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mypackage.availability import OfficeHours
from mypackage.classes import OneClass
from mypackage.local import HeavyBall
from mypackage.recency import Recency
from mypackage.shift import Saturating
from mypackage.strategy import ServerMomentum
from scipy.optimize import brentq

from fedsim import Execution, Simulation
from fedsim.app.cli import main
from fedsim.availability import Bernoulli, Full, Population, Uniform
from fedsim.data.datasets import Digits, GaussianMean, Quadratics
from fedsim.data.partition import Natural
from fedsim.local import SGD
from fedsim.models import Linear, Mean
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.strategies import FedAvg

HERE = Path(__file__).parents[1]


def trained(strategy: object, rounds: int = 5) -> torch.Tensor:
    availability = Bernoulli(Uniform(0.2))
    simulation = Simulation(
        Digits(), Linear, clients=4, strategy=strategy, availability=availability, rounds=rounds, seeds=[0, 1]
    )
    return simulation.run().state.model


def test_without_momentum_it_is_fedavg() -> None:
    assert torch.equal(trained(ServerMomentum(momentum=0.0)), trained(FedAvg()))
    assert not torch.allclose(trained(ServerMomentum()), trained(FedAvg()))


def test_without_momentum_steps_are_those_of_sgd() -> None:
    def run(rule: SGD) -> torch.Tensor:
        options = {"availability": Bernoulli(Uniform(0.5)), "rounds": 5, "execution": Execution("vmap")}
        return Simulation(Digits(), Linear, clients=4, local=rule, **options).run().state.model

    assert torch.equal(run(HeavyBall(momentum=0.0, lr=0.1)), run(SGD(lr=0.1)))


def test_velocity_outlives_the_round() -> None:
    """On ½‖x‖² with x_0 = 1: u_1 = 1, x_1 = 1 − η; then u_2 = β + x_1, whatever lies between the rounds."""
    simulation = Simulation(
        Quadratics(clients=1, points=[[0.0]]), functools.partial(Mean, start=1.0), clients=1, rounds=2,
        local=HeavyBall(momentum=0.5, lr=0.1, steps=1), execution=Execution(dtype="float64"),
    )  # fmt: skip
    assert float(simulation.run().state.model) == pytest.approx(0.9 - 0.1 * (0.5 + 0.9))


def test_offices_are_open_eight_hours_a_day() -> None:
    process = OfficeHours(day=1.0, night=0.0)
    process.setup(Population(seeds=(0, 1), clients=50))
    there = np.stack([process.counts(t) for t in range(24)])
    assert (there.sum(0) == 8).all()
    assert np.array_equal(process.counts(3), process.counts(27))


def test_repeated_training_ends_at_the_stable_point() -> None:
    data = GaussianMean(clients=5, mean=2.0, variance=0.0)
    shift = Saturating(epsilon=0.9, scale=5.0)
    simulation = Simulation(data, Mean, clients=5, shift=shift, rounds=60, local=SGD(lr=0.2, steps=5, batch_size=100))
    stable = brentq(lambda theta: 2.0 + 4.5 * np.tanh(theta / 5.0) - theta, 0, 10)
    assert float(simulation.references["distance_to_ps"]) == pytest.approx(stable, rel=1e-4)
    assert float(simulation.run().state.model) == pytest.approx(stable, abs=0.2)


@pytest.mark.parametrize("found_by", [["--config-dir", str(HERE / "mypackage" / "configs")], []])
def test_the_command_line_finds_them(found_by: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_by or ["hydra.searchpath=[pkg://mypackage.configs]"]
    quick = ["rounds=2", "eval_every=1", "clients=6", f"out={tmp_path}", "tracking.tensorboard=false"]
    monkeypatch.setattr(sys, "argv", ["fedsim", *found, "experiment=office", *quick])
    main()
    assert len(read_metrics(tmp_path / "metrics.csv")) == 3
    assert "mypackage.strategy.ServerMomentum" in (tmp_path / "config.yaml").read_text()


def test_clients_that_are_always_there_are_weighted_equally() -> None:
    def end(strategy: object) -> torch.Tensor:
        simulation = Simulation(Digits(), Linear, clients=4, strategy=strategy, availability=Full(), rounds=3)
        return simulation.run().state.model

    assert torch.allclose(end(Recency()), end(FedAvg()))
    assert not torch.allclose(trained(Recency(), 12), trained(FedAvg(), 12))


def test_a_client_away_for_three_rounds_has_a_third_of_the_weight() -> None:
    """Clients 0 and 1 of ½(x − u)²: both in rounds 0 and 3, client 0 alone in rounds 1 and 2."""
    points, rate, model = torch.tensor([0.0, 6.0]), 0.5, 0.0
    present = np.array([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])

    class Listed(Bernoulli):
        def probabilities(self, t: int) -> np.ndarray:
            return present[[t]]

    last = [-1, -1]
    for t, here in enumerate(present):
        weights = torch.tensor([1 / (t - last[i]) if here[i] else 0.0 for i in range(2)])
        model -= float((weights / weights.sum() * rate * (model - points)).sum())
        last = [t if here[i] else last[i] for i in range(2)]
    simulation = Simulation(
        Quadratics(clients=2, points=points.tolist()), Mean, clients=2, partition=Natural(), strategy=Recency(),
        rounds=4, availability=Listed(), local=SGD(lr=rate, steps=1, batch_size=None),
        execution=Execution(dtype="float64"),
    )  # fmt: skip
    assert simulation.run().state.model.item() == pytest.approx(model)


@pytest.mark.parametrize("outputs", [1, 2])
def test_samples_of_class_1_alone_move_along_the_log_odds(outputs: int) -> None:
    shift, direction = OneClass(epsilon=0.5), torch.tensor([2.0, -1.0, 4.0])
    shift.direction = lambda theta: direction
    batch = {"x": torch.zeros(2, 3), "y": torch.tensor([0, 1])}
    moved = shift(batch, torch.zeros(outputs * 4))
    assert torch.equal(moved["x"], torch.stack([torch.zeros(3), -0.5 * direction]))
