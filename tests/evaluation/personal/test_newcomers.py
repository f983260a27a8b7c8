"""Clients that join when training is over: never there before, then trained on their own from x^T."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.availability import Bernoulli, ClassCorrelated, Markov, Multiset, Sine, UniformK
from fedsim.data.datasets import Dataset, GaussianMean
from fedsim.data.partition import Natural
from fedsim.evaluation.personal import Personal
from fedsim.local import APFL, SGD, PerStep, PFedMe
from fedsim.models import Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.strategies import FedAvg, FedAWE, Scaffold

PROCESSES = {
    "sine": lambda: Bernoulli(ClassCorrelated(), Sine()),
    "uniform_k": lambda: UniformK(3),
    "markov": Markov,
    "multiset": lambda: Multiset(4),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_the_others_come_and_go_as_if_newcomers_did_not_exist(name):
    """Six owners of whom two are newcomers, and the first four alone: the same probabilities and the same who."""
    owners = np.repeat(np.arange(6), 5 + np.arange(6))
    y = torch.as_tensor(np.random.default_rng(0).integers(0, 4, len(owners)))
    seen = []
    for clients in (6, 4):
        kept = torch.as_tensor(owners) < clients
        data = Dataset(
            "labels", torch.ones(len(owners), 1)[kept], y[kept], classes=4, owners=torch.as_tensor(owners)[kept]
        )
        simulation = Simulation(
            data, Linear, clients=clients, partition=Natural(validation=0.2), availability=PROCESSES[name](),
            seeds=(1, 2), personal=Personal(newcomers=clients - 4),
        )  # fmt: skip
        process = simulation.availability
        seen.append([np.stack([process.probabilities(t), process.counts(t)]) for t in range(20)])
    np.testing.assert_allclose(*seen, atol=1e-12)


def simulation_of(**options) -> Simulation:
    """f_i(x) = ½ mean ‖x − z‖²; one full batch is an epoch, which contracts towards the client's mean by 1 − η."""
    draw = np.random.default_rng(4)
    owners = np.repeat(np.arange(6), 10)
    x = torch.as_tensor(draw.standard_normal((60, 2)) + owners[:, None])
    given = {"clients": 6, "partition": Natural(validation=0.2), "local": SGD(lr=0.1, steps=7, batch_size=None),
             "personal": Personal(newcomers=2, newcomer_epochs=3, train_samples=99), "rounds": 3, "seeds": (3, 5),
             "execution": Execution(dtype="float64")}  # fmt: skip
    dataset = Dataset("points", x, loss="half_squared_distance", owners=torch.as_tensor(owners))
    return Simulation(dataset, functools.partial(Mean, start=2.0), **given | options)


def test_newcomers_never_train_and_are_not_among_all_clients(play):
    simulation = simulation_of(personal=Personal(over="all", newcomers=2))
    for played in play(simulation):
        assert (played.report.cohort.client_index < 4).all()
    assert simulation.run().history[-1]["validated_clients"] == 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", [FedAvg, FedAWE])
@pytest.mark.parametrize("rule", ["sgd", "apfl", "pfedme"])
def test_epochs_of_newcomers_against_the_recursion(rule, strategy, tmp_path):
    """From x^T, whatever the strategy keeps; v starts as x^T too, and the schedule afresh."""
    options = {"lr": 0.1, "steps": 7, "batch_size": None, "schedule": PerStep(0.9)}
    local = {"sgd": lambda: SGD(**options), "apfl": lambda: APFL(alpha=0.3, **options),
             "pfedme": lambda: PFedMe(penalty=2.0, inner_steps=2, inner_lr=0.1, **options)}[rule]()  # fmt: skip
    simulation = simulation_of(local=local, strategy=strategy())
    result = simulation.run(tmp_path, tracking=Tracking(progress="none", tensorboard=False))
    epochs = result.extra["newcomers"]
    assert json.loads((tmp_path / "summary.json").read_text())["newcomers"] == epochs
    assert [epoch["epoch"] for epoch in epochs] == [0, 1, 2, 3]
    assert ("personal_validation_loss" in epochs[0]) == (rule != "sgd")
    for r in range(2):
        table, z = simulation.partition_tables[r], simulation.dataset.train_x
        parts = [np.split(t.order, t.offsets[1:-1]) for t in (table, table.validation)]
        expected = np.zeros((4, 4))
        for i in (4, 5):
            training, validation = (z[torch.as_tensor(p[i]).long()] for p in parts)
            centre, x = training.mean(0), result.state.model[r]
            w = v = x
            for epoch in range(4):
                own = 0.3 * v + 0.7 * w if rule == "apfl" else v
                values = [0.5 * (row - s).square().sum(1).mean() for row in (w, own) for s in (validation, training)]
                expected[epoch] += np.array(values) / 2
                lr = 0.1 * 0.9**epoch
                if rule == "pfedme":
                    target = (centre + 2 * w) / 3
                    v = target + 0.7**2 * (w - target)
                    w = w - lr * 2 * (w - v)
                else:
                    v = v - lr * 0.3 * (0.3 * v + 0.7 * w - centre)
                    w = w - lr * (w - centre)
        for epoch, values in zip(epochs, expected, strict=True):
            assert epoch["localized_validation_loss"][r] == pytest.approx(values[0])
            assert epoch["localized_training_loss"][r] == pytest.approx(values[1])
            assert epoch["global_validation_loss"][r] == epochs[0]["localized_validation_loss"][r]
            if rule != "sgd":
                assert epoch["personal_validation_loss"][r] == pytest.approx(values[2])
                assert epoch["personal_training_loss"][r] == pytest.approx(values[3])


@pytest.mark.parametrize("localize", ["rule", "sgd"])
def test_newcomers_get_what_the_strategy_hands_to_the_rule_unless_steps_are_plain(localize):
    """SCAFFOLD's c − c_i, with c_i = 0 for who never came: towards the client's mean minus c; plain steps: its mean."""
    personal = Personal(newcomers=2, newcomer_epochs=3, train_samples=99, localize=localize)
    simulation = simulation_of(strategy=Scaffold(), seeds=(3,), personal=personal)
    result = simulation.run()
    table, z = simulation.partition_tables[0], simulation.dataset.train_x
    losses = []
    for i in (4, 5):
        training, validation = (
            z[torch.as_tensor(np.split(t.order, t.offsets[1:-1])[i]).long()] for t in (table, table.validation)
        )
        centre = training.mean(0) - (localize == "rule") * result.state.mean[0]
        row = centre + 0.9 * (result.state.model[0] - centre)
        losses.append(0.5 * (row - validation).square().sum(1).mean().item())
    assert result.extra["newcomers"][1]["localized_validation_loss"][0] == pytest.approx(np.mean(losses))


def test_an_epoch_of_a_stream_is_a_round_of_local_steps():
    simulation = Simulation(
        GaussianMean(clients=3, means=[1.0, 2.0, 6.0], std=0.0), Mean, clients=3, rounds=1,
        local=SGD(lr=0.1, steps=2, batch_size=4), personal=Personal(newcomers=1, newcomer_epochs=2),
        execution=Execution(dtype="float64"),
    )  # fmt: skip
    result = simulation.run()
    theta = result.state.model[0, 0].item()
    for epoch in result.extra["newcomers"]:
        own = 6.0 + 0.9 ** (2 * epoch["epoch"]) * (theta - 6.0)
        assert epoch["localized_validation_loss"][0] == pytest.approx(0.5 * (own - 6.0) ** 2)
