"""The fused executor takes plain descents, stacks what may be stacked, and agrees with the loop on everything else."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from stackable_models import (
    CONVOLUTIONS,
    MODELS,
    OPTIMISERS,
    PUBLISHED,
    SHAPE,
    SIZES,
    Mixing,
    Twice,
    double,
    paired,
    simulation_of,
)

from fedsim.availability import UniformK
from fedsim.core import ConfigError
from fedsim.data.contamination import Gaussian
from fedsim.data.datasets import GaussianMean
from fedsim.local import APFL, SGD, Adam, Momentum, PerFedAvg
from fedsim.models import MLP, Mean
from fedsim.models.dropout import key_dropouts
from fedsim.shift import Location
from fedsim.strategies import FedProx, Scaffold
from fedsim.trainer import Execution, fused_executor, model_stack
from fedsim.trainer.choose import candidate_executors
from fedsim.trainer.stepping import accepts_stacked_rows


@pytest.mark.parametrize("name", MODELS)
def test_stacks_are_of_layers_that_treat_samples_alone_and_are_used_once(name):
    build, expected = MODELS[name]
    module = build()
    key_dropouts(module)
    assert accepts_stacked_rows(module, convolutions=False) == expected


@pytest.mark.sampled(4)
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


@pytest.mark.parametrize("options", [{}, {"chunk": 3, "workers": 2}], ids=str)
def test_samples_are_planted_as_in_the_loop(options):
    """Of the same law in the same clients and steps, whichever rows are stacked."""
    ends = [
        simulation_of(MODELS["mlp"][0], execution=way, contamination=Gaussian(fraction=0.4)).run().state.model
        for way in (double("fused", **options), double("loop", workers=1))
    ]
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "optimiser"), sorted(paired(tuple(OPTIMISERS)), key=lambda pair: pair.values[1]))
def test_optimisers_end_where_the_loop_ends(name, optimiser):
    """With ridge, a schedule and a proximal term, of clients that come and go, one seed's rate being another's half:
    models, and what clients remember."""
    given = {"ridge": 0.05, "strategy": FedProx(0.7), "availability": UniformK(3), "rounds": 3}
    rule = copy.copy(OPTIMISERS[optimiser])
    rule.rates = [0.05, 0.025]
    ends = []
    for way in (double("loop", workers=1), double("fused"), double("fused", chunk=3, workers=2)):
        simulation = simulation_of(functools.partial(MODELS[name][0]), rule, execution=way, **given)
        memory = simulation.trainer.initial_memory(simulation.initial_state().model)
        simulation.trainer.initial_memory = lambda model, memory=memory: memory  # where it can be looked at
        ends.append((simulation.run(), memory.clients))
    (loop, own), *others = ends
    assert bool(own) == (rule.state == "client")
    for result, mine in others:
        torch.testing.assert_close(result.state.model, loop.state.model, rtol=0, atol=1e-11)
        torch.testing.assert_close(mine, own, rtol=0, atol=1e-11)
        for left, right in zip(result.history, loop.history, strict=True):
            assert left == pytest.approx(right | {"seconds": left["seconds"]}, abs=1e-11)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("rule", ["sgd", "apfl", "adam", "nesterov"])
def test_convolutions_may_be_stacked(name, rule, monkeypatch):
    """As they are where there is no CPU: patches and matrix products end where PyTorch's convolutions do."""
    build, expected = CONVOLUTIONS[name]
    model = functools.partial(build)
    options = {"lr": 0.05, "epochs": 2, "batch_size": 3, "drop_last": False, "weight_decay": 0.1}
    rules = {"sgd": SGD(**options), "apfl": APFL(alpha=0.4, **options)} | OPTIMISERS
    rule = copy.copy(rules[rule])
    if isinstance(rule, Adam):
        rule.eps = 1e-3  # a fitted sample's gradient is rounding, and would be divided by its size
    loop = simulation_of(model, rule, execution=double("loop", workers=1)).run()
    for module in (fused_executor, model_stack):
        monkeypatch.setattr(module, "prefers_channels_last", lambda model: False)
    fused = simulation_of(model, rule, execution=double("fused"))
    assert (fused.trainer.executor_choice.rows_per_stack > 1) == expected
    result = fused.run()
    torch.testing.assert_close(result.state.model, loop.state.model, rtol=0, atol=1e-12)
    for left, right in zip(result.history, loop.history, strict=True):
        assert left == pytest.approx(right | {"seconds": left["seconds"]}, abs=1e-12)


