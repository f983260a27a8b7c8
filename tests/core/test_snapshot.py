"""A deep snapshot shows a change wherever an object holds it, and no change where there is none."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.snapshot import LARGE_ARRAY_BYTES, differing_paths, enlarged_counter, snapshot

SHARED: dict[str, Any] = {"n": 0}


class Base:
    __slots__ = ("__dict__", "_slot")
    kept: ClassVar[list[int]] = []


class Holder(Base):
    """Something of every kind."""

    def __init__(self) -> None:
        calls = [0]

        def function(x: int, seen: dict[int, int] = {}) -> None:  # noqa: B006 (a memory that a user may have)
            calls[0] += 1
            seen[calls[0]] = x

        self._slot = 0
        self._tensor, self.array, self.view = torch.zeros(3), np.zeros(2), torch.zeros(4, 4)
        self.objects = np.array([[1], None], dtype=object)
        self.nested = {"deep": [Base(), (1, [2])]}
        self.itself, self.bound, self.nan = self, self.count, float("nan")
        self.numpy, self.generator, self.python = np.random.default_rng(0), torch.Generator(), random.Random(0)
        self.counter, self.cycle, self.iterator = itertools.count(), itertools.cycle("ab"), iter([1, 2])
        self.lazy = (i for i in range(3))
        self.queue, self.set = collections.deque([1]), {1}
        self.function, self.partial = function, functools.partial(function, x=[0])
        self.module = nn.BatchNorm1d(2)
        self.numbers = list(range(1000))
        self.sparse = torch.eye(3).to_sparse()

    def count(self) -> None:
        SHARED["n"] += 1

    @functools.cached_property
    def remembered(self) -> float:
        return 3.0

    @functools.lru_cache(8)  # noqa: B019
    def cached(self, x: int) -> int:
        return x


CHANGES: dict[str, tuple[Any, str]] = {
    "slot": (lambda h: setattr(h, "_slot", 1), "_slot"),
    "slot of an object in a list": (lambda h: setattr(h.nested["deep"][0], "_slot", 1), "nested['deep'][0]._slot"),
    "tensor": (lambda h: h._tensor.add_(1), "_tensor"),
    "tensor by .data": (lambda h: h._tensor.data.mul_(2).sub_(1), "_tensor"),
    "view": (lambda h: h.view.t()[1].fill_(2), "view"),
    "array": (lambda h: h.array.__iadd__(1), "array"),
    "array of objects": (lambda h: h.objects[0].append(1), "objects[0][1]"),
    "nested list": (lambda h: h.nested["deep"][1][1].append(3), "nested['deep'][1][1][1]"),
    "new key": (lambda h: h.nested.update(more=1), "nested['more']"),
    "1 for True": (lambda h: setattr(h, "nan", True) or setattr(h, "nan", 1), "nan"),
    "NumPy's stream": (lambda h: h.numpy.random(), "numpy.state"),
    "PyTorch's stream": (lambda h: torch.rand(1, generator=h.generator), "generator.state"),
    "Python's stream": (lambda h: h.python.random(), "python.state"),
    "counter": (lambda h: next(h.counter), "counter"),
    "cycle": (lambda h: next(h.cycle), "cycle"),
    "iterator": (lambda h: next(h.iterator), "iterator"),
    "generator": (lambda h: next(h.lazy), "lazy"),
    "deque": (lambda h: h.queue.append(2), "queue[1]"),
    "set": (lambda h: h.set.add(2), "set"),
    "closure and default": (lambda h: h.function(1), "'calls' in the closure of function[0]"),
    "partial": (lambda h: h.partial.keywords["x"].append(1), "partial.keywords['x'][1]"),
    "attribute of a function": (lambda h: setattr(h.function, "calls", 1), "function.calls"),
    "global": (lambda h: h.count(), "global 'SHARED'['n']"),
    "class of a base": (lambda h: h.kept.append(1), "Base.kept["),
    "new attribute of the class": (lambda h: setattr(Holder, f"new{len(vars(Holder))}", 1), "Holder.new"),
    "frozen parameter": (lambda h: h.module.weight.data.add_(1), "module.weight"),
    "buffer": (lambda h: h.module.running_mean.add_(1), "module.running_mean"),
    "private attribute of a module": (lambda h: setattr(h.module, "_calls", 1), "module._calls"),
    "gradient": (lambda h: setattr(h.module.weight, "grad", torch.ones(2)), "module.weight.grad"),
    "one of a thousand": (lambda h: h.numbers.__setitem__(700, 0), "numbers"),
    "sparse": (lambda h: [h.sparse.values().mul_(2)], "sparse"),
}


@pytest.mark.parametrize(("change", "place"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_named_by_its_place(change: Any, place: str) -> None:
    holder = Holder()
    before = snapshot(holder)
    assert differing_paths(before, snapshot(holder)) == []
    with torch.no_grad():
        change(holder)
    found = differing_paths(before, snapshot(holder))
    assert found
    assert all(part.startswith((place, "default argument 'seen'")) for part in found), found


class Counting:
    """It is held by something else alone."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self, *given: Any) -> None:
        self.calls += 1


