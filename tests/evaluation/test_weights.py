"""Losses, optimum, reference points and the check of their existence weigh clients as the strategy's objective does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset, GaussianMean
from fedsim.data.partition import Natural
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.shift import Location
from fedsim.strategies import FedAvg, PFedAvg

SIZES = (1, 2, 7, 30)
DOUBLE = Execution(dtype="float64")


def points() -> Dataset:
    """Clients of very unequal sizes, each around a centre of its own."""
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    z = np.random.default_rng(0).standard_normal((len(owners), 2)) + 3 * owners[:, None]
    return Dataset("points", torch.as_tensor(z), loss="half_squared_distance", owners=torch.as_tensor(owners))


@pytest.mark.parametrize("weighting", ["uniform", "data"])
def test_the_loss_is_that_of_the_objective(weighting):
    data = points()
    simulation = Simulation(data, Mean, clients=4, strategy=FedAvg(weighting=weighting), execution=DOUBLE)
    model = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    each = [0.5 * (data.train_x[data.owners == i] - model).square().sum(1).mean() for i in range(4)]
    weights = np.array(SIZES) / sum(SIZES) if weighting == "data" else np.full(4, 0.25)
    found = simulation.evaluator(model).metrics["train_loss"]
    # a client's samples are thinned to 20 of 30 in the last one: all samples are looked at here
    full = Simulation(data, Mean, clients=4, strategy=FedAvg(weighting=weighting), execution=DOUBLE)
    full.evaluator.samples.width = max(SIZES)
    assert full.evaluator(model).metrics["train_loss"][0] == pytest.approx(float(weights @ np.array(each)), abs=1e-12)
    assert np.isfinite(found).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weighting", ["uniform", "data"])
@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_the_distance_to_the_optimum_ends_at_zero(weighting, ridge):
    """One full-batch step of everybody contracts towards Σ w_i z̄_i / (1 + λ), whatever the weights and the ridge."""
    simulation = Simulation(
        points(), Mean, clients=4, partition=Natural(), strategy=FedAvg(weighting=weighting), ridge=ridge, rounds=60,
        local=SGD(lr=0.5, steps=1, batch_size=None), execution=DOUBLE,
    )  # fmt: skip
    result = simulation.run()
    assert result.history[0]["distance_to_optimum"] > 1
    assert result.final["distance_to_optimum"][0] < 1e-12


def test_the_risk_is_least_at_the_optimal_point():
    """With unequal weights plain means put the least risk elsewhere (14.20 at θ^PO = 14.80 was reported)."""
    data = GaussianMean(6, variance=2.0, std=0.1, weight_variance=0.02)
    simulation = Simulation(
        data, Mean, clients=6, partition=Natural(), strategy=PFedAvg(), shift=Location(0.5, variance=0.04),
        local=SGD(lr=0.1, steps=1, batch_size=8), execution=DOUBLE,
    )  # fmt: skip
    best = simulation.references["distance_to_po"]
    risks = [simulation.evaluator(best + d).metrics["performative_risk"][0] for d in (0.0, -0.05, 0.05, -0.5, 0.5)]
    assert min(risks) == risks[0]


def stable(epsilons, strategy) -> Simulation:
    """Two clients of weights 0.9 and 0.1."""
    data = GaussianMean(2, variance=0.0)
    data.weights = np.array([0.9, 0.1])
    return Simulation(
        data, Mean, clients=2, partition=Natural(), strategy=strategy, shift=Location(epsilons=epsilons),
        local=SGD(steps=1, batch_size=4),
    )  # fmt: skip


def test_whether_a_stable_point_exists_is_asked_by_the_weights():
    stable([0.1, 5.0], PFedAvg())  # .59 by weights, 2.55 plainly
    with pytest.raises(ConfigError, match=r"averages at least 1"):
        stable([1.2, 0.1], PFedAvg())  # 1.09 by weights, .65 plainly
    stable([1.2, 0.1], FedAvg())
    with pytest.raises(ConfigError, match=r"averages at least 1"):
        stable([0.1, 5.0], FedAvg())
