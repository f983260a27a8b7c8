"""trainer.precision=bf16: all executors round the same products; rows, and what is remembered of them, are float32."""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from stackable_models import MODELS, simulation_of, sized
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim import EvaluationOptions, Execution, Simulation, Tracking
from fedsim.data.datasets import Digits
from fedsim.local import APFL, SGD, Adam, LocalRule, Momentum
from fedsim.models import MLP
from fedsim.models.precision import bfloat16_cpu_flags
from fedsim.run.together import run_together
from fedsim.strategies import FedAvg, FedProx
from fedsim.trainer import fused_executor, model_stack, trial

QUIET = Tracking(progress="none", tensorboard=False)
WORK = {"lr": 0.05, "epochs": 2, "batch_size": 3, "drop_last": False}
RULES: dict[str, LocalRule] = {
    "sgd": SGD(weight_decay=0.1, **WORK),
    "nesterov": Momentum(0.8, nesterov=True, state="client", **WORK),
    "adam": Adam(0.8, 0.9, eps=1e-2, state="client", **WORK),
    "apfl": APFL(alpha=0.4, **WORK),
}
NETWORKS = {
    name: MODELS[name][0] for name in ("linear", "nested", "along the last axis", "normalised", "a layer twice", "tied")
} | {
    "convolutions": lambda: sized(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Dropout2d(0.3), nn.Conv2d(3, 2, 2)),
    "group norm": lambda: sized(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.AvgPool2d(2)),
}


def rounded(executor: str = "auto", precision: str = "bf16", **options) -> Execution:
    return Execution(executor, precision=precision, **{"trial": False, "workers": 1} | options)


def ended(build, rule: LocalRule, execution: Execution, **options):
    """The model before and after, and what clients remember."""
    simulation = simulation_of(functools.partial(build), copy.deepcopy(rule), execution=execution, **options)
    start = simulation.initial_state().model
    memory = simulation.trainer.initial_memory(start)
    simulation.trainer.initial_memory = lambda model: memory
    return start, simulation.run().state.model, memory.clients


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name in NETWORKS for rule in RULES])
def test_executors_agree_to_what_is_rounded(name: str, rule: str) -> None:
    """Some twelve steps apart by less than 2⁻⁵ of the way that they went, in norm: 8 bits of mantissa in every product,
    which a bias's sum, or a rate before or after it, rounds differently."""
    options = {"strategy": FedProx(0.7), "ridge": 0.0 if rule == "apfl" else 0.05}
    build = NETWORKS[name]
    found = {way: ended(build, RULES[rule], rounded(way), **options) for way in ("loop", "fused", "vmap")}
    _, full, _ = ended(build, RULES[rule], rounded("loop", "full"), **options)
    start, loop, own = found["loop"]
    way = (loop - start).norm()
    assert 0 < (full - loop).norm() < way / 32
    for _, model, memory in found.values():
        assert model.dtype == torch.float32
        assert (model - loop).norm() < way / 32
        assert memory.keys() == own.keys()
        assert all(not value.is_floating_point() or value.dtype == torch.float32 for value in memory.values())


@pytest.mark.parametrize("rule", ["nesterov", "adam"])
def test_stacked_products_are_those_of_autocast(rule: str) -> None:
    """Where gradients come unscaled and no bias is summed, nothing is rounded in another way than PyTorch's does."""
    build = MODELS["no bias"][0]
    (_, loop, own), (_, fused, mine) = (ended(build, RULES[rule], rounded(way)) for way in ("loop", "fused"))
    torch.testing.assert_close(fused, loop, rtol=0, atol=1e-6)
    torch.testing.assert_close(mine, own, rtol=0, atol=1e-6)


def test_convolutions_as_patches_agree_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where they are stacked."""
    build = NETWORKS["convolutions"]
    start, loop, _ = ended(build, RULES["nesterov"], rounded("loop"))
    for module in (fused_executor, model_stack):
        monkeypatch.setattr(module, "prefers_channels_last", lambda model: False)
    _, fused, _ = ended(build, RULES["nesterov"], rounded("fused"))
    assert 0 < (fused - loop).norm() < (loop - start).norm() / 32


class Casts(TorchDispatchMode):
    """Notes shapes of what is rounded to bfloat16, and how inputs and weights of convolutions lie."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.convolved: list[tuple[torch.dtype, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name == "_to_copy" and kwargs.get("dtype") == torch.bfloat16:
            self.shapes.append(tuple(args[0].shape))
        if name in ("convolution", "mkldnn_convolution"):
            self.convolved += [(x.dtype, x.is_contiguous(memory_format=torch.channels_last)) for x in args[:2]]
        return func(*args, **kwargs)


