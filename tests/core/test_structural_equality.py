"""Two objects are alike where whatever they do is the same; in doubt they are not."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.structural_equality import structurally_equal
from fedsim.models import MLP


@dataclass
class Thing:
    """Holds whatever."""

    value: Any
    other: Any = None

    @functools.cached_property
    def remembered(self) -> int:
        return 1


class Slotted:
    """No dictionary of its own."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def adder(amount: float) -> Any:
    return lambda x: x + amount


ALIKE = {
    "numbers": lambda: (1, 2.5, "x", None),
    "not a number": lambda: float("nan"),
    "tensors": lambda: torch.arange(3.0),
    "arrays": lambda: {"a": np.arange(3)},
    "objects": lambda: Thing([torch.ones(2)], {"k": {1, 2}}),
    "slots": lambda: Slotted(torch.ones(2)),
    "closures": lambda: adder(2.0),
    "partials": lambda: functools.partial(Thing, value=[1]),
    "methods": lambda: Thing(3).__repr__,
    "modules": lambda: nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)),
}
UNLIKE = {
    "numbers": (1, 2),
    "types": (1, 1.0),
    "tensors": (torch.ones(2), torch.zeros(2)),
    "shapes": (torch.ones(2), torch.ones(2, 1)),
    "precisions": (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    "arrays": (np.ones(2), np.ones(3)),
    "lists": ([1, 2], [1, 2, 3]),
    "keys": ({"a": 1}, {"b": 1}),
    "objects": (Thing(1), Thing(2)),
    "closures": (adder(1.0), adder(2.0)),
    "other code": (lambda x: x, lambda x: -x),
    "partials": (functools.partial(Thing, 1), functools.partial(Thing, 2)),
    "what cannot be looked into": (np.random.default_rng(0), np.random.default_rng(0)),
    "dropout": (nn.Dropout(0.5), nn.Dropout(0.1)),
    "shape of a layer": (nn.Linear(2, 3), nn.Linear(2, 4)),
    "buffers": (nn.BatchNorm1d(2), nn.BatchNorm1d(2, momentum=0.3)),
}


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_what_is_made_alike_is_alike(make):
    assert structurally_equal(make(), make())


@pytest.mark.parametrize(("one", "other"), UNLIKE.values(), ids=UNLIKE)
def test_what_differs_anywhere_is_not(one, other):
    assert not structurally_equal(one, other)
    assert not structurally_equal([one], [other])


def test_what_a_module_trains_may_differ_but_not_what_it_keeps():
    one, other = MLP((4,), 3), MLP((4,), 3)
    assert structurally_equal(one, other)
    for module in (one, other):
        next(module.parameters()).requires_grad_(False)
    assert not structurally_equal(one, other)  # frozen at values of their own


def test_hooks_count():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.register_forward_hook(lambda module, x, y: 2 * y)
    assert not structurally_equal(one, other)


def test_what_a_property_remembers_and_what_is_left_out_do_not_count():
    one, other = Thing(1, other=2), Thing(1, other=2)
    assert one.remembered == 1
    assert structurally_equal(one, other)
    assert not structurally_equal(Thing(1, other=2), Thing(1, other=3))
    assert structurally_equal(Thing(1, other=2), Thing(1, other=3), skipped_names=frozenset({"other"}))


def test_objects_that_hold_themselves():
    def ring(value: int) -> Thing:
        thing = Thing(value)
        thing.other = [thing]
        return thing

    assert structurally_equal(ring(1), ring(1))
    assert not structurally_equal(ring(1), ring(2))
