"""A module must be a function of the tensors that replace its parameters; whatever takes them from elsewhere is
refused, where plain PyTorch, which writes into parameters, would give other numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import RATE, by_hand, simulation_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fedsim import ConfigError
from fedsim.local import SGD
from fedsim.models.substitution import overlapping_tensors

WORK = SGD(lr=RATE, epochs=2, batch_size=5, drop_last=False)


class OfLayers(nn.Module):
    """Two layers, and a forward pass from outside."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], prepare: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.layer, self.head, self.passing = nn.Linear(4, 4), nn.Linear(4, 3), forward
        if prepare is not None:
            prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.passing(self, x)


class ThroughLambda(nn.Module):
    """Copies of it call a function that knows the original."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.inner = lambda x: F.linear(x, self.layer.weight.to(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


class Follower(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.parent().layer.weight.to(x))  # type: ignore[union-attr]


class WithFollower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.follower = Follower(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.follower(x))


def hook_of_another_layer() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    weight = module[0].weight
    module[2].register_forward_hook(lambda layer, given, output: output * (1 + weight.square().mean().to(output)))
    return module


class Merging(nn.Linear):
    """A low-rank update that eval() adds to the weights and train() takes off, as loralib's."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.one, self.other = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.other.data @ self.one.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output if self.merged else output + x @ self.one.T @ self.other.T


class CountsEpochs(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.epochs = 0

    def train(self, mode: bool = True) -> CountsEpochs:
        self.epochs += mode
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * self.epochs)


