"""What users' modules do beside mapping numbers to numbers: state, hooks, weights written in forward, whole batches."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from random_parts import FEATURE_PARTS, RESETS, Apply, Build, part, pattern, simple
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

habit = functools.partial(part, FEATURE_PARTS, nasty=True)


def does(name: str, layer: Callable[[int], nn.Module], **how: Any) -> None:
    simple(FEATURE_PARTS, name, layer, nasty=True, **how)


def maps(name: str, function: Callable[[Tensor], Tensor], **how: Any) -> None:
    does(name, lambda w: Apply(function), **how)


# ------------------------------------------------------------------------------------------- the whole batch is looked at  # noqa: E501

maps("centres the batch", lambda x: x - 0.5 * x.mean(0))
maps("centres four samples or more", lambda x: x - 0.5 * x.mean(0) if len(x) >= 4 else x)
maps("centres two samples or more", lambda x: x - 0.5 * x.mean(0) if len(x) >= 2 else x)
maps("largest of the batch", lambda x: x / (1 + x.abs().max()))
maps("attends over the batch", lambda x: x + 0.3 * (x @ x.T / 3).softmax(-1) @ x)
maps("sorts by the batch", lambda x: x + 0.1 * x.sort(0).values)
maps("divides by the batch's size", lambda x: x * (1 + 1 / len(x)))
maps("first sample of the batch", lambda x: x + 0.1 * x[:1])
maps("last sample of the batch", lambda x: x + 0.1 * x[-1:])
maps("neighbour in the batch", lambda x: x + 0.1 * x.roll(1, 0))
maps("cumulates over the batch", lambda x: x + 0.05 * x.cumsum(0))
maps("median of the batch", lambda x: x - 0.2 * x.median(0).values)
maps("norm of the batch", lambda x: x / (1 + x.norm()))
maps("branches on the batch", lambda x: 2 * x if x.mean() > 0 else x.sin())
maps("branches on a number", lambda x: x * (1.5 if float(x.detach().abs().sum()) > 5 else 0.5))


class Discrimination(nn.Module):
    """Minibatch discrimination (Salimans et al., 2016)."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(0.3 * torch.randn(w, 4)), nn.Linear(w + 4, w)

    def forward(self, x: Tensor) -> Tensor:
        m = x @ self.table
        near = (-(m[:, None] - m[None]).abs()).exp().sum(1) - 1
        return self.head(torch.cat([x, near], 1))


class Whitening(nn.Module):
    """Whitens by the batch in training, by a running covariance in evaluation."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.register_buffer("covariance", torch.eye(w))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            centred = x - x.mean(0)
            now = centred.T @ centred / len(x)
            self.covariance.mul_(0.9).add_(0.1 * now.detach())
        else:
            now = self.covariance
        return x @ torch.linalg.inv(now + torch.eye(len(now), dtype=x.dtype))


does("minibatch discrimination", Discrimination)
does("whitens the batch", Whitening)


class GhostNorm(nn.Module):
    """Normalises halves of a batch apart."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(w, momentum=0.2)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or len(x) < 4:
            return self.norm(x)
        half = len(x) // 2
        return torch.cat([self.norm(x[:half]), self.norm(x[half:])])


does("ghost batch norm", GhostNorm)


class Checks(nn.Module):
    """Raises where a batch is not what it wants."""

    def __init__(self, fits: Callable[[Tensor], bool], error: type[Exception]) -> None:
        super().__init__()
        self.fits, self.error = fits, error

    def forward(self, x: Tensor) -> Tensor:
        if not self.fits(x):
            raise self.error("a batch of this kind is not supported")
        return x


@habit("raises on some batches", variants=3)
def _raises(draw: random.Random, w: int) -> Build:
    error = draw.choice(
        [
            AssertionError,
            ValueError,
            RuntimeError,
            KeyError,
            AttributeError,
            IndexError,
            TypeError,
            NotImplementedError,
            ZeroDivisionError,
            StopIteration,
            OSError,
        ]
    )
    fits = draw.choice(
        [
            lambda x: len(x) % 2 == 0,
            lambda x: len(x) > 2,
            lambda x: len(x) < 5,
            lambda x: len(x) != 3,
            lambda x: x.shape[1] > 99,
        ]
    )
    return lambda: Checks(fits, error)


@habit("asserts what holds")
def _asserts(draw: random.Random, w: int) -> Build:
    fits = draw.choice([lambda x: x.dim() == 2, lambda x: bool(torch.isfinite(x).all()), lambda x: len(x) > 0])
    return lambda: Checks(fits, AssertionError)


# -------------------------------------------------------------------------------------------- weights written in forward  # noqa: E501


class Writing(nn.Module):
    """Writes into its weight in forward."""

    def __init__(self, write: Callable[[Any], None], w: int) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(w, w), write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        return self.layer(x)


def _clamp(m: Any) -> None:
    with torch.no_grad():
        m.layer.weight.clamp_(-0.15, 0.15)


def _data(m: Any) -> None:
    m.layer.weight.data = m.layer.weight.data / (1 + m.layer.weight.data.norm(dim=1, keepdim=True) / 4)


