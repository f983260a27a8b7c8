"""A whole run: it learns, it finds the performatively stable point, and it refuses beforehand what cannot work."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch
from torch import nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Bernoulli, Uniform, UniformK
from fedsim.core import ConfigError
from fedsim.data.datasets import Digits, GaussianMean, Quadratics
from fedsim.data.partition import IID, Dirichlet, Natural
from fedsim.local import SGD, Inverse
from fedsim.models import MLP, Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.shift import Location
from fedsim.strategies import FedAvg, FedAvgAll, FedAvgKnown, FedAWE, FedPBC


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "strategy", [FedAvg(), FedAvgAll(server_lr=2.0), FedAvgKnown(), FedPBC(), FedAWE()], ids=lambda s: type(s).__name__
)
def test_every_strategy_learns_digits(strategy):
    result = Simulation(
        Digits(),
        Linear,
        clients=10,
        partition=Dirichlet(0.5),
        availability=Bernoulli(Uniform(0.6)),
        strategy=strategy,
        local=SGD(lr=0.2, steps=5),
        rounds=40,
        evaluation=EvaluationOptions(every=40),
        seeds=[0, 1],
    ).run()
    first, last = (np.mean([row["test_accuracy"] for row in result.history if row["round"] == t]) for t in (0, 40))
    assert first < 0.2
    assert last > 0.8
    assert result.final["test_accuracy"][0] == pytest.approx(last)


def expected_model(means, epsilons, rounds: int, steps: int, lr: float, offset: float) -> float:
    """E θ^T of repeated gradient descent: the noise is additive, so the expectation follows the noiseless recursion."""
    theta = 0.0
    for t in range(rounds):
        local = np.full(len(means), theta)
        for k in range(steps):
            local -= lr / (t * steps + k + offset) * (local - (means + epsilons * local))
        theta = local.mean()
    return theta


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "epsilons", [[0.9] * 6, [0.85, 0.87, 0.89, 0.91, 0.93, 0.95]], ids=["equal sensitivities", "unequal sensitivities"]
)
def test_p_fedavg_reaches_the_performatively_stable_point(epsilons):
    """θ^PS = m̄ / (1 − ε̄) = 10 / 0.1 = 100. Eight replicates give the statistical error of the mean (5 σ are allowed);
    what is left of the start and of the client drift at the last learning rate is known exactly, and below 1 %."""
    means = [9.0, 11.0, 9.5, 10.5, 8.0, 12.0]
    rounds, steps, lr, offset = 80, 5, 30.0, 60.0
    simulation = Simulation(
        GaussianMean(clients=6, means=means),
        Mean,
        clients=6,
        shift=Location(epsilons=epsilons),
        local=SGD(lr=lr, steps=steps, batch_size=16, schedule=Inverse(offset=offset)),
        rounds=rounds,
        seeds=range(8),
        evaluation=EvaluationOptions(every=rounds),
        execution=Execution(dtype="float64"),
    )
    reached = simulation.run().state.model[:, 0].numpy()
    error = reached.std(ddof=1) / len(reached) ** 0.5
    expected = expected_model(np.array(means), np.array(epsilons), rounds, steps, lr, offset)
    assert error < 0.1
    assert abs(expected - 100) < 1
    assert abs(reached.mean() - expected) < 5 * error


@pytest.mark.parametrize(("every", "rounds"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (3, [0, 3, 5]), (9, [0, 5])])
def test_models_are_evaluated_at_first_every_so_many_rounds_and_at_last(every: int, rounds: list[int]) -> None:
    data, evaluation = Quadratics(clients=2, dimension=2), EvaluationOptions(every=every)
    history = Simulation(data, Mean, clients=2, rounds=5, evaluation=evaluation).run().history
    assert [row["round"] for row in history] == rounds


class Frozen(nn.Module):
    """Random features that are not trained."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.features = nn.Linear(64, 16).requires_grad_(False)
        self.register_buffer("offset", torch.randn(16))
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.features(x.flatten(1)) + self.offset))


@pytest.mark.parametrize("model", [Linear, MLP, Frozen])
def test_the_global_generator_neither_matters_nor_moves(model):
    ends = []
    for state in (1, 2):
        torch.manual_seed(state)
        np.random.seed(state)  # noqa: NPY002 (the global generator is the point)
        before = torch.get_rng_state()
        ends.append(Simulation(Digits(), model, clients=4, rounds=2).run().state.model)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*ends)


def test_a_simulation_can_be_run_again():
    simulation = Simulation(
        Digits(), Linear, clients=4, rounds=2, strategy=FedAWE(), evaluation=EvaluationOptions(every=1)
    )
    first, second = simulation.run(), simulation.run()
    assert torch.equal(first.state.models, second.state.models)
    timeless = [{k: v for k, v in row.items() if k != "seconds"} for row in first.history]
    assert timeless == [{k: v for k, v in row.items() if k != "seconds"} for row in second.history]


def test_seeds_are_different_replicates():
    federation = Simulation(Digits(), MLP, clients=4, partition=IID(), seeds=[0, 1])
    start = federation.initial_state().model
    assert not torch.equal(start[0], start[1])
    assert not np.array_equal(federation.partition_tables[0].order, federation.partition_tables[1].order)


def drawing_its_own(shape, classes):
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(1)) + float(np.random.default_rng().normal())

    return Noisy(64, classes)


def gaussian(**options):
    return Simulation(GaussianMean(clients=3), Mean, clients=3, **options)


