"""Metrics against plain loops over samples and clients."""

from __future__ import annotations

import copy
import inspect
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import vector_to_parameters

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset, GaussianMean, Quadratics
from fedsim.evaluation.evaluator import Evaluator
from fedsim.local import SGD
from fedsim.models import Linear, Mean
from fedsim.shift import Location
from fedsim.strategies import MIFA, FedAvg, FedAWE, FedPBC

SIZES = (1, 7, 12, 3, 5, 9, 2, 8, 4, 6, 11, 10, 1, 2, 3, 4, 5, 6, 7, 8)  # 20 clients: a tenth are two


class TinyCNN(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(shape[0], 3, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(3 * 4 * 4, classes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def images(test: int = 1203) -> Dataset:
    """Bytes, ragged owners, and more test samples than one forward pass takes."""
    draw = np.random.default_rng(2)

    def pairs(n):
        x = torch.as_tensor(draw.integers(0, 256, (n, 2, 6, 6), dtype=np.uint8))
        return x, torch.as_tensor(draw.integers(0, 3, n))

    owners = torch.as_tensor(np.repeat(np.arange(len(SIZES)), SIZES))
    return Dataset("images", *pairs(sum(SIZES)), *pairs(test), classes=3, owners=owners)


@pytest.mark.parametrize("model", [Linear, TinyCNN])
def test_classification_metrics_are_those_of_plain_loops(model):
    """With `client_samples` at least n_i, the clients are evaluated on all they have."""
    dataset = images()
    simulation = Simulation(
        dataset,
        model,
        clients=len(SIZES),
        evaluation=EvaluationOptions(client_samples=12),
        seeds=(0, 1),
        execution=Execution(dtype="float64", executor="vmap"),
    )
    models = torch.randn(2, simulation.model.dimension, generator=torch.Generator().manual_seed(0)).double()
    found = simulation.evaluator(models)
    for r, row in enumerate(models):
        module = model((2, 6, 6), 3).double().eval()
        vector_to_parameters(row, module.parameters())
        with torch.no_grad():
            test, train = (module(x.double() / 255) for x in (dataset.test_x, dataset.train_x))
        losses = nn.functional.cross_entropy(train, dataset.train_y, reduction="none")
        hits = (train.argmax(1) == dataset.train_y).double()
        per_client = [dataset.owners == i for i in range(len(SIZES))]
        accuracies = sorted(hits[own].mean().item() for own in per_client)
        expected = {
            "test_loss": nn.functional.cross_entropy(test, dataset.test_y).item(),
            "test_accuracy": (test.argmax(1) == dataset.test_y).double().mean().item(),
            "train_loss": np.mean([losses[own].mean() for own in per_client]),
            "train_accuracy": np.mean(accuracies),
            "client_accuracy_worst10": np.mean(accuracies[:2]),
        }
        assert set(found.metrics) == set(expected)
        for name, value in expected.items():
            assert found.metrics[name][r] == pytest.approx(value, abs=1e-10), name
        np.testing.assert_allclose(np.sort(found.client_accuracy[r]), accuracies, atol=1e-12)


def test_test_accuracy_by_client_weighs_alike_whoever_test_samples_were_held_out_of():
    """The mean of the owners' own accuracies; a client without test samples does not count, and nor does its size."""
    dataset = images()
    draw = np.random.default_rng(5)
    owners = draw.choice(len(SIZES) - 3, len(dataset.test_x), p=np.arange(1, 18) / np.arange(1, 18).sum())
    dataset.test_owners = torch.as_tensor(owners)
    simulation = Simulation(dataset, Linear, clients=len(SIZES), execution=Execution(dtype="float64"))
    assert "test_accuracy_by_client" in simulation.evaluator.columns
    models = torch.randn(1, simulation.model.dimension, generator=torch.Generator().manual_seed(0)).double()
    module = Linear((2, 6, 6), 3).double()
    vector_to_parameters(models[0], module.parameters())
    with torch.no_grad():
        hits = (module(dataset.test_x.double() / 255).argmax(1) == dataset.test_y).numpy()
    found = simulation.evaluator(models).metrics
    by_client = np.mean([hits[owners == i].mean() for i in range(17)])
    assert found["test_accuracy_by_client"][0] == pytest.approx(by_client, abs=1e-12)
    assert found["test_accuracy"][0] == pytest.approx(hits.mean(), abs=1e-12)
    assert abs(by_client - hits.mean()) > 1e-3


def test_regression_has_a_test_loss_and_no_accuracy(regression_of, Regression):
    dataset = regression_of((5, 2))
    dataset.test_x, dataset.test_y = dataset.train_x[:4].clone(), dataset.train_y[:4].clone()
    simulation = Simulation(dataset, Regression, clients=2, execution=Execution(dtype="float64"))
    row = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    found = simulation.evaluator(row)
    assert set(found.metrics) == {"test_loss", "train_loss"}
    assert found.client_accuracy is None
    errors = 0.5 * (dataset.train_x @ row[0, :3] + 4.0 - dataset.train_y).square()
    assert found.metrics["test_loss"][0] == pytest.approx(errors[:4].mean().item())
    assert found.metrics["train_loss"][0] == pytest.approx((errors[:5].mean() + errors[5:].mean()).item() / 2)


@pytest.mark.parametrize("seed", range(5))
def test_a_subsample_is_distinct_samples_of_the_client_the_same_every_time(seed, regression_of, Regression):
    simulation = Simulation(
        regression_of((7,)),
        Regression,
        clients=1,
        evaluation=EvaluationOptions(client_samples=3),
        seeds=[seed],
        execution=Execution(dtype="float64"),
    )
    row = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    first, second = (simulation.evaluator(row).metrics["train_loss"][0] for _ in range(2))
    assert first == second
    data = simulation.dataset
    errors = (0.5 * (data.train_x @ row[0, :3] + 4.0 - data.train_y).square()).tolist()
    possible = [np.mean(three) for three in itertools.combinations(errors, 3)]
    assert min(abs(first - value) for value in possible) < 1e-12


def test_a_subsample_is_spread_over_the_share():
    """A share may be sorted by class; of 100 samples in order, ten are one of each tenth."""
    x = torch.arange(100, dtype=torch.float64)[:, None]
    dataset = Dataset("sorted", x, loss="half_squared_distance", owners=torch.zeros(100, dtype=torch.int64))
    simulation = Simulation(
        dataset, Mean, clients=1, evaluation=EvaluationOptions(client_samples=10), execution=Execution(dtype="float64")
    )
    # ½ mean (θ − x)² of the two models gives the mean of the x that were looked at: (loss(0) − loss(1)) + ½
    zero, one = (simulation.evaluator(torch.full((1, 1), v).double()).metrics["train_loss"][0] for v in (0.0, 1.0))
    assert 45 <= zero - one + 0.5 <= 54


@pytest.mark.parametrize("deploy", ["step", "round"])
def test_the_data_answer_the_evaluated_model(deploy):
    """With z ~ N(m_i + ε_i θ, σ²) the loss is ½ mean (θ − z)²; σ = 0 makes it a formula."""
    means, epsilons = [1.0, 2.0, 6.0], [0.5, -0.2, 0.9]
    simulation = Simulation(
        GaussianMean(clients=3, means=means, std=0.0),
        Mean,
        clients=3,
        shift=Location(epsilons=epsilons, deploy=deploy),
        seeds=(0, 1),
        execution=Execution(dtype="float64"),
    )
    models = torch.tensor([[3.0], [-1.0]], dtype=torch.float64)
    found = simulation.evaluator(models).metrics
    for r, theta in enumerate(models[:, 0].tolist()):
        expected = np.mean([0.5 * (theta - (m + e * theta)) ** 2 for m, e in zip(means, epsilons, strict=True)])
        assert found["train_loss"][r] == pytest.approx(expected)
    assert "distance_to_optimum" not in found  # the stated optimum is that of data which do not answer


def test_a_stream_is_evaluated_on_fresh_samples_of_its_law():
    """E ½(θ − z)² = ½(θ − m)² + ½σ²; 4,000 samples, 5 σ."""
    simulation = Simulation(
        GaussianMean(clients=2, means=[1.0, 5.0], std=2.0),
        Mean,
        clients=2,
        evaluation=EvaluationOptions(client_samples=4000),
        execution=Execution(dtype="float64"),
    )
    found = simulation.evaluator(torch.tensor([[3.0]], dtype=torch.float64)).metrics
    spread = (2 * 2.0**2 + 2.0**4 / 2) ** 0.5  # of ½(2 + σn)²: ½ √(16σ² + 2σ⁴)
    assert found["train_loss"][0] == pytest.approx(0.5 * 4 + 0.5 * 4, abs=5 * spread * 1.5 / 8000**0.5)
    assert found["distance_to_optimum"][0] == pytest.approx(0.0)


def kept_by_clients(Scripted, strategy, models):
    """Three clients, three rounds, two replicates; client 2 never computes in the first, client 1 not in the second."""
    counts = np.array([[[1, 1, 0], [1, 0, 0]], [[0, 2, 0], [1, 0, 1]], [[1, 0, 0], [0, 0, 0]]])
    dataset = Quadratics(clients=3, points=[[0.0, 1.0], [2.0, 2.0], [4.0, 9.0]])
    simulation = Simulation(
        dataset,
        Mean,
        clients=3,
        availability=Scripted(counts, 0.5),
        strategy=strategy,
        local=SGD(lr=0.1, steps=2),
        rounds=3,
        seeds=(0, 1),
        evaluation=EvaluationOptions(every=1, of=models),
        execution=Execution(dtype="float64"),
    )
    return counts, dataset, simulation


@pytest.mark.parametrize("strategy", [FedPBC(), FedAWE()], ids=lambda s: type(s).__name__)
def test_client_mean_is_that_of_the_models_clients_keep(strategy, Scripted):
    _, dataset, simulation = kept_by_clients(Scripted, strategy, "client_mean")
    result = simulation.run()
    for r, row in enumerate(result.history[-2:]):
        mean = result.state.models.unflatten(0, (2, 3))[r].mean(0)
        distance = (mean - dataset.optimum).norm().item()
        assert row["distance_to_optimum"] == pytest.approx(distance, abs=1e-12)


@pytest.mark.parametrize("strategy", [FedAvg(), MIFA()], ids=lambda s: type(s).__name__)
def test_client_mean_is_else_that_of_the_models_they_received(strategy, Scripted, monkeypatch):
    """Clients that compute without taking part (MIFA's first round asks everybody) receive nothing."""
    counts, dataset, simulation = kept_by_clients(Scripted, strategy, ["client_mean", "global"])
    seen, strategy = [simulation.initial_state().model.clone()], simulation.strategy
    aggregate = strategy.aggregate

    def watched(state, report, t):
        after = aggregate(state, report, t)
        seen.append(after.model.clone())
        return after

    monkeypatch.setattr(strategy, "aggregate", watched)
    history = simulation.run().history
    has = [[seen[0][r]] * 3 for r in range(2)]
    for t in range(4):
        for r in range(2):
            row = history[2 * t + r]
            assert (row["round"], row["seed"]) == (t, r)
            if t:
                has[r] = [seen[t][r] if counts[t - 1][r][i] else has[r][i] for i in range(3)]
            mean = torch.stack(has[r]).mean(0)
            for name, model in (("", mean), ("global_", seen[t][r])):
                distance = (model - dataset.optimum).norm().item()
                assert row[f"{name}distance_to_optimum"] == pytest.approx(distance, abs=1e-12)


def test_a_model_named_twice_or_none_at_all_is_refused():
    for of in ([], ["global", "global"]):
        with pytest.raises(
            ConfigError, match="must be global, client_mean or calibrated, or a list with each at most once"
        ):
            EvaluationOptions(of=of)


def test_a_large_population_is_thinned_evenly():
    """1,500 clients of one sample each: two thirds are evaluated, each on its own."""
    clients = 1500
    x = torch.arange(clients, dtype=torch.float64)[:, None]
    dataset = Dataset("line", x, loss="half_squared_distance", owners=torch.arange(clients))
    simulation = Simulation(dataset, Mean, clients=clients, execution=Execution(dtype="float64"))
    loss = simulation.evaluator(torch.zeros(1, 1, dtype=torch.float64)).metrics["train_loss"][0]
    assert loss == pytest.approx(0.5 * (x**2).mean().item(), rel=0.01)


def test_ranks_that_share_the_clients_measure_all_of_them():
    """Each is alone responsible for its clients: what the ranks hold is added up, and gives the numbers of one rank."""
    simulation = Simulation(images(), Linear, clients=len(SIZES), seeds=(0, 1), execution=Execution(dtype="float64"))
    whole, models = simulation.evaluator, simulation.model.initial((0, 1))
    alone = whole._evaluate_clients(whole.samples, models, models, 0)
    shares = []
    for rank in range(3):
        own, mine = copy.copy(whole), slice(rank, None, 3)
        own.ranks = SimpleNamespace(num_ranks=3, client_slice=mine, all_reduce_sum=lambda values: values)
        own.clients = whole.clients[mine]
        shares.append(own._evaluate_clients(own.samples, models, models, 0))
    for expected, values in zip(alone[:2], list(zip(*shares, strict=True))[:2], strict=True):
        torch.testing.assert_close(sum(values), expected)


def test_an_evaluator_by_itself_takes_as_many_samples_as_the_options_of_a_run():
    assert inspect.signature(Evaluator).parameters["client_samples"].default == EvaluationOptions().client_samples