def _copies(m: Any) -> None:
    with torch.no_grad():
        m.layer.weight.copy_(m.layer.weight - m.layer.weight.mean(0))


def _data_in_place(m: Any) -> None:
    m.layer.bias.data.mul_(0.9)


def _in_training(m: Any) -> None:
    if m.training:
        with torch.no_grad():
            m.layer.weight[0] *= 0.8


def _fills(m: Any) -> None:
    with torch.no_grad():
        m.layer.weight.fill_diagonal_(0.1)


def _sets(m: Any) -> None:
    m.layer.weight = nn.Parameter(m.layer.weight.detach() * 0.9)


def _clips_rows(m: Any) -> None:
    with torch.no_grad():
        large = m.layer.weight.norm(dim=1) > 0.4
        m.layer.weight[large] *= 0.5


WRITES = {
    "clamps its weight": _clamp, "weight.data = …": _data, "copy_ into its weight": _copies,
    "bias.data.mul_": _data_in_place, "writes a row of its weight in training": _in_training,
    "fill_diagonal_ of its weight": _fills, "a new Parameter in forward": _sets, "clips rows of its weight": _clips_rows,  # noqa: E501
}  # fmt: skip
for _name, _write in WRITES.items():
    does(_name, functools.partial(Writing, _write))


class Average(nn.Module):
    """A frozen copy that follows (mean teacher, BYOL, MoCo): its output enters."""

    def __init__(self, w: int, how: str = "in place", rate: float = 0.2) -> None:
        super().__init__()
        self.online = nn.Linear(w, w)
        self.copy = copy.deepcopy(self.online).requires_grad_(False)
        self.how, self.rate = how, rate

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.copy.parameters(), self.online.parameters(), strict=True):
                    if self.how == "in place":
                        slow.mul_(1 - self.rate).add_(fast, alpha=self.rate)
                    elif self.how == "data":
                        slow.data = slow.data + self.rate * (fast.data - slow.data)
                    else:
                        slow.copy_(torch.lerp(slow, fast, self.rate))
            target = self.copy(x).detach()
            return self.online(x) + 0.3 * target
        return self.copy(x)


@habit("a frozen copy that follows", variants=3)
def _average(draw: random.Random, w: int) -> Build:
    how, rate = draw.choice(["in place", "data", "copy_"]), draw.choice([0.2, 0.5, 0.01])
    return lambda: Average(w, how, rate)


class FrozenCounter(nn.Module):
    """A frozen parameter that counts."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(w, w), nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1.0
        return self.layer(x) / (1 + 0.1 * self.count)


does("a frozen parameter that counts", FrozenCounter)


class Target(nn.Module):
    """Two frozen networks, of which one has statistics."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(w, w), nn.BatchNorm1d(w))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
                target = self.target(x)
            return self.online(x) + 0.2 * target
        return self.online(x)


does("a target network with batch norm", Target)


# ---------------------------------------------------------------------------------------------------- state in buffers