def closed_over(counting: Counting) -> Any:
    return lambda: counting.count()


def with_default(counting: Counting) -> Any:
    def call(first: int = 0, held: Counting = counting) -> None:
        held.count()

    return call


HELD_BY = {
    "a bound method": lambda counting: counting.count,
    "a partial function": lambda counting: functools.partial(Counting.count, counting),
    "a keyword of a partial function": lambda counting: functools.partial(closed_over, counting=counting),
    "a function inside a partial one": lambda counting: functools.partial(counting.count, 1),
    "a closure": closed_over,
    "a default argument": with_default,
    "a list": lambda counting: [0, counting],
    "a key": lambda counting: {counting: 0},
    "a value": lambda counting: {(1, 2): counting},
    "an array of objects": lambda counting: np.array([None, counting], dtype=object),
    "a generator": lambda counting: (counting.count() for _ in range(2)),
    "a tuple of slots": lambda counting: collections.namedtuple("Held", "first held")(0, counting),
}


@pytest.mark.parametrize("way", HELD_BY)
def test_a_change_is_seen_in_what_is_held_in_one_way_alone(way: str) -> None:
    counting, holder = Counting(), Base()
    holder.held = HELD_BY[way](counting)  # type: ignore[attr-defined]
    before = snapshot(holder)
    assert not differing_paths(before, snapshot(holder))
    counting.count()
    (path,) = differing_paths(before, snapshot(holder))
    assert path.endswith("calls")


def test_what_makes_no_difference_is_no_change() -> None:
    holder = Holder()
    before = snapshot(holder)
    holder.module.eval()
    assert holder.remembered == holder.cached(3) == 3
    holder.nested = dict(reversed([*holder.nested.items(), ("x", 1)]))
    del holder.nested["x"]
    holder._tensor = holder._tensor.clone()
    assert differing_paths(before, snapshot(holder)) == []


def test_a_large_tensor_is_known_by_how_often_it_was_written_to() -> None:
    large = torch.zeros(LARGE_ARRAY_BYTES // 4 + 1)
    before = snapshot([large])
    large[1] = 1  # not one of the sampled elements
    assert differing_paths(before, snapshot([large])) == ["[0]"]


def test_depth_and_cycles_do_no_harm() -> None:
    chain: list[Any] = []
    for _ in range(5_000):
        chain = [chain]
    ring = [chain]
    ring.append(ring)
    assert differing_paths(snapshot(ring), snapshot(ring)) == []


def test_what_is_skipped_is_not_looked_into() -> None:
    holder = Holder()
    before = snapshot(holder, skipped_types=(nn.Module,))
    holder.module.running_mean.add_(1)
    assert differing_paths(before, snapshot(holder, skipped_types=(nn.Module,))) == []


@pytest.mark.parametrize("make", [float, int, torch.tensor, np.array], ids=["float", "int", "tensor", "array"])
def test_a_counter_is_enlarged_in_whatever_it_is_kept(make: Any) -> None:
    assert enlarged_counter(make(3)) == 4000
    assert type(enlarged_counter(make(3))) is type(make(3)) or isinstance(enlarged_counter(make(3)), np.integer)


@pytest.mark.parametrize("value", [True, torch.tensor([True]), np.array([False]), "three", [3], None])
def test_what_does_not_count_is_not_enlarged(value: Any) -> None:
    assert enlarged_counter(value) is None
