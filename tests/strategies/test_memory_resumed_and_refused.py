"""Strategies with memory resumed bit for bit; rules and settings that they cannot have, refused by name."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from naive_strategies import (
    CLIENTS,
    SIZES,
)

from fedsim import EvaluationOptions, Simulation
from fedsim.availability import Bernoulli, Full, Markov, Multiset, Uniform, UniformK
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset
from fedsim.local import SGD, InverseSqrt, LocalRule, PerStep
from fedsim.models import MLP
from fedsim.run.tracking import Tracking
from fedsim.strategies import F3AST, MIFA, FedAU, FedOpt, FedProx, FedVARP, PFedAvg, Scaffold


class Plain(LocalRule):
    """Gradient descent that knows nothing of corrections."""

    def step(self, carry, batch, lr, objective):
        gradient, loss = objective.gradient(carry["params"], batch)
        return carry | {"params": carry["params"] - lr * gradient}, loss


@pytest.mark.parametrize(
    ("strategy", "ignored"), [(Scaffold(), "correction"), (FedProx(), "anchor, proximal")], ids=["scaffold", "fedprox"]
)
def test_a_rule_that_would_ignore_the_correction_is_refused(strategy, ignored, Regression, regression_of):
    with pytest.raises(ConfigError, match=rf"{ignored}.*Plain.*local=sgd"):
        Simulation(
            regression_of(SIZES), Regression, clients=CLIENTS, strategy=strategy, local=Plain(steps=2), rounds=2
        ).run()


def test_a_rule_without_extras_runs_under_strategies_that_need_none(Regression, regression_of):
    for strategy in (FedAU(), F3AST(), MIFA(), FedVARP(), FedOpt(), PFedAvg()):
        Simulation(
            regression_of(SIZES), Regression, clients=CLIENTS, strategy=strategy, local=Plain(steps=2), rounds=2
        ).run()


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: FedAU(cutoff=0), r"cutoff=0"),
        (lambda: FedAU(server_lr=0), r"server_lr=0"),
        (lambda: F3AST(beta=0.0), r"beta=0"),
        (lambda: F3AST(beta=1.5), r"beta=1\.5"),
        (lambda: F3AST(k=0), r"k=0"),
        (lambda: F3AST(weighting="size"), r"weighting='size'.*uniform, data"),
        (lambda: MIFA(memory="gradients"), r"memory='gradients'.*did you mean 'gradient'"),
        (lambda: MIFA(memory_dtype="half"), r"memory_dtype='half'.*float16"),
        (lambda: FedVARP(memory_dtype="float8"), r"memory_dtype='float8'"),
        (lambda: Scaffold(server_lr=-1), r"server_lr=-1"),
        (lambda: FedProx(mu=-0.1), r"mu=-0\.1"),
        (lambda: FedOpt("sgd"), r"optimizer='sgd'.*adam, yogi, adagrad"),
        (lambda: FedOpt(beta2=1.1), r"beta2=1\.1"),
        (lambda: FedOpt(tau=0.0), r"tau=0"),
        (lambda: PFedAvg("III"), r"scheme='III'"),
    ],
)
def test_impossible_settings_name_their_key(build, key):
    with pytest.raises(ConfigError, match=key):
        build()


QUIET = Tracking(progress="none", tensorboard=False)
RESUMED = {
    "fedau": (FedAU(cutoff=2), None),
    "f3ast": (F3AST(0.5, 0.1, weighting="data"), None),
    "f3ast k": (F3AST(0.5, 0.1, k=2), None),
    "mifa": (MIFA(), None),
    "mifa gradient waits": (MIFA(0.5, "gradient", True, "float16"), None),
    "fedvarp": (FedVARP(), None),
    "fedvarp bfloat16": (FedVARP(memory_dtype="bfloat16"), None),
    "scaffold": (Scaffold(), None),
    "scaffold float16": (Scaffold(memory_dtype="float16"), lambda: Markov(Uniform(0.4))),
    "fedprox": (FedProx(0.1), None),
    "adam": (FedOpt("adam"), None),
    "yogi": (FedOpt("yogi"), None),
    "adagrad": (FedOpt("adagrad"), None),
    "p_fedavg full": (PFedAvg("full"), Full),
    "p_fedavg I": (PFedAvg("I"), lambda: Multiset(3)),
    "p_fedavg II": (PFedAvg("II"), lambda: UniformK(3)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RESUMED)
def test_three_rounds_and_three_more_are_six_bit_for_bit(name, tmp_path):
    strategy, availability = RESUMED[name]
    draw = np.random.default_rng(0)
    x, y = torch.as_tensor(draw.standard_normal((60, 4))), torch.as_tensor(draw.integers(0, 3, 60))

    def run(rounds: int, out: str, resume: bool = False):
        simulation = Simulation(
            Dataset("blobs", x, y, classes=3),
            functools.partial(MLP, hidden=(5,)),
            clients=5,
            availability=Bernoulli(Uniform(0.4)) if availability is None else availability(),
            strategy=strategy,
            local=SGD(lr=0.3, epochs=1, batch_size=4, schedule=PerStep(0.95)),
            rounds=rounds,
            seeds=(1, 4),
            evaluation=EvaluationOptions(every=1),
        )
        return simulation.run(tmp_path / out, resume=resume, tracking=QUIET)

    straight = run(6, "straight")
    run(3, "parts")
    resumed = run(6, "parts", resume=True)
    for field in dataclasses.fields(straight.state):
        one, other = getattr(resumed.state, field.name), getattr(straight.state, field.name)
        assert one.dtype == other.dtype
        assert torch.equal(one, other), field.name
    timeless = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in run.history] for run in (resumed, straight)
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize(
    ("schedule", "rounds", "rests"), [("constant", 2, True), (InverseSqrt(), 2, False), (InverseSqrt(), 1, True)]
)
def test_memory_of_gradients_is_told_to_rest_where_the_learning_rate_does_not_move(
    schedule: Any, rounds: int, rests: bool, Regression: Any, regression_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    local = SGD(steps=1) if schedule == "constant" else SGD(steps=1, schedule=schedule)
    Simulation(
        regression_of(SIZES), Regression, clients=CLIENTS, strategy=MIFA(memory="gradient"), local=local, rounds=rounds
    ).run()
    assert any("strategy.memory=gradient has no effect" in message for message in caplog.messages) == rests