def casts_of_a_step(build, executor: str) -> Casts:
    """Of one row's second step: what two have beyond one."""
    found = []
    for steps in (1, 2):
        rule = SGD(lr=0.1, steps=steps, batch_size=7)
        simulation = simulation_of(functools.partial(build), rule, execution=rounded(executor), seeds=(3,))
        cohort = simulation.federation.make_cohort(np.array([[0, 1, 0, 0, 0]]), np.ones((1, 5)))
        model = simulation.initial_state().model
        with Casts() as casts:
            simulation.trainer.run(model, cohort, 0, model)
        found.append(casts)
    first, both = found
    both.shapes = both.shapes[len(first.shapes) :]
    return both


@pytest.mark.sampled(6)
@pytest.mark.parametrize("executor", ["fused", "loop"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_weight_is_rounded_once_where_it_is_used(name: str, executor: str) -> None:
    """For both ways; where a layer is used twice, so that the gradients of its uses are added up in float32, twice."""
    build = NETWORKS[name]
    weights = [tuple(p.shape) for p in build().parameters() if p.dim() > 1]
    shapes = casts_of_a_step(build, executor).shapes
    for shape in set(weights):
        uses = 2 if name in ("a layer twice", "tied") and shape == (32, 32) else weights.count(shape)
        assert sum(cast in (shape, (1, *shape)) for cast in shapes) == uses, shapes


def test_convolutions_are_channels_last_in_bfloat16() -> None:
    convolved = casts_of_a_step(lambda: sized(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 2)), "fused").convolved
    assert len(convolved) == 8
    assert set(convolved) == {(torch.bfloat16, True)}


def digits(precision: str, rounds: int = 4, **options) -> Simulation:
    given = {
        "clients": 10,
        "seeds": (0, 1),
        "evaluation": EvaluationOptions(every=rounds),
        "strategy": FedAvg(),
    } | options
    model, local = functools.partial(MLP, hidden=(16,)), Momentum(lr=0.1, steps=5, batch_size=10, state="client")
    return Simulation(Digits(), model, local=local, rounds=rounds, execution=rounded(precision=precision), **given)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    straight = digits("bf16").run(tmp_path / "straight", tracking=QUIET)
    digits("bf16", 2).run(tmp_path / "parts", tracking=QUIET)
    resumed = digits("bf16").run(tmp_path / "parts", resume=True, tracking=QUIET)
    assert torch.equal(resumed.state.model, straight.state.model)


def test_runs_in_lockstep_have_the_numbers_they_have_alone() -> None:
    """Those of a precision meet in one call of a trainer; no run meets one of another precision."""
    makes = [functools.partial(digits, "bf16", strategy=FedProx(mu)) for mu in (0.1, 1.0)] + [
        functools.partial(digits, "full", strategy=FedProx(0.1))
    ]
    alone, together = [make().run() for make in makes], run_together([make() for make in makes])
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one.state.model, other.state.model, rtol=0, atol=1e-5)
    assert not torch.equal(alone[0].state.model, alone[2].state.model)


def test_accuracies_are_those_of_float32() -> None:
    """Paired by seed: the mean difference lies within five standard errors, and within two test samples."""
    test = len(Digits().test_x)
    found = {}
    for precision in ("full", "bf16"):
        history = digits(precision, 20, seeds=range(8)).run().history
        found[precision] = np.array([row["test_accuracy"] for row in history if row["round"] == 20])
    difference = found["bf16"] - found["full"]
    assert found["full"].mean() > 0.85
    assert len(difference) == 8
    assert abs(difference.mean()) <= 5 * difference.std(ddof=1) / 8**0.5 + 1e-12
    assert abs(difference.mean()) <= 2 / test


@pytest.mark.parametrize(("precision", "trial_is_on", "winner", "said"), [
    ("bf16", True, "full", True), ("bf16", True, "bf16", False), ("bf16", False, "full", False),
    ("full", True, "full", False),
])  # fmt: skip
def test_what_is_slower_here_is_said(monkeypatch, caplog, precision, trial_is_on, winner, said) -> None:
    """The contest is between the two precisions of the executor that was chosen, on the run's rows."""
    asked = []

    def fastest(contenders, rows, device, least, alone):
        for contender in contenders.values():
            contender(rows)
        asked.append(list(contenders))
        return winner

    monkeypatch.setattr(trial, "FASTEST_EXECUTOR_NAMES", {})
    monkeypatch.setattr(trial, "fastest_contender", fastest)
    with caplog.at_level(logging.WARNING):
        simulation = simulation_of(MODELS["mlp"][0], execution=rounded(precision=precision, trial=trial_is_on))
        simulation.run()
    assert ("trainer.precision=bf16: steps of this model are slower here" in caplog.text) == said
    assert asked == ([["bf16", "full"]] if trial_is_on and precision == "bf16" else [])


def test_units_are_those_the_processor_names(tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    for text, units in (
        ("processor\t: 0\nmodel name\t: amx_bf16\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n", UNITS),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f\nbugs\t\t: bf16\n", ()),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", ("bf16",)),
    ):
        told.write_text(text)
        bfloat16_cpu_flags.cache_clear()
        assert bfloat16_cpu_flags(told) == units
    assert bfloat16_cpu_flags(tmp_path / "none") is None


UNITS = ("amx_bf16", "avx512_bf16")