class Queue(nn.Module):
    """A memory of features and where it will be written next (MoCo)."""

    def __init__(self, w: int, kind: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.register_buffer("memory", pattern(4, w))
        self.register_buffer("place", torch.zeros(1, dtype=kind))

    def forward(self, x: Tensor) -> Tensor:
        near = (x @ self.memory.clone().T / 3).softmax(-1) @ self.memory.clone()
        if self.training:
            place = int(self.place)
            self.memory[place] = x.detach().mean(0)
            self.place[0] = (place + 1) % 4
        return x + 0.3 * near


class Buffers(nn.Module):
    """A number in a buffer that training moves."""

    def __init__(self, start: Tensor, move: Callable[[Any, Tensor], Tensor], persistent: bool, assign: bool) -> None:
        super().__init__()
        self.register_buffer("state", start, persistent=persistent)
        self.move, self.assign = move, assign

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            moved = self.move(self.state, x.detach())
            if self.assign:
                self.state = moved
            else:
                self.state.copy_(moved)
        return x / (1 + 0.1 * self.state.to(x.dtype).abs())


BUFFERS: dict[str, tuple[Tensor, Callable[[Any, Tensor], Tensor]]] = {
    "passes": (torch.zeros((), dtype=torch.int64), lambda s, x: s + 1),
    "samples": (torch.zeros((), dtype=torch.int64), lambda s, x: s + len(x)),
    "samples in a float": (torch.zeros(()), lambda s, x: s + len(x)),
    "mean": (torch.zeros(()), lambda s, x: s * 0.9 + 0.1 * x.mean()),
    "maximum": (torch.zeros(()), lambda s, x: torch.maximum(s, x.abs().max())),
    "sum of the first samples": (torch.zeros(()), lambda s, x: s + 0.1 * x[0].sum()),
    "after the third pass": (torch.zeros((), dtype=torch.int32), lambda s, x: s + 1),
    "sign": (torch.ones(()), lambda s, x: -s),
    "an 8-bit counter": (torch.zeros((), dtype=torch.uint8), lambda s, x: s + 1),
    "a flag": (torch.zeros((), dtype=torch.bool), lambda s, x: ~s),
    "variance": (torch.ones(()), lambda s, x: 0.5 * s + 0.5 * x.var(unbiased=False)),
}


@habit("state in a buffer", variants=6)
def _buffers(draw: random.Random, w: int) -> Build:
    start, move = BUFFERS[draw.choice(list(BUFFERS))]
    persistent, assign = draw.random() < 0.7, draw.random() < 0.5
    return lambda: Buffers(start.clone(), move, persistent, assign)


@habit("a queue in a buffer")
def _queue(draw: random.Random, w: int) -> Build:
    kind = draw.choice([torch.int64, torch.int32])
    return lambda: Queue(w, kind)


class Late(nn.Module):
    """A counter in a buffer that begins to matter after k passes."""

    def __init__(self, w: int, k: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return torch.where(self.count > self.k, x.sin(), x)


@habit("a buffer that matters late", variants=2)
def _late(draw: random.Random, w: int) -> Build:
    k = draw.randint(1, 12)
    return lambda: Late(w, k)


class LateBuffer(nn.Module):
    """Statistics that are written only after k passes."""

    def __init__(self, w: int, k: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(w))
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            if int(self.count) > self.k:
                self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - 0.2 * self.mean


@habit("a buffer that is written late", variants=2)
def _late_buffer(draw: random.Random, w: int) -> Build:
    k = draw.randint(1, 12)
    return lambda: LateBuffer(w, k)


class LateWeight(nn.Module):
    """A weight that is written only after k passes, counted in a buffer."""

    def __init__(self, w: int, k: int) -> None:
        super().__init__()
        self.layer, self.k = nn.Linear(w, w), k
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            if int(self.count) >= self.k:
                with torch.no_grad():
                    self.layer.weight.mul_(0.9)
        return self.layer(x)


@habit("a weight that is written late", variants=2)
def _late_weight(draw: random.Random, w: int) -> Build:
    k = draw.randint(2, 12)
    return lambda: LateWeight(w, k)


class DataBuffer(nn.Module):
    """Moves only where the data are of a certain kind."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(w))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and float(x.detach().mean()) > 0.1:
            self.seen = self.seen + 0.1 * x.detach().mean(0)
        return x - 0.1 * self.seen


does("a buffer that some batches move", DataBuffer)


class Renewing(nn.Module):
    """Statistics that evaluation moves too."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(w))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return x - self.seen


does("a buffer that evaluation moves", Renewing)


class Growing(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(1, w))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.bank = torch.cat([self.bank, x.detach().mean(0, keepdim=True)])
        return x - self.bank.mean(0)


does("a buffer that grows", Growing)


class MadeInForward(nn.Module):
    """A buffer that the first pass makes."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", 1 + x.detach().abs().mean(0))
        return x / self.scale


does("a buffer made in forward", lambda w: MadeInForward())


class Aliased(nn.Module):
    """One tensor under two names of buffers."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.register_buffer("one", torch.zeros(w))
        self.register_buffer("other", self.one)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.one.add_(0.1 * x.detach().mean(0))
        return x - 0.5 * self.one - 0.2 * self.other


does("one buffer under two names", Aliased)


# --------------------------------------------------------------------------------- state that is in no buffer


def _number(m: Any) -> float:
    m.calls += 1
    return m.calls


def _private(m: Any) -> float:
    m._calls += 1
    return m._calls


def _array(m: Any) -> float:
    m.array += 1
    return float(m.array[0])


def _list(m: Any) -> float:
    m.seen.append(1)
    return len(m.seen)


def _deque(m: Any) -> float:
    m._deque.append(1)
    return len(m._deque)


def _nested(m: Any) -> float:
    m.inside.deep["count"].value += 1
    return m.inside.deep["count"].value


def _dict(m: Any) -> float:
    m.table["n"] = m.table.get("n", 0) + 1
    return m.table["n"]


def _tensor(m: Any) -> float:
    m.tensor += 1
    return float(m.tensor)


def _private_tensor(m: Any) -> float:
    m._tensor = m._tensor + 1
    return float(m._tensor)


def _iterator(m: Any) -> float:
    return next(m.iterator)


def _generator(m: Any) -> float:
    return next(m.generator)


def _class(m: Any) -> float:
    type(m).shared += 1
    return type(m).shared


GLOBAL = {"count": 0}
LOCAL = threading.local()


def _global(m: Any) -> float:
    GLOBAL["count"] += 1
    return GLOBAL["count"]


def _thread(m: Any) -> float:
    LOCAL.count = getattr(LOCAL, "count", 0) + 1
    return LOCAL.count


def _closure(m: Any) -> float:
    return m.closure()


def _default(m: Any, memory: list[int] = []) -> float:  # noqa: B006 (that is what is tried)
    memory.append(1)
    return len(memory)


def _hidden(m: Any) -> float:
    m.hidden[0].weight.data.add_(0.1)
    return 1 + abs(float(m.hidden[0].weight.data[0, 0]))


def _string(m: Any) -> float:
    m.text += "a"
    return len(m.text)


def _slots(m: Any) -> float:
    m.slots.count += 1
    return m.slots.count


def _function(m: Any) -> float:
    m.function.count = getattr(m.function, "count", 0) + 1
    return m.function.count


def _cached(m: Any) -> float:
    if m.first is None:
        m.first = float(m.now)
    return 1 + abs(m.first)


def _random(m: Any) -> float:
    return 1 + float(torch.rand((), generator=m.source))


def _numpy_source(m: Any) -> float:
    return 1 + m.numpy_source.random()


def _python_source(m: Any) -> float:
    return 1 + m.python_source.random()


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def _endless() -> Any:
    yield from itertools.count(1)


STATES: dict[str, Callable[[Any], float]] = {
    f.__name__[1:]: f
    for f in (
        _number, _private, _array, _list, _deque, _nested, _dict, _tensor, _private_tensor, _iterator, _generator,
        _class, _global, _thread, _closure, _default, _hidden, _string, _slots, _function, _cached, _random,
        _numpy_source, _python_source,
    )
}  # fmt: skip


def _forget() -> None:
    Stateful.shared = 0
    GLOBAL["count"] = 0
    LOCAL.__dict__.clear()
    _default.__defaults__[0].clear()  # type: ignore[index]


RESETS.append(_forget)


class Stateful(nn.Module):
    """Counts its passes somewhere; the count enters at once, or after k passes.

    Args:
        state: where.
        k: passes after which it matters.
        training: whether evaluation leaves it alone.
    """

    shared = 0

    def __init__(self, state: str, k: int, training: bool) -> None:
        super().__init__()
        self.state, self.k, self.only, self.now = STATES[state], k, training, 1.0
        self.calls, self._calls, self.array, self.seen, self.table, self.text = 0, 0, np.zeros(2), [], {}, ""
        self.inside = SimpleNamespace(deep={"count": SimpleNamespace(value=0)})
        self.tensor, self._tensor = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        self._deque: Any = collections.deque(maxlen=9)
        self.slots, self.first = Slots(), None
        layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(layer.weight)
        if state == "hidden":
            self.hidden = [layer]
        if state == "iterator":
            self.iterator = itertools.cycle([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        if state == "generator":
            self.generator = _endless()
        if state == "random":
            self.source = torch.Generator().manual_seed(1)
        if state == "numpy_source":
            self.numpy_source = np.random.default_rng(1)
        if state == "python_source":
            self.python_source = random.Random(1)
        count = 0

        def closure() -> int:
            nonlocal count
            count += 1
            return count

        def function() -> None: ...

        self.closure, self.function = closure, function

    def forward(self, x: Tensor) -> Tensor:
        if self.only and not self.training:
            return x
        if self.state is _cached:
            self.now = float(x.detach().mean())
        value = self.state(self)
        return x / (1 + 0.2 * value) if value > self.k else x


@habit("state in no buffer", fresh=True, variants=14)
def _state(draw: random.Random, w: int) -> Build:
    state, training = draw.choice(list(STATES)), draw.random() < 0.6
    k = (
        0
        if state in ("random", "numpy_source", "python_source", "cached", "hidden")
        else draw.choice([0, 0, 1, 2, 3, 4, 6, 9])
    )
    build = functools.partial(Stateful, state, k, training)
    build.said = f"{state}, after {k}{', in training' if training else ''}"  # type: ignore[attr-defined]
    return build


class Harmless(nn.Module):
    """Attributes that change and do not matter."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.layer, self._log, self.last, self.calls = nn.Linear(w, w), [], None, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach().clone()
        self._log = [*self._log[-2:], float(x.detach().mean())]
        return self.layer(x)


does("a log in attributes", Harmless)


class Features(nn.Module):
    """Keeps a pass's features as an attribute, and uses them in the same pass."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.layer = nn.Linear(w, w)
        self.layer.register_forward_hook(self.keep)
        self.kept: Any = None

    def keep(self, module: nn.Module, given: Any, output: Tensor) -> None:
        self.kept = output

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x)
        return x + 0.3 * self.kept.tanh()


does("features kept by a hook", Features)


class Previous(nn.Module):
    """Adds the mean of the batch before."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.before: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.before is None else x + 0.3 * self.before
        self.before = x.detach().mean(0)
        return out


does("the batch before", Previous)


class Switching(nn.Module):
    """Freezes a layer after some passes, which it counts in a buffer, or from the start."""

    def __init__(self, w: int, how: str) -> None:
        super().__init__()
        self.layer, self.norm, self.how = nn.Linear(w, w), nn.BatchNorm1d(w), how
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "eval":
            self.norm.eval()
        elif self.how == "requires_grad":
            self.layer.requires_grad_(len(x) % 2 == 0)
        elif self.training:
            self.count += 1
            self.layer.requires_grad_(int(self.count) < 3)
        return self.norm(self.layer(x))


@habit("switches a layer off in forward", variants=2)
def _switching(draw: random.Random, w: int) -> Build:
    how = draw.choice(["eval", "requires_grad", "later"])
    return lambda: Switching(w, how)


# ------------------------------------------------------------------------------------------------------------- hooks


class Hooked(nn.Module):
    """A linear layer with hooks of some kind."""

    def __init__(self, w: int, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(w, w)
        layer, weight = self.layer, self.layer.weight
        if kind == "forward":
            layer.register_forward_hook(lambda module, given, output: output * 1.5)
        elif kind == "forward pre":
            layer.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
        elif kind == "backward":
            layer.register_full_backward_hook(lambda module, before, after: (0.5 * before[0],))
        elif kind == "backward pre":
            layer.register_full_backward_pre_hook(lambda module, after: (0.5 * after[0],))
        elif kind == "gradient":
            weight.register_hook(lambda gradient: 3 * gradient)
        elif kind == "gradient clipped":
            weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        elif kind == "gradient masked":
            weight.register_hook(lambda gradient: gradient * (torch.arange(w) % 2 == 0))
        elif kind == "gradient by norm":
            weight.register_hook(lambda gradient: gradient / gradient.norm() if gradient.norm() > 0.1 else gradient)
        elif kind == "accumulated":
            weight.register_post_accumulate_grad_hook(_shrinks)
        elif kind == "accumulated, stepped":
            weight.register_post_accumulate_grad_hook(_steps)
        elif kind == "activation's gradient":
            layer.register_forward_hook(_reverses)
        else:
            raise AssertionError(kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _shrinks(parameter: Tensor) -> None:
    parameter.grad.mul_(0.3)  # type: ignore[union-attr]


def _steps(parameter: Tensor) -> None:
    """A step of its own inside of backward."""
    with torch.no_grad():
        parameter.sub_(0.05 * parameter.grad)
    parameter.grad = None


def _reverses(module: nn.Module, given: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: -0.5 * gradient)


HOOKS = (
    "forward", "forward pre", "backward", "backward pre", "gradient", "gradient clipped", "gradient masked",
    "gradient by norm", "accumulated", "accumulated, stepped", "activation's gradient",
)  # fmt: skip


@habit("hooks", fresh=True, variants=8)
def _hooks(draw: random.Random, w: int) -> Build:
    kind = draw.choice(HOOKS)
    build = functools.partial(Hooked, w, kind)
    build.said = kind  # type: ignore[attr-defined]
    return build


# ------------------------------------------------------------------------------------------- unusual ways to compute


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


class Straight(torch.autograd.Function):
    """Straight-through rounding, with a context set up apart (so that it can be vmapped)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0) * 2


maps("gradient reversal", lambda x: Reverse.apply(x))
maps("straight-through rounding", lambda x: x + 0.1 * Straight.apply(x.tanh()))
maps("an autograd.Function that saves", lambda x: Saved.apply(x))
maps("through NumPy", lambda x: x + 0.1 * torch.as_tensor(np.sin(x.detach().numpy())))
maps("through .item()", lambda x: x * (1 + abs(x.detach()[0, 0].item())))
maps("through .tolist()", lambda x: x + 0.01 * torch.tensor(x.detach().tolist(), dtype=x.dtype))
maps("boolean indexing", lambda x: x * 0.5 + 0.1 * x[x > 0].sum() / x.numel())
maps("nonzero", lambda x: x + 0.01 * len((x > 0).nonzero()))
maps("a loop over samples", lambda x: torch.stack([row.tanh() * (1 + row.norm()) for row in x]))
maps("a loop until it is small", lambda x: _until_small(x))
maps("writes into its input", lambda x: x.mul_(0.5))
maps("writes into a copy", lambda x: _into_copy(x))
maps("gradient within forward", lambda x: _inner_gradient(x))
maps("gradient penalty within forward", lambda x: x * (1 + 0.1 * _inner_gradient(x).square().sum()))


def _until_small(x: Tensor) -> Tensor:
    for _ in range(5):
        if x.detach().norm() < 2:
            break
        x = 0.7 * x
    return x


def _into_copy(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = x[:, 1] * 0.5
    x[:, 1:].mul_(0.9)
    return x


def _inner_gradient(x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x if x.requires_grad else x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(z.tanh().square().sum(), z, create_graph=True)
    return x + 0.1 * gradient


class Checkpointed(nn.Module):
    def __init__(self, w: int, reentrant: bool, norm: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(w, w), nn.LayerNorm(w) if norm else nn.Tanh()), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@habit("checkpoint", variants=2)
def _checkpoint(draw: random.Random, w: int) -> Build:
    reentrant, norm = draw.random() < 0.5, draw.random() < 0.5
    return lambda: Checkpointed(w, reentrant, norm)


does("old weight norm", lambda w: nn.utils.weight_norm(nn.Linear(w, w)))


@habit("pruned", variants=2)
def _pruned(draw: random.Random, w: int) -> Build:
    kind, permanent = draw.choice(["l1", "structured", "custom"]), draw.random() < 0.3

    def build() -> nn.Module:
        layer = nn.Linear(w, w)
        with torch.no_grad():
            layer.weight.copy_(pattern(w, w))  # so that each replicate has the same mask
        if kind == "l1":
            prune.l1_unstructured(layer, "weight", amount=0.3)
        elif kind == "structured":
            prune.ln_structured(layer, "weight", amount=0.3, n=2, dim=0)
        else:
            prune.custom_from_mask(layer, "weight", torch.arange(w * w).reshape(w, w) % 3 > 0)
        if permanent:
            prune.remove(layer, "weight")
        return layer

    return build


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


def _parametrized(w: int) -> nn.Module:
    layer = nn.Linear(w, w)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


does("a parametrization", _parametrized)


def _frozen(w: int) -> nn.Module:
    layer = nn.Sequential(nn.Linear(w, w), nn.BatchNorm1d(w), nn.Tanh())
    with torch.no_grad():
        layer[0].weight.copy_(pattern(w, w))
        layer[0].bias.zero_()
    layer[0].requires_grad_(False)
    return layer


does("a frozen layer", _frozen)


class Twice(nn.Module):
    """One layer in two places, under one name or two."""

    def __init__(self, w: int, how: str) -> None:
        super().__init__()
        layer: nn.Module = nn.BatchNorm1d(w) if how == "batch norm" else nn.Linear(w, w)
        if how == "calls":
            self.layer, self.chain = layer, nn.Tanh()
        else:
            self.chain = nn.Sequential(layer, nn.Tanh(), layer)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.chain(self.layer(x))) if self.how == "calls" else self.chain(x)


@habit("one layer in two places", variants=3)
def _twice(draw: random.Random, w: int) -> Build:
    how = draw.choice(["calls", "names", "names", "batch norm"])
    return lambda: Twice(w, how)


class Tied(nn.Module):
    """One parameter in two layers, or transposed."""

    def __init__(self, w: int, transposed: bool) -> None:
        super().__init__()
        self.first, self.second, self.transposed = nn.Linear(w, w), nn.Linear(w, w, bias=False), transposed
        if not transposed:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return F.linear(x, self.first.weight.T) + 0.1 * self.second(x) if self.transposed else self.second(x)


@habit("tied weights", variants=2)
def _tied(draw: random.Random, w: int) -> Build:
    transposed = draw.random() < 0.4
    return lambda: Tied(w, transposed)


class Hidden(nn.Module):
    """Layers in a plain list, which no optimizer sees."""

    def __init__(self, w: int) -> None:
        super().__init__()
        layer = nn.Linear(w, w, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(pattern(w, w))
            layer.bias.zero_()
        self.layers, self.head = [layer], nn.Linear(w, w)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[0](x))


does("layers in a plain list", Hidden)


class Unused(nn.Module):
    """A layer that only some batches use, and one that none does."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.used, self.sometimes, self.unused = nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.used(x)
        return self.sometimes(x) if len(x) > 2 else x


does("layers that are not used", Unused)


class Complex(nn.Module):
    """A parameter of complex numbers."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(w, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.phase).real + 0.1 * (x * self.phase * 1j).abs()


does("a complex parameter", Complex)


class Single(nn.Module):
    """A parameter that is kept in single precision, through double_ conversions too."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(w))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.to(x.dtype)


does("a parameter that stays in single precision", Single, tolerance=1e-3)


class Scalar(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.scale, self.nothing = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(0, w))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.nothing.sum()


does("scalar and empty parameters", Scalar)


class Attribute(nn.Module):
    """Answers unknown names itself, and is called by keyword."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.wrapped = nn.Linear(w, w)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(input=x, weight=self.weight, bias=self.bias)


does("a wrapper that passes names on", Attribute)


class Trained(nn.Module):
    """Another mapping in training than in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.3 if self.training else x.tanh()


does("other mapping in evaluation", lambda w: Trained())


class Locked(nn.Module):
    """Holds something that cannot be copied."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(w, w), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.layer(x)


does("a lock", Locked, fresh=True)


class Mode(nn.Module):
    """Forward under a context of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "inference":
            with torch.inference_mode():
                y = x.detach().clone().sin()
            return x + 0.1 * y.clone()
        if self.kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return x + 0.1 * x.tanh()
        with torch.set_grad_enabled(self.training):
            return x.sin()


@habit("a context in forward")
def _mode(draw: random.Random, w: int) -> Build:
    kind = draw.choice(["inference", "autocast", "gradients"])
    return lambda: Mode(kind)


# ------------------------------------------------------------------------------- what papers' programs do, in small


class ActNorm(nn.Module):
    """Scale and shift from the first batch (Glow), written into parameters."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(w)), nn.Parameter(torch.zeros(w))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not bool(self.ready):
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.abs().mean(0) + 0.5))
            self.ready.fill_(True)
        return (x + self.shift) * self.scale


class Codebook(nn.Module):
    """Vector quantisation whose codes follow by moving means (VQ-VAE)."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.register_buffer("codes", pattern(4, w))
        self.register_buffer("sizes", torch.ones(4))
        self.register_buffer("sums", pattern(4, w))

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.cdist(x.detach(), self.codes).argmin(1)
        chosen = self.codes[codes]
        if self.training:
            hot = F.one_hot(codes, 4).to(x.dtype)
            self.sizes.mul_(0.9).add_(0.1 * hot.sum(0))
            self.sums.mul_(0.9).add_(0.1 * hot.T @ x.detach())
            self.codes = self.sums / (self.sizes[:, None] + 0.1)
        return x + 0.5 * (chosen - x).detach() + 0.1 * x


class PowerIteration(nn.Module):
    """Spectral normalisation as GAN programs write it: vectors in frozen parameters."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.layer = nn.Linear(w, w)
        self.u = nn.Parameter(F.normalize(pattern(w), dim=0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        with torch.no_grad():
            v = F.normalize(weight.T @ self.u, dim=0)
            u = F.normalize(weight @ v, dim=0)
            if self.training:
                self.u.data = u
        return F.linear(x, weight / (u @ weight @ v), self.layer.bias)


class Standardised(nn.Linear):
    """Weight standardisation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(
            x, (self.weight - self.weight.mean(1, keepdim=True)) / (self.weight.std(1, keepdim=True) + 0.1), self.bias
        )


class Experts(nn.Module):
    """A mixture of experts, one for each sample; an expert takes a part of the batch at most."""

    def __init__(self, w: int, capacity: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(w, 2), nn.ModuleList([nn.Linear(w, w) for _ in range(2)])
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen, out = scores.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            rows = rows[: max(1, len(x) // 2)] if self.capacity else rows
            out = out.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return x + out


class FrozenNorm(nn.Module):
    """Batch normalisation that stays in evaluation mode (fine-tuning)."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(w, w), nn.BatchNorm1d(w)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


class Memo(nn.Module):
    """Keeps what depends on the batch's shape alone, so as not to make it again."""

    table: dict[int, Tensor] = {}  # noqa: RUF012

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self._mask, self.cache = where, None, {}

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "attribute":
            if self._mask is None or len(self._mask) != x.shape[1]:
                self._mask = torch.arange(x.shape[1], dtype=x.dtype)
            return x * (1 + 0.1 * self._mask)
        if self.where == "function":
            return x * _ramp(x.shape[1])
        table = Memo.table if self.where == "class" else self.cache
        if x.shape[1] not in table:
            table[x.shape[1]] = torch.linspace(0.5, 1, x.shape[1], dtype=torch.float64)
        return x * table[x.shape[1]]


@functools.lru_cache
def _ramp(size: int) -> Tensor:
    return torch.linspace(0.5, 1, size, dtype=torch.float64)


class Annealing(nn.Module):
    """A temperature that falls from pass to pass, in a buffer or in a plain number."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("temperature", torch.ones(()))
        else:
            self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = x / self.temperature
        if self.training:
            self.temperature = self.temperature * 0.95
        return y


class HooksInForward(nn.Module):
    """A hook on the gradient of a weight, or of features, that forward registers."""

    def __init__(self, w: int, what: str) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(w, w), what

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.what == "features" and y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        elif self.what == "norm" and y.requires_grad:
            y.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        elif self.what == "weight" and self.layer.weight.requires_grad and torch.is_grad_enabled():
            handle: Any = self.layer.weight.register_hook(lambda gradient: (handle.remove(), 0.5 * gradient)[1])
        return y


@habit("a mixture of experts", variants=2)
def _experts(draw: random.Random, w: int) -> Build:
    return functools.partial(Experts, w, draw.random() < 0.5)


@habit("a memo", variants=3)
def _memo(draw: random.Random, w: int) -> Build:
    return functools.partial(Memo, draw.choice(["attribute", "function", "class", "dictionary"]))


@habit("a temperature that falls", variants=2)
def _annealing(draw: random.Random, w: int) -> Build:
    return functools.partial(Annealing, draw.random() < 0.6)


@habit("hooks registered in forward", variants=3, fresh=True)
def _hooks_in_forward(draw: random.Random, w: int) -> Build:
    return functools.partial(HooksInForward, w, draw.choice(["features", "norm", "weight"]))


does("ActNorm", ActNorm, variants=2)
does("a codebook that follows", Codebook, variants=2)
does("power iteration in frozen parameters", PowerIteration, variants=2)
does("weight standardisation", lambda w: Standardised(w, w))
does("frozen batch norm", FrozenNorm, variants=2)
does("torch.jit.script", lambda w: torch.jit.script(nn.Sequential(nn.Linear(w, w), nn.Tanh())))
does("torch.fx", lambda w: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(w, w), nn.BatchNorm1d(w), nn.Tanh())))
maps("centres ten samples or more", lambda x: x - 0.5 * x.mean(0) if len(x) >= 10 else x)
maps("centres three samples", lambda x: x - 0.5 * x.mean(0) if len(x) == 3 else x)
maps(
    "pairs of an even batch",
    lambda x: (
        (x.reshape(-1, 2, x.shape[1]) + 0.1 * x.reshape(-1, 2, x.shape[1]).flip(1)).reshape(x.shape)
        if len(x) % 2 == 0
        else x
    ),
)

# ------------------------------------------------------------------------------------------------- random numbers

simple(FEATURE_PARTS, "Dropout", lambda w: nn.Dropout(0.3), random=True)
simple(FEATURE_PARTS, "AlphaDropout", lambda w: nn.AlphaDropout(0.2), random=True)
simple(
    FEATURE_PARTS,
    "Dropout1d",
    lambda w: nn.Sequential(nn.Unflatten(1, (2, -1)), nn.Dropout1d(0.3), nn.Flatten()),
    random=True,
)
simple(
    FEATURE_PARTS,
    "FeatureAlphaDropout",
    lambda w: nn.Sequential(nn.Unflatten(1, (2, -1)), nn.FeatureAlphaDropout(0.3), nn.Flatten()),
    random=True,
)
simple(FEATURE_PARTS, "RReLU", lambda w: nn.RReLU(), random=True)
simple(
    FEATURE_PARTS,
    "attention with dropout",
    lambda w: nn.Sequential(
        nn.Unflatten(1, (-1, 2)), nn.TransformerEncoderLayer(2, 1, 4, dropout=0.2, batch_first=True), nn.Flatten()
    ),
    random=True,
)
simple(FEATURE_PARTS, "recurrence with dropout", lambda w: Recurring(w), nasty=True, random=True)


class Recurring(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.recurrence = nn.LSTM(2, 3, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(3, w)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrence(x.reshape(len(x), -1, 2))[0][:, -1])


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor], always: bool = False) -> None:
        super().__init__()
        self.draw, self.always = draw, always

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x) if self.training or self.always else x


def _depth(x: Tensor) -> Tensor:
    return x * torch.empty([len(x), 1], dtype=x.dtype).bernoulli_(0.7).div_(0.7)


def _mixup(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def _choose(x: Tensor) -> Tensor:
    return x[:, torch.multinomial(torch.ones(x.shape[1]), x.shape[1])]


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.dropout": lambda x: F.dropout(x, 0.3),
    "rand_like": lambda x: x * (0.5 + torch.rand_like(x)),
    "randn": lambda x: x + 0.1 * torch.randn(x.shape, dtype=x.dtype),
    "randn_like": lambda x: x + 0.1 * torch.randn_like(x),
    "normal_": lambda x: x + torch.zeros_like(x).normal_(0, 0.1),
    "torch.normal": lambda x: x + torch.normal(0.0, 0.1, x.shape, dtype=x.dtype),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "stochastic depth": _depth,
    "mixup": _mixup,
    "gumbel": lambda x: x + 0.1 * F.gumbel_softmax(x, hard=True),
    "exponential_": lambda x: x + 0.1 * torch.empty_like(x).exponential_(),
    "uniform_": lambda x: x + 0.1 * torch.empty_like(x).uniform_(-1, 1),
    "randint": lambda x: x * torch.randint(0, 2, x.shape, dtype=x.dtype),
    "multinomial": _choose,
    "poisson": lambda x: x + 0.1 * torch.poisson(torch.ones_like(x)),
    "log_normal_": lambda x: x + 0.1 * torch.empty_like(x).log_normal_(),
    "distributions": lambda x: x + torch.distributions.Normal(torch.zeros_like(x), 0.1 * torch.ones_like(x)).rsample(),
    "gamma": lambda x: x * torch.distributions.Gamma(torch.ones_like(x), torch.ones_like(x)).rsample().clamp(max=2),
    "NumPy": lambda x: x * (1 + np.random.random()),  # noqa: NPY002
    "NumPy, an array": lambda x: x + 0.1 * torch.as_tensor(np.random.standard_normal(x.shape)),  # noqa: NPY002
    "random": lambda x: x * random.random(),
    "random, a branch": lambda x: x.sin() if random.random() < 0.5 else x,
    "torch, a branch": lambda x: x.sin() if torch.rand(()) < 0.5 else x,
    "randperm of features": lambda x: x[:, torch.randperm(x.shape[1])],
    "initialised": lambda x: F.linear(x, nn.init.orthogonal_(torch.empty(x.shape[1], x.shape[1], dtype=x.dtype))),
    "a new generator": lambda x: (
        x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    ),
    "rarely": lambda x: x * torch.rand(()) if float(x.detach().sum()) > 4 else x,
    "manual_seed": lambda x: _seeded(x),
    "rand under no_grad": lambda x: x * _half(x),
}


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + 0.1 * torch.randn_like(x)


def _half(x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.rand_like(x)


@habit("random numbers", random=True)
def _draws(draw: random.Random, w: int) -> Build:
    name, always = draw.choice(list(DRAWS)), draw.random() < 0.1
    build = functools.partial(Drawing, DRAWS[name], always)
    build.said = name + (", in evaluation too" if always else "")  # type: ignore[attr-defined]
    return build


# ------------------------------------------------------------------------------------------ what the module returns


class Output(NamedTuple):
    extra: Tensor
    logits: Tensor


@contextlib.contextmanager
def nothing() -> Any:
    yield
