"""The fused executor takes plain descents, stacks what may be stacked, and agrees with the loop on everything else."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim import Evaluation, Execution, Simulation
from fedsim.availability import UniformK
from fedsim.core import ConfigError
from fedsim.datasets import Dataset, GaussianMean
from fedsim.local import APFL, SGD, PerFedAvg
from fedsim.models import CINIC10CNN, MLP, SVHNCNN, Linear, Mean
from fedsim.models.dropout import key_dropouts
from fedsim.shift import Location
from fedsim.strategies import FedProx, Scaffold
from fedsim.trainer import fused_executor
from fedsim.trainer.stepping import stackable

SIZES = (1, 9, 4, 3, 8)
SHAPE = (2, 4, 4)


def images() -> Dataset:
    draw = np.random.default_rng(1)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    x = torch.as_tensor(draw.standard_normal((len(owners), *SHAPE)))
    y = torch.as_tensor(draw.integers(0, 3, len(owners)))
    return Dataset("images", x, y, classes=3, owners=torch.as_tensor(owners))


double = functools.partial(Execution, dtype="float64")


def simulation_of(model, rule: SGD | None = None, dataset: Dataset | None = None, **options) -> Simulation:
    rule = rule or SGD(lr=0.05, epochs=2, batch_size=3, drop_last=False, weight_decay=0.1)
    defaults = {"clients": len(SIZES), "seeds": (3, 5), "rounds": 2, "evaluation": Evaluation(every=2)}
    defaults |= {"execution": double()}
    return Simulation(dataset or images(), model, local=rule, **defaults | options)


class Twice(nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(self.inner(x.flatten(1)).relu()))


class Mixing(nn.Module):
    """Centres every batch: rows that shared one would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return self.layer(flat - flat.mean(0))


class Unused(nn.Module):
    """A layer that no sample meets: it decays, and has no gradient."""

    samplewise = True

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(32, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1))


def sequential(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


def frozen() -> nn.Module:
    module = sequential(nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 3))
    module[1].weight.requires_grad_(False)
    return module


def tied() -> nn.Module:
    module = sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 3))
    module[3].weight = module[1].weight
    return module


def sized(*layers: nn.Module) -> nn.Module:
    """With a linear layer at the end that fits."""
    inner = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(inner, nn.Linear(inner(torch.zeros(1, *SHAPE)).shape[1], 3))


MODELS = {
    "linear": (functools.partial(Linear, shape=SHAPE, classes=3), True),
    "no bias": (lambda: sequential(nn.Linear(32, 3, bias=False)), True),
    "mlp": (functools.partial(MLP, shape=SHAPE, classes=3, hidden=(6, 5)), True),
    "nested": (lambda: sequential(nn.Sequential(nn.Linear(32, 4), nn.GELU()), nn.Sequential(nn.Linear(4, 3))), True),
    "along the last axis": (lambda: nn.Sequential(nn.Linear(4, 2), nn.SiLU(), nn.Flatten(), nn.Linear(16, 3)), True),
    "in place": (lambda: sequential(nn.Linear(32, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)), True),
    "dropout": (functools.partial(MLP, shape=SHAPE, classes=3, hidden=(6, 5), dropout=0.4), True),
    "channels dropped": (lambda: nn.Sequential(nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(32, 3)), True),
    "convolutions": (lambda: sized(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), False),
    "convolutions, dropout": (lambda: sized(nn.Conv2d(2, 3, 2), nn.Dropout2d(0.3), nn.Conv2d(3, 2, 2)), False),
    "normalised": (lambda: sequential(nn.LayerNorm(32), nn.Linear(32, 3)), False),
    "softmax over samples": (lambda: sequential(nn.Softmax(0), nn.Linear(32, 3)), False),
    "flattened later": (lambda: nn.Sequential(nn.Flatten(2), nn.Linear(16, 3), nn.Flatten(), nn.Linear(6, 3)), False),
    "a layer twice": (Twice, False),
    "a batch's mean": (Mixing, False),
    "frozen": (frozen, False),
    "tied": (tied, False),
    "unused": (Unused, True),
}  # fmt: skip
PUBLISHED = {
    "as in SVHN": functools.partial(SVHNCNN, shape=SHAPE, classes=3),
    "as in CINIC-10": functools.partial(CINIC10CNN, shape=SHAPE, classes=3, dropout=0.3),
}


