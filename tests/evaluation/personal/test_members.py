"""Newcomers are no members while the others train: m clients and n newcomers train as the m clients alone do."""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation, strategies
from fedsim.availability import Bernoulli, Uniform
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Natural
from fedsim.evaluation.personal import Personal
from fedsim.local import APFL, SGD
from fedsim.models import Linear
from fedsim.strategies import Strategy

MEMBERS, NEWCOMERS = 4, 2
# for one law of availability alone, which knows who is a member; for models with adapters, or for one local rule
BY_ITSELF = {"PFedAvg", "FedExLoRA", "FedPAC", "FlexLoRA", "FLoRA", "HetLoRA", "RoLoRA"}
# Every strategy there is, by its class; with other settings than its own where those would do nothing here.
STRATEGIES = {
    name: made
    for name in strategies.__all__
    if isinstance(made := getattr(strategies, name), type)
    and issubclass(made, Strategy)
    and not inspect.isabstract(made)
    and name not in BY_ITSELF
} | {
    "FedLaAvg": lambda: strategies.FedLaAvg(0.5),
    "Focus": lambda: strategies.Focus(0.2),
    "Oort": lambda: strategies.Oort(2),
    "PowerOfChoice": lambda: strategies.PowerOfChoice(1, 3),
    "Scaffnew": lambda: strategies.Scaffnew(require_full=False),
    "RobustServer": lambda: strategies.RobustServer(strategies.Median(), strategies.FedOpt()),
    "AmplifiedFedAvg": lambda: strategies.AmplifiedFedAvg(2),
    "AmplifiedScaffold": lambda: strategies.AmplifiedScaffold(2),
    "FedBuff": lambda: strategies.FedBuff(2),
    "DSGD": lambda: strategies.DSGD(topology="complete"),
    **{name: functools.partial(getattr(strategies, name), bad=0.0) for name in ("Krum", "MultiKrum", "Bulyan")},
    "fedavg by data": lambda: strategies.FedAvg(weighting="data"),
    "mifa, waiting": lambda: strategies.MIFA(wait_for_all=True),
}


def labelled(clients: int) -> Dataset:
    """The first clients of one and the same population, of unequal sizes."""
    owners = np.repeat(np.arange(MEMBERS + NEWCOMERS), 5 + 3 * np.arange(MEMBERS + NEWCOMERS))
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((len(owners), 3)), draw.integers(0, 3, len(owners))
    kept = owners < clients
    x, y, owners = (torch.as_tensor(part[kept]) for part in (x, y, owners))
    return Dataset("labelled", x, y, classes=3, owners=owners)


def simulation_of(newcomers: int, strategy, local) -> Simulation:
    clients = MEMBERS + newcomers
    return Simulation(
        labelled(clients), Linear, clients=clients, partition=Natural(validation=0.2),
        availability=Bernoulli(Uniform(0.7)), strategy=strategy, local=local, rounds=6, seeds=(0, 4),
        personal=Personal(newcomers=newcomers, newcomer_epochs=2), execution=Execution(dtype="float64"),
    )  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", STRATEGIES)
def test_newcomers_change_nothing_for_the_others(name):
    with_them, without = (
        simulation_of(n, STRATEGIES[name](), SGD(lr=0.3, steps=3, batch_size=4)) for n in (NEWCOMERS, 0)
    )
    found, expected = with_them.run(), without.run()
    assert torch.equal(found.state.model, expected.state.model)
    assert found.final["train_loss"] == expected.final["train_loss"]
    assert len(found.extra["newcomers"]) == 3


def test_nor_under_rules_with_memory():
    rule = {"alpha": 0.5, "adaptive": True, "lr": 0.3, "steps": 3, "batch_size": 4}
    found, expected = (simulation_of(n, strategies.Scaffold(), APFL(**rule)).run() for n in (NEWCOMERS, 0))
    assert torch.equal(found.state.model, expected.state.model)
    assert torch.equal(found.state.memory, expected.state.memory)
