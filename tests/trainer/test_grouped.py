"""Convolutions of several clients as one grouped convolution end where one client after another ends."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from stackable_models import CONVOLUTIONS, OPTIMISERS, PUBLISHED, double, images, simulation_of, sized
from torch import nn

from fedsim.availability import UniformK
from fedsim.core.errors import ConfigError
from fedsim.local import APFL, SGD, Adam
from fedsim.models import LeafCNN
from fedsim.strategies import FedProx, Scaffold
from fedsim.trainer.grouped_convolutions import find_convolution_trunk, is_groupable

OPTIONS = {"lr": 0.05, "epochs": 2, "batch_size": 3, "drop_last": False, "weight_decay": 0.1}
NORMALISED = {
    "group normalisation": lambda: sized(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 2)
    ),
    "normalised twice": lambda: sized(
        nn.Conv2d(2, 4, 1, bias=False), nn.GroupNorm(4, 4), nn.GELU(), nn.GroupNorm(1, 4)
    ),
    "pooled to one pixel": lambda: sized(nn.Conv2d(2, 3, 2), nn.ELU(), nn.AdaptiveAvgPool2d(1)),
    "in a sequence within one": lambda: nn.Sequential(
        nn.Identity(), nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5)), nn.Linear(5, 3)
    ),
}  # fmt: skip
GROUPED = NORMALISED | {name: build for name, (build, stackable) in CONVOLUTIONS.items() if stackable}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("rule", ["sgd", "apfl", "adam", "nesterov"])
def test_grouped_rows_end_where_the_loop_ends(name, rule):
    """Ragged clients, of which some finish earlier, in one stack or several, with a proximal term and without."""
    rules = {"sgd": SGD(**OPTIONS), "apfl": APFL(alpha=0.4, **OPTIONS)} | OPTIMISERS
    local = copy.copy(rules[rule])
    if isinstance(local, Adam):
        local.eps = 1e-3  # a fitted sample's gradient is rounding, and would be divided by its size
    strategy = FedProx(0.7) if rule == "nesterov" else Scaffold() if rule == "sgd" else None
    common = {"strategy": strategy, "availability": UniformK(3), "rounds": 3}
    build = functools.partial(GROUPED[name])
    loop = simulation_of(build, local, execution=double("loop", workers=1), **common).run()
    for way in (double("grouped", workers=1), double("grouped", chunk=3, workers=2)):
        simulation = simulation_of(build, local, execution=way, **common)
        assert simulation.trainer.executor_choice.rows_per_stack > 1
        result = simulation.run()
        torch.testing.assert_close(result.state.model, loop.state.model, rtol=0, atol=1e-11)
        for left, right in zip(result.history, loop.history, strict=True):
            assert left == pytest.approx(right | {"seconds": left["seconds"]}, abs=1e-11)


def frozen_convolution() -> nn.Module:
    module = sized(nn.Conv2d(2, 3, 3))
    module[0][0].weight.requires_grad_(False)
    return module


NOT_GROUPED = {
    "groups": CONVOLUTIONS["groups"][0],
    "reflected": CONVOLUTIONS["reflected"][0],
    "channels dropped": lambda: sized(nn.Conv2d(2, 3, 2), nn.Dropout2d(0.3), nn.Conv2d(3, 2, 2)),
    "batch normalisation": lambda: sized(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)),
    "softmax over channels": lambda: sized(nn.Conv2d(2, 3, 2), nn.Softmax2d()),
    "no flatten": lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Linear(3, 3), nn.Flatten(), nn.Linear(27, 3)),
    "two stretches": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 3, 1)), nn.Sequential(nn.Conv2d(3, 2, 2), nn.Flatten()), nn.Linear(18, 3)
    ),
    "frozen": frozen_convolution,
    "no convolution": lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_GROUPED)
def test_what_cannot_be_grouped_is_refused_in_a_sentence(name):
    assert not is_groupable(NOT_GROUPED[name]())
    with pytest.raises(ConfigError, match=r"trainer\.executor=grouped cannot run .* use trainer\.executor=auto"):
        simulation_of(functools.partial(NOT_GROUPED[name]), execution=double("grouped"))


def test_a_convolution_alone_cannot_be_grouped():
    assert not is_groupable(nn.Conv2d(2, 3, 2))


def test_a_step_that_is_more_than_plain_descent_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.executor=grouped takes plain descents only"):
        simulation_of(PUBLISHED["as in SVHN"], SGD(clip=1.0), execution=double("grouped"))


def test_published_networks_can_be_grouped():
    assert is_groupable(LeafCNN())
    trunk = find_convolution_trunk(LeafCNN())
    assert trunk is not None
    assert (trunk.sequential_name, trunk.first_position, trunk.flatten_position) == ("layers", 0, 6)


def test_the_first_round_may_choose_it(monkeypatch):
    """It is a candidate of `auto`, behind the stated rule's choice."""
    build = functools.partial(NORMALISED["group normalisation"])
    simulation = simulation_of(build, SGD(**OPTIONS), images(), execution=double())
    names = [choice.executor for choice in simulation.trainer.candidate_choices]
    assert names[:2] == ["fused", "grouped"]
    monkeypatch.setattr("fedsim.trainer.trial.fastest_contender", lambda contenders, *rest: "grouped")
    monkeypatch.setattr("fedsim.trainer.trial.FASTEST_EXECUTOR_NAMES", {})
    simulation.run()
    assert simulation.trainer.executor_choice.executor == "grouped"