def digits(model=Linear, **options):
    return Simulation(Digits(), model, **{"clients": 5} | options)


REFUSED = {
    "seeds: none": ("seeds", lambda: digits(seeds=[])),
    "seeds: negative": ("seeds", lambda: digits(seeds=[0, -1])),
    "seeds: fraction": ("seeds", lambda: digits(seeds=[0.5])),
    "rounds: zero": ("rounds", lambda: digits(rounds=0)),
    "rounds: fraction": ("rounds", lambda: digits(rounds=1.5)),
    "clients: zero": ("clients", lambda: digits(clients=0)),
    "clients: more than samples": ("clients", lambda: digits(clients=2000)),
    "clients: not the natural owners": ("clients", lambda: Simulation(Quadratics(clients=3), Mean, clients=4)),
    "clients: more than the stream's": ("clients", lambda: Simulation(GaussianMean(clients=3), Mean, clients=5)),
    "clients: fewer than the stream's": ("clients", lambda: Simulation(GaussianMean(clients=5), Mean, clients=3)),
    "eval_every: zero": ("every", lambda: EvaluationOptions(every=0)),
    "client_samples: zero": ("client_samples", lambda: EvaluationOptions(client_samples=0)),
    "evaluate: unknown": ("of", lambda: EvaluationOptions(of="best")),
    "device: unknown": ("device", lambda: digits(execution=Execution(device="abacus"))),
    "dtype: unknown": ("dtype", lambda: digits(execution=Execution(dtype="float16"))),
    "executor: unknown": ("executor", lambda: digits(execution=Execution("threads"))),
    "chunk: zero": ("chunk", lambda: digits(execution=Execution(chunk=0))),
    "chunk: word": ("chunk", lambda: digits(execution=Execution(chunk="large"))),
    "workers: zero": ("workers", lambda: digits(execution=Execution("loop", workers=0))),
    "lr: three for two seeds": ("lr", lambda: digits(seeds=[0, 1], local=SGD(lr=[0.1, 0.2, 0.3]))),
    "lr: zero": ("lr", lambda: SGD(lr=0.0)),
    "lr: not a number": ("lr", lambda: SGD(lr=float("nan"))),
    "steps and epochs": ("epochs", lambda: SGD(steps=3, epochs=1)),
    "epochs and steps": ("steps", lambda: SGD(steps=3, epochs=1)),
    "batch_size: zero": ("batch_size", lambda: SGD(batch_size=0)),
    "sampling: unknown": ("sampling", lambda: SGD(sampling="random")),
    "weight_decay: negative": ("weight_decay", lambda: SGD(weight_decay=-1.0)),
    "clip: zero": ("clip", lambda: SGD(clip=0.0)),
    "epochs on a stream": ("local_epochs", lambda: gaussian(local=SGD(epochs=1))),
    "full batch on a stream": ("batch_size", lambda: gaussian(local=SGD(batch_size=None))),
    "partition of a stream": ("partition", lambda: gaussian(partition=IID())),
    "partition: natural without owners": ("partition", lambda: digits(partition=Natural())),
    "model: random numbers of its own": ("model", lambda: digits(drawing_its_own)),
    "model: too few outputs": ("model", lambda: digits(functools.partial(Linear, classes=7))),
    "model: other inputs": ("model", lambda: digits(lambda: nn.Linear(3, 10))),
    "model: nothing to train": ("model", lambda: digits(lambda: nn.Flatten())),
    "loss: unknown": ("model.loss", lambda: digits(loss="hinge")),
    "loss: no tensor": ("model.loss", lambda: digits(loss=lambda output, batch: 0.5)),
    "loss: without labels": ("model.loss", lambda: gaussian(loss="cross_entropy")),
    "server_lr: zero": ("server_lr", lambda: FedAvg(server_lr=0)),
    "weighting: unknown": ("weighting", lambda: FedAvg(weighting="size")),
    "compute: unknown": ("compute", lambda: FedPBC(compute="some")),
    "k: more than clients": ("availability.k", lambda: digits(availability=UniformK(6))),
    "shift: images": ("shift", lambda: digits(shift=Location())),
    "epsilons: too few": ("shift.epsilons", lambda: gaussian(shift=Location(epsilons=[0.1]))),
    "checkpoint_every: zero": ("checkpoint_every", lambda: Tracking(checkpoint_every=0)),
    "progress: unknown": ("progress", lambda: Tracking(progress="bar")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_by_name(case):
    key, attempt = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"\b{re.escape(key)}\b"):
        attempt()


def test_a_run_folder_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below"):
        with pytest.raises(ConfigError, match=re.escape(f"out={out}")):
            digits(rounds=1).run(out, tracking=Tracking(progress="none"))
    assert file.read_text() == "mine"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("epsilon", [1.0, 1.3])
@pytest.mark.parametrize("variance", [0.0, 0.04])
def test_a_mean_sensitivity_of_one_is_refused(epsilon, variance):
    """Runs approach no performatively stable point then; rounding in centring the drawn ε_i must not hide it."""
    for seed in range(30):
        with pytest.raises(ConfigError, match=r"shift\.epsilon"):
            gaussian(shift=Location(epsilon, variance, seed=seed))
    gaussian(shift=Location(0.99, variance))


def test_given_sensitivities_of_mean_one_are_refused():
    with pytest.raises(ConfigError, match=r"shift\.epsilon"):
        gaussian(shift=Location(epsilons=[0.5, 1.0, 1.5]))
    gaussian(shift=Location(epsilons=[0.2, 0.9, 1.5]))