STRATEGIES = {"FedProx": FedProx(0.7), "Scaffold": Scaffold()}


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(2)
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
        memory = simulation.trainer.initial_memory(simulation.initial_state().model)
        simulation.trainer.initial_memory = lambda model, memory=memory: memory  # where it can be looked at
        ends.append((simulation.run(), memory.clients))
        assert simulation.trainer.executor_choice.executor == way.executor
    *fused, (loop, own) = ends
    assert not torch.equal(own["personal"][0], own["personal"][1])
    assert not rule.adaptive or own["alpha"].std() > 1e-5
    for result, mine in fused:
        torch.testing.assert_close(result.state.model, loop.state.model, rtol=0, atol=1e-12)
        torch.testing.assert_close(mine, own, rtol=0, atol=1e-12)
        for left, right in zip(result.history, loop.history, strict=True):
            assert left == pytest.approx(right | {"seconds": left["seconds"]}, abs=1e-12)


class Own(Adam):
    """A rule of one's own, whose step may be another."""


SMALL = functools.partial(MLP, shape=SHAPE, classes=3, hidden=(4,))
CNN = PUBLISHED["as in SVHN"]
MOVING = {"dataset": GaussianMean(clients=len(SIZES)), "shift": Location(0.5, 0.1)}
CHOICES = {
    "plain SGD": (SMALL, None, {}, "fused"),
    "as asked for": (SMALL, None, {"execution": double("vmap")}, "vmap"),
    "proximal term": (SMALL, None, {"strategy": FedProx(0.1)}, "fused"),
    "correction": (SMALL, APFL(lr=0.1), {"strategy": Scaffold()}, "fused"),
    "clipped": (SMALL, SGD(lr=0.1, clip=1.0), {}, "vmap"),
    "momentum": (SMALL, Momentum(lr=0.1), {}, "fused"),
    "momentum, clipped": (SMALL, Momentum(lr=0.1, clip=1.0), {}, "vmap"),
    "momentum, kept": (CNN, Momentum(lr=0.1, state="client"), {"strategy": FedProx(0.1)}, "fused"),
    "Adam": (SMALL, Adam(lr=0.01), {}, "fused"),
    "a rule derived from Adam": (SMALL, Own(lr=0.01), {}, "vmap"),
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


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CHOICES)
def test_what_is_chosen(case):
    model, rule, options, executor = CHOICES[case]
    simulation = simulation_of(model, rule, **{"execution": double(trial=False)} | options)
    simulation.run()
    assert simulation.trainer.executor_choice.executor == executor


@pytest.mark.parametrize(
    ("model", "executors"), [(CNN, ["vmap", "fused", "loop"]), (SMALL, ["fused"]), (Mixing, ["vmap", "fused", "loop"])]
)
def test_what_a_gpu_may_choose(model, executors, monkeypatch):
    """The rule's choice first; models of linear layers are not tried."""
    simulation = simulation_of(model, None, execution=double())
    trainer = simulation.trainer
    monkeypatch.setattr(simulation.model, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**36, 2**36))
    choices = candidate_executors(Execution(), simulation.model, trainer.local_rule, trainer.shift, 20, 64)
    assert [choice.executor for choice in choices] == executors


def test_what_is_more_than_plain_descents_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.executor=fused takes plain descents only"):
        simulation_of(Twice, SGD(clip=1.0), execution=double("fused"))