class CachesInEvaluation(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.cached = None
            return super().forward(x)
        if self.cached is None:
            self.cached = self.weight.detach() / self.weight.detach().norm()
        return F.linear(x, self.cached, self.bias)


class ScaledOnce(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale or float(self.weight.detach().norm())
        return super().forward(x) / self.scale


class WritesInBackward(nn.Module):
    """A buffer that a hook writes in the backward pass; the forward pass may write it too."""

    def __init__(self, forward_too: bool) -> None:
        super().__init__()
        self.layer, self.head, self.forward_too = nn.Linear(4, 4), nn.Linear(4, 3), forward_too
        self.register_buffer("norm", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(self.note)
        if self.training and self.forward_too:
            self.norm = self.norm * 1.01
        return self.head(hidden) * self.norm.detach().clone()

    def note(self, gradient: Tensor) -> None:
        self.norm.mul_(0.9).add_(0.1 * gradient.detach().norm())


class NoisyInEvaluation(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        noise = 0.0 if self.training else float(np.random.default_rng().random())
        return super().forward(x) * (1 + 0.1 * noise)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


class SharedStatistics(nn.Module):
    """One running mean under the names of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 3), nn.Module()
        self.register_buffer("mean", torch.zeros(4))
        self.other.register_buffer("mean", self.mean)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.add_(0.1 * x.detach().mean(0))
        return self.layer(x - self.other.mean)  # type: ignore[operator]


def both(module: Any, x: Tensor) -> Tensor:
    return module.head(module.layer(x).tanh())


def in_a_list(module: Any) -> None:
    module.weights = [module.layer.weight]


def frozen_view(module: Any) -> None:
    module.view = nn.Parameter(module.layer.weight.data, requires_grad=False)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a lambda over the module": (ThroughLambda, "a copy of ThroughLambda still uses parameters of the module"),
    "a hook over another layer": (hook_of_another_layer, "a copy of Sequential still uses parameters of the module"),
    "a weak reference": (WithFollower, "a copy of WithFollower still uses parameters of the module"),
    "a parameter in a list": (
        lambda: OfLayers(lambda m, x: m.head(F.linear(x, m.weights[0])), in_a_list),
        "in training OfLayers uses more of its parameters",
    ),
    "merged by eval()": (Merging, "in evaluation Merging uses more of its parameters"),
    "calls of train() counted": (CountsEpochs, "in training CountsEpochs uses more of its parameters"),
    "cached in evaluation": (CachesInEvaluation, "in evaluation CachesInEvaluation keeps what it computed"),
    "cached in the first pass": (ScaledOnce, "in training ScaledOnce keeps what it computed"),
    "a buffer that is a parameter's data": (
        lambda: OfLayers(
            lambda m, x: both(m, x) + F.linear(x, m.view)[:, :3],
            lambda m: m.register_buffer("view", m.layer.weight.data),
        ),
        "'layer.weight' of OfLayers shares memory with 'view'",
    ),
    "a frozen parameter that is another's data": (
        lambda: OfLayers(lambda m, x: both(m, x) + F.linear(x, m.view)[:, :3], frozen_view),
        "'layer.weight' of OfLayers shares memory with 'view'",
    ),
    "an attribute that views a parameter": (
        lambda: OfLayers(
            lambda m, x: both(m, x) + F.linear(x, m.view.to(x))[:, :3],
            lambda m: setattr(m, "view", m.layer.weight.data[:3]),
        ),
        "'layer.weight' of OfLayers shares memory with 'view'",
    ),
    "one statistic in two layers": (SharedStatistics, "'mean' of SharedStatistics shares memory with 'other.mean'"),
    "a buffer written in backward": (
        lambda: WritesInBackward(False),
        "WritesInBackward writes to its buffer 'norm' in the backward pass",
    ),
    "a buffer written in both passes": (
        lambda: WritesInBackward(True),
        "WritesInBackward writes to its buffer 'norm' in the backward pass",
    ),
    "random numbers of NumPy in evaluation": (NoisyInEvaluation, "gives another output in evaluation each time"),
    "complex weights": (Complex, "'weight' of Complex is complex"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_takes_parameters_from_elsewhere_is_refused(name: str) -> None:
    build, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence) as refused:
        simulation_of(build, local=WORK)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["a lambda over the module", "a weak reference", "a buffer that is a parameter's data"]
)
def test_a_ready_module_is_refused_too_and_left_as_it_was(name: str) -> None:
    build, sentence = REFUSED[name]
    module = build()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(ConfigError, match=sentence):
        simulation_of(module, local=WORK)
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in before.items())


class KnowsItsParent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.child = nn.Linear(4, 3), nn.Tanh()
        self.child.parents = [self]

    def forward(self, x: Tensor) -> Tensor:
        parents: Any = self.child.parents
        return parents[0].layer(self.child(x))


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "a view of a flat parameter": lambda: OfLayers(
        lambda m, x: m.head(F.linear(x, m.flat[:16].view(4, 4), m.flat[16:])),
        lambda m: setattr(m, "flat", nn.Parameter(torch.linspace(-1, 1, 20))),
    ),
    "a child that knows its parent": KnowsItsParent,
    "old spectral_norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 3)),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 3)),
    "traced by torch.fx": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))),
    "a sparse matrix": lambda: OfLayers(
        lambda m, x: both(m, torch.sparse.mm(m.graph.to(x.dtype), x.mT).mT),
        lambda m: setattr(
            m, "graph", torch.tensor([[1.0, 0, 0, 0.5], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 2]]).to_sparse()
        ),
    ),
    "an attribute that nothing reads": lambda: OfLayers(both, lambda m: setattr(m, "view", m.layer.weight.data[:3])),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_looks_alike_and_is_a_function_of_its_tensors_trains_as_by_hand(name: str) -> None:
    build = RIGHT[name]
    simulation = simulation_of(build, local=WORK)
    result = simulation.run()
    for r, server in enumerate(by_hand(simulation, build)):
        got = result.model(replicate=r)
        for key, value in server.state_dict().items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-10, msg=f"{name}: {key}")


def test_a_lazy_module_that_is_given_ready_is_taken() -> None:
    module = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(3))
    assert simulation_of(module, local=WORK).model.trained == 5 * 5 + 3 * 6


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_tensors_that_have_one_number_in_common_share_memory_and_neighbours_do_not(shape: tuple[int, ...]) -> None:
    memory = torch.zeros(8)
    for start, expected in ((3, [("first", "second"), ("second", "first")]), (4, [])):
        module = nn.Module()
        module.register_buffer("first", memory[:4].view(shape))
        module.register_buffer("second", memory[start:])
        assert sorted((pair.name, pair.partner) for pair in overlapping_tensors(module)) == expected
