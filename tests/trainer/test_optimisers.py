"""Local optimisers are torch.optim's, step for step; FedAvg of them is that written by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from by_hand import RATE, by_hand, simulation_of
from torch import nn

from fedsim import ConfigError, Execution
from fedsim.local import Adam, LocalRule, Momentum
from fedsim.strategies import FedProx, Scaffold

WORK: dict[str, Any] = {"lr": RATE, "epochs": 2, "batch_size": 3}
CASES = {
    "momentum": (Momentum(0.8, **WORK), functools.partial(torch.optim.SGD, lr=RATE, momentum=0.8)),
    "nesterov, decay": (
        Momentum(0.8, True, weight_decay=0.1, **WORK),
        functools.partial(torch.optim.SGD, lr=RATE, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
    "momentum, kept": (
        Momentum(0.8, state="client", **WORK),
        functools.partial(torch.optim.SGD, lr=RATE, momentum=0.8),
    ),
    "adam": (Adam(0.8, 0.9, **WORK), functools.partial(torch.optim.Adam, lr=RATE, betas=(0.8, 0.9))),
    "adam, coupled decay": (
        Adam(weight_decay=0.1, **WORK),
        functools.partial(torch.optim.Adam, lr=RATE, weight_decay=0.1),
    ),
    "adamw, kept": (
        Adam(weight_decay=0.1, decoupled=True, state="client", **WORK),
        functools.partial(torch.optim.AdamW, lr=RATE, weight_decay=0.1),
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "vmap": {"executor": "vmap"},
    "one by one": {"executor": "vmap", "chunk": 1},
    "loop": {"executor": "loop", "workers": 2},
    "fused": {"executor": "fused", "workers": 2},
}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", [build, linear])
@pytest.mark.parametrize("name", CASES)
def test_an_optimiser_is_torchs_own(name: str, model: Any) -> None:
    """Of clients with 7, 5 and 9 samples, that take 4, 2 and 6 steps."""
    rule, optimizer_of = CASES[name]
    expected: list[nn.Module] | None = None
    for way, execution in WAYS.items():
        simulation = simulation_of(model, local=rule, execution=Execution(dtype="float64", **execution))
        assert (simulation.trainer.executor_choice.rows_per_stack > 1) == (way == "fused" and model is linear)
        result = simulation.run()
        expected = expected or by_hand(simulation, model, optimizer_of, keep="kept" in name)
        for r, server in enumerate(expected):
            row = torch.cat([p.detach().reshape(-1) for p in server.parameters()])
            torch.testing.assert_close(result.state.model[r], row, rtol=0, atol=1e-9, msg=way)


@pytest.mark.parametrize("rule", [Momentum(**WORK), Adam(**WORK)], ids=["momentum", "adam"])
def test_a_proximal_term_is_part_of_the_gradient_and_a_correction_is_refused(rule: LocalRule) -> None:
    still = simulation_of(build, local=rule, strategy=FedProx(mu=0.0)).run().state.model
    near = simulation_of(build, local=rule, strategy=FedProx(mu=5.0)).run().state.model
    assert (near - still).abs().max() > 1e-3
    with pytest.raises(ConfigError, match="hands correction to the local rule"):
        simulation_of(build, local=rule, strategy=Scaffold()).run()


def test_settings_without_a_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match="never forgets"):
        Momentum(1.0)
    with pytest.raises(ConfigError, match="must be below 1"):
        Adam(beta2=1.0)
    with pytest.raises(ConfigError, match="choose one of round, client"):
        Adam(state="server")


@pytest.mark.parametrize("name", ["adam, coupled decay", "adamw, kept"])
def test_a_decoupled_decay_is_no_part_of_the_gradient(name: str) -> None:
    rule, optimizer_of = CASES[name]
    simulation = simulation_of(linear, local=rule, execution=Execution(dtype="float64", executor="loop"))
    expected = by_hand(simulation, linear, optimizer_of, keep="kept" in name)
    rows = torch.stack([torch.cat([p.detach().reshape(-1) for p in server.parameters()]) for server in expected])
    torch.testing.assert_close(simulation.run().state.model, rows, rtol=0, atol=1e-9)