def paired(*others: tuple[str, ...]) -> list[Any]:
    """Every model with one of each of the others; the rest of the product is slow."""
    every = [(name, other) for name in MODELS for other in itertools.chain(*others)]
    chosen = {(name, some[place % len(some)]) for some in others for place, name in enumerate(MODELS)}
    return [pytest.param(*pair, marks=[] if pair in chosen else pytest.mark.slow) for pair in every]


@pytest.mark.parametrize("name", MODELS)
def test_stacks_are_of_layers_that_treat_samples_alone_and_are_used_once(name):
    build, expected = MODELS[name]
    module = build()
    key_dropouts(module)
    assert stackable(module, convolutions=False) == expected


@pytest.mark.parametrize("name", [*MODELS, *PUBLISHED])
@pytest.mark.parametrize("options", [{}, {"chunk": 3, "workers": 2}], ids=str)
def test_any_module_ends_where_the_loop_ends(name, options):
    """With ridge, weight decay, epochs and short batches: rows of unequal steps, padding where rows are stacked."""
    model = PUBLISHED[name] if name in PUBLISHED else functools.partial(MODELS[name][0])
    fused = simulation_of(model, execution=double("fused", **options), ridge=0.05).run()
    loop = simulation_of(model, execution=double("loop", workers=1), ridge=0.05).run()
    torch.testing.assert_close(fused.state.model, loop.state.model, rtol=0, atol=1e-12)
    for left, right in zip(fused.history, loop.history, strict=True):
        assert left == pytest.approx(right | {"seconds": left["seconds"]}, abs=1e-12)


CONVOLUTIONS = {
    "as in SVHN": (PUBLISHED["as in SVHN"], True),
    "as in CINIC-10": (PUBLISHED["as in CINIC-10"], True),
    "strides": (lambda: sized(nn.Conv2d(2, 3, (2, 3), stride=(1, 2), padding=(1, 0))), True),
    "dilated, no bias": (lambda: sized(nn.Conv2d(2, 3, 2, dilation=2, bias=False), nn.AvgPool2d(2)), True),
    "one after another": (lambda: sized(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 1)), True),
    "groups": (lambda: sized(nn.Conv2d(2, 4, 3, groups=2)), False),
    "reflected": (lambda: sized(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect")), False),
    "padded by name": (lambda: sized(nn.Conv2d(2, 3, 3, padding="same")), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("rule", ["sgd", "apfl"])
def test_convolutions_may_be_stacked(name, rule, monkeypatch):
    """As they are where there is no CPU: patches and matrix products end where PyTorch's convolutions do."""
    build, expected = CONVOLUTIONS[name]
    model = functools.partial(build)
    options = {"lr": 0.05, "epochs": 2, "batch_size": 3, "drop_last": False, "weight_decay": 0.1}
    rule = SGD(**options) if rule == "sgd" else APFL(alpha=0.4, **options)
    loop = simulation_of(model, rule, execution=double("loop", workers=1)).run()
    monkeypatch.setattr(fused_executor, "channels_last", lambda model: False)
    fused = simulation_of(model, rule, execution=double("fused"))
    assert (fused.trainer.choice.stack > 1) == expected
    result = fused.run()
    torch.testing.assert_close(result.state.model, loop.state.model, rtol=0, atol=1e-12)
    for left, right in zip(result.history, loop.history, strict=True):
        assert left == pytest.approx(right | {"seconds": left["seconds"]}, abs=1e-12)


STRATEGIES = {"FedProx": FedProx(0.7), "Scaffold": Scaffold()}


@pytest.mark.parametrize(("name", "strategy"), paired(tuple(STRATEGIES)))
def test_what_a_strategy_adds_to_gradients_is_added(name, strategy):
    """Of clients that come and go; a personal model beside is nobody else's."""
    build = MODELS[name][0]
    given = {"strategy": STRATEGIES[strategy], "availability": UniformK(3), "rounds": 3}
    options = {"lr": 0.05, "epochs": 2, "batch_size": 3, "drop_last": False, "weight_decay": 0.1}
    for rule in (SGD(**options), APFL(alpha=0.4, **options)):
        alone = given | {"strategy": None, "execution": double("fused")}
        plain = simulation_of(functools.partial(build), rule, **alone).run()
        fused, loop = (
            simulation_of(functools.partial(build), rule, execution=double(executor, chunk=4, workers=2), **given).run()
            for executor in ("fused", "loop")
        )
        assert not torch.allclose(plain.state.model, loop.state.model)
        torch.testing.assert_close(vars(fused.state), vars(loop.state), rtol=0, atol=1e-12)
        for left, right in zip(fused.history, loop.history, strict=True):
            assert left == pytest.approx(right | {"seconds": left["seconds"]}, abs=1e-12)


PERSONAL = {
    "fixed": {},
    "adaptive": {"adaptive": True, "alpha_decay": 0.02, "alpha": 0.6},
    "with options": {"adaptive": True, "personal_lr": 0.11, "weight_decay": 0.1},
    "outputs": {"mix": "outputs", "alpha": 0.6},
    "outputs, with options": {"mix": "outputs", "adaptive": True, "personal_lr": 0.11, "weight_decay": 0.1},
}


@pytest.mark.parametrize(("name", "options"), paired(tuple(PERSONAL)))
def test_personal_models_end_where_the_loop_ends(name, options):
    """Two models of a client and their mixture, over rounds: rows of unequal steps, clients that are away."""
    build = MODELS[name][0]
    rule = APFL(lr=0.05, epochs=2, batch_size=3, drop_last=False, **PERSONAL[options])
    ridge = 0.05 if rule.mix == "outputs" else 0.0
    ways = (double("fused"), double("fused", chunk=3, workers=2), double("loop", workers=1))
    away = {"availability": UniformK(3), "rounds": 3, "ridge": ridge}
    ends = []
    for way in ways:
        simulation = simulation_of(functools.partial(build), rule, execution=way, **away)
        memory = simulation.trainer.memory(simulation.initial_state().model)
        simulation.trainer.memory = lambda model, memory=memory: memory  # where it can be looked at
        ends.append((simulation.run(), memory.clients))
        assert simulation.trainer.choice.executor == way.executor
    *fused, (loop, own) = ends
    assert not torch.equal(own["personal"][0], own["personal"][1])
    assert not rule.adaptive or own["alpha"].std() > 1e-5
    for result, mine in fused:
        torch.testing.assert_close(result.state.model, loop.state.model, rtol=0, atol=1e-12)
        torch.testing.assert_close(mine, own, rtol=0, atol=1e-12)
        for left, right in zip(result.history, loop.history, strict=True):
            assert left == pytest.approx(right | {"seconds": left["seconds"]}, abs=1e-12)


SMALL = functools.partial(MLP, shape=SHAPE, classes=3, hidden=(4,))
CNN = PUBLISHED["as in SVHN"]
MOVING = {"dataset": GaussianMean(clients=len(SIZES)), "shift": Location(0.5, 0.1)}
CHOICES = {
    "plain SGD": (SMALL, None, {}, "fused"),
    "as asked for": (SMALL, None, {"execution": double("vmap")}, "vmap"),
    "proximal term": (SMALL, None, {"strategy": FedProx(0.1)}, "fused"),
    "correction": (SMALL, APFL(lr=0.1), {"strategy": Scaffold()}, "fused"),
    "clipped": (SMALL, SGD(lr=0.1, clip=1.0), {}, "vmap"),
    "personal models": (SMALL, APFL(lr=0.1, adaptive=True), {}, "fused"),
    "α at every step": (SMALL, APFL(lr=0.1, adaptive=True, alpha_every="step"), {}, "vmap"),
    "outputs mixed, with a ridge": (SMALL, APFL(lr=0.1, mix="outputs"), {"ridge": 0.1}, "fused"),
    "personal, clipped": (SMALL, APFL(lr=0.1, clip=1.0), {}, "vmap"),
    "personal, with a ridge": (SMALL, APFL(lr=0.1), {"ridge": 0.1}, "vmap"),
    "another rule": (SMALL, PerFedAvg(lr=0.1), {}, "vmap"),
    "not stackable": (Mixing, None, {}, "vmap"),
    "convolutions": (CNN, None, {}, "fused"),
    "convolutions, clipped": (CNN, SGD(lr=0.1, clip=1.0), {"strategy": Scaffold()}, "loop"),
    "data that answer": (Mean, SGD(lr=0.1), MOVING, "vmap"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_what_is_chosen(case):
    model, rule, options, executor = CHOICES[case]
    simulation = simulation_of(model, rule, **{"execution": double(trial=False)} | options)
    simulation.run()
    assert simulation.trainer.choice.executor == executor


def test_what_is_more_than_plain_descents_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.executor=fused takes plain descents only"):
        simulation_of(Twice, SGD(clip=1.0), execution=double("fused"))
