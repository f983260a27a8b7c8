"""Models for which the stated rule of executors leaves something to try, for `bench_trial.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from bench_executors import cnn_bn, cnn_gn, mlp_bn, mlp_ln
from bench_workloads import LR, Workload, char_lstm, mlp, noise, p_cnn, resnet18_gn, text
from torch import Tensor, nn

from fedsim.data.datasets import Dataset
from fedsim.local import SAM, SGD, LocalRule, PerFedAvg, PFedMe
from fedsim.models import CIFAR10CNN, SVHNCNN, CharLSTM, LeafCNN, Linear, Transformer, ViT

Built = Callable[..., nn.Module]


@dataclass
class Case(Workload):
    """A workload whose local rule may be another one than plain SGD."""

    rule: Callable[..., LocalRule] = SGD
    options: dict[str, Any] = field(default_factory=dict)

    def local(self) -> Any:
        return self.rule(lr=LR, steps=self.steps, batch_size=self.batch, **self.options)


def grey() -> Dataset:
    return noise((1, 28, 28), 4000)


def colours() -> Dataset:
    return noise((3, 32, 32), 4000)


def tiny() -> Dataset:
    return noise((1, 8, 8), 4000)


def features(count: int = 60) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(4000, count, generator=draw), torch.randint(0, 10, (4000,), generator=draw)
    return Dataset("noise", x, y, x[:100], y[:100], classes=10)


def signals() -> Dataset:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(4000, 3, 64, generator=draw), torch.randint(0, 10, (4000,), generator=draw)
    return Dataset("noise", x, y, x[:100], y[:100], classes=10)


def words() -> Dataset:
    """Sequences of tokens, one label each."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 500, (4000, 20), generator=draw), torch.randint(0, 10, (4000,), generator=draw)
    return Dataset("noise", x, y, x[:100], y[:100], classes=10)


def of(layers: Callable[[tuple[int, ...], int], nn.Module]) -> Built:
    """A model's constructor from its layers, given shape and classes."""

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        return layers(shape, classes)

    return build


def normed_mlp(width: int, depth: int = 1) -> Built:
    def layers(shape: tuple[int, ...], classes: int) -> nn.Module:
        sizes = [int(torch.Size(shape).numel()), *[width] * depth]
        hidden = [
            layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU())
        ]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))

    return of(layers)


class Residual(nn.Module):
    """Two linear layers beside a shortcut, three times."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Linear(int(torch.Size(shape).numel()), width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(3)
        )
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = F.relu(x + block(x))
        logits: Tensor = self.last(x)
        return logits


class Experts(nn.Module):
    """A soft mixture of four small networks."""

    def __init__(self, shape: tuple[int, ...], classes: int, count: int = 4) -> None:
        super().__init__()
        inputs = int(torch.Size(shape).numel())
        self.gate = nn.Linear(inputs, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, classes)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return (self.gate(x).softmax(1)[..., None] * outputs).sum(1)


class Factorisation(nn.Module):
    """A factorisation machine: linear terms and pairwise products of factors."""

    def __init__(self, shape: tuple[int, ...], classes: int, rank: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(shape[0], classes)
        self.factors = nn.Parameter(torch.randn(classes, shape[0], rank) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        squares = torch.einsum("bi,cir->bcr", x, self.factors).square()
        own = torch.einsum("bi,cir->bcr", x.square(), self.factors.square())
        logits: Tensor = self.linear(x) + 0.5 * (squares - own).sum(-1)
        return logits


class Recurrent(nn.Module):
    """A recurrent network over tokens; its last state is classified."""

    def __init__(self, classes: int, kind: Callable[..., nn.Module] = nn.GRU, layers: int = 1, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 32)
        self.network = kind(32, width, layers, batch_first=True)
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.network(self.embedding(x))[0][:, -1])
        return logits


class Pooled(nn.Module):
    """The mean of embedded tokens, classified by an MLP; with `attention` a weighted mean."""

    def __init__(self, classes: int, attention: bool = False) -> None:
        super().__init__()
        self.embedding, self.score = nn.Embedding(500, 64), nn.Linear(64, 1) if attention else None
        self.last = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        mean = x.mean(1) if self.score is None else (self.score(x).softmax(1) * x).sum(1)
        logits: Tensor = self.last(mean)
        return logits


class Squeezed(nn.Module):
    """A convolution whose channels are weighted by their means, with a shortcut."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(shape[0], 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.weights, self.last = nn.Linear(32, 32), nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        branch = F.relu(self.second(x))
        branch = branch * self.weights(branch.mean((2, 3))).sigmoid()[..., None, None]
        logits: Tensor = self.last((x + branch).mean((2, 3)))
        return logits


def lenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    after = ((shape[1] - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(shape[0], 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(16 * after**2, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes),
    )  # fmt: skip


def digits_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    pooled = nn.Flatten(), nn.Linear(16 * (shape[1] // 2) ** 2, classes)
    return nn.Sequential(nn.Conv2d(shape[0], 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), *pooled)


def separable(shape: tuple[int, ...], classes: int) -> nn.Module:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, a, 3, 2, 1, groups=a), nn.Conv2d(a, b, 1), nn.GroupNorm(4, b), nn.ReLU()]

    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)
    return nn.Sequential(nn.Conv2d(shape[0], 16, 3, 1, 1), nn.ReLU(), *block(16, 32), *block(32, 64), *ends)


def dilated(shape: tuple[int, ...], classes: int) -> nn.Module:
    layers = [nn.Conv2d(shape[0], 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3, dilation=2), nn.ReLU(), nn.MaxPool2d(4)]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(classes))


def signal_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    layers = [nn.Conv1d(shape[0], 32, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(32, 32, 5, padding=2)]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, classes))


def batch_norm_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    layers = [nn.Conv2d(shape[0], 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * (shape[1] // 2) ** 2, classes))


def short_lstm(classes: int, **_: Any) -> nn.Module:
    return CharLSTM(classes, hidden=32, every=True)


def small_vit(shape: tuple[int, ...], classes: int) -> nn.Module:
    return ViT(shape, classes, patch=4, width=32, heads=2)


def case(
    what: str, data: Callable[[], Dataset], model: Built, batch: int, steps: int, active: int, **other: Any
) -> Callable[[], Case]:
    return lambda: Case("", what, data(), model, batch, steps, active=active, **other)


def p_cnn_case() -> Case:
    work = p_cnn()
    return Case("", "two convolutions and dropout", work.data, work.model, 10, 3, clients=work.clients, active=2)


MODELS: dict[str, Callable[[], Case]] = {
    "mlp_ln": case("784-200, LayerNorm", grey, mlp_ln, 20, 5, 16),
    "mlp_ln_small": case("60-32, LayerNorm", features, normed_mlp(32), 10, 10, 32),
    "mlp_ln_wide": case("784-1024, LayerNorm, batch 64", grey, normed_mlp(1024), 40, 3, 4),
    "mlp_bn": case("784-200, BatchNorm", grey, mlp_bn, 20, 5, 16),
    "residual_mlp": case("784-128, three shortcuts", grey, Residual, 20, 5, 16),
    "experts": case("60 features, four experts", features, Experts, 20, 5, 32),
    "factorisation": case("factorisation machine, 60 features", features, Factorisation, 20, 5, 32),
    "lenet": case("1×28×28, average pooling", grey, lenet, 20, 5, 4),
    "digits_cnn": case("1×8×8, one convolution", tiny, digits_cnn, 10, 10, 16),
    "cnn_gn": case("3×32×32, GroupNorm", colours, cnn_gn, 16, 3, 2),
    "cnn_bn": case("3×32×32, BatchNorm", colours, cnn_bn, 16, 3, 2),
    "digits_bn": case("1×8×8, BatchNorm", tiny, batch_norm_cnn, 10, 10, 16),
    "separable": case("3×32×32, depthwise convolutions", colours, separable, 16, 3, 4),
    "dilated": case("1×28×28, dilated convolutions", grey, dilated, 20, 3, 4),
    "squeezed": case("3×32×32, squeeze and excitation", colours, Squeezed, 16, 3, 4),
    "signal_cnn": case("3×64, one-dimensional convolutions", signals, signal_cnn, 20, 5, 8),
    "vit_small": case("1×28×28, width 32", grey, small_vit, 10, 3, 4),
    "char_lstm": case("40 tokens", lambda: text(40, 2000), char_lstm, 10, 3, 2),
    "char_lstm_short": case("10 tokens, 32 units", lambda: text(10, 2000), short_lstm, 10, 5, 8),
    "lstm": case("20 tokens, two layers", words, lambda classes, **_: Recurrent(classes, nn.LSTM, 2), 20, 3, 4),
    "gru": case("20 tokens", words, lambda classes, **_: Recurrent(classes), 20, 3, 4),
    "rnn": case("20 tokens, tanh", words, lambda classes, **_: Recurrent(classes, nn.RNN), 20, 3, 4),
    "transformer": case("40 tokens", lambda: text(40, 2000), Transformer, 10, 3, 4),
    "embedding": case("20 tokens, mean", words, lambda classes, **_: Pooled(classes), 20, 5, 16),
    "attention": case("20 tokens, weighted mean", words, lambda classes, **_: Pooled(classes, True), 20, 5, 16),
    "linear_clip": case("logistic, clipped steps", grey, Linear, 20, 5, 32, options={"clip": 1.0}),
    "mlp_clip": case("2×200, clipped steps", grey, mlp, 20, 5, 16, options={"clip": 1.0}),
    "mlp_sam": case("2×200, SAM", grey, mlp, 20, 3, 16, rule=SAM),
    "mlp_pfedme": case("2×200, pFedMe", grey, mlp, 20, 3, 8, rule=PFedMe),
    "lenet_clip": case("1×28×28, clipped steps", grey, lenet, 20, 3, 4, options={"clip": 1.0}),
    "digits_perfedavg": case("1×8×8 CNN, Per-FedAvg", tiny, digits_cnn, 10, 3, 8, rule=PerFedAvg),
    "mlp_ln_deep": case("784-256×3, LayerNorm", grey, normed_mlp(256, 3), 32, 5, 8),
    "leaf_cnn": case("FEMNIST's CNN", grey, LeafCNN, 10, 2, 2),
    "cifar10_cnn": case("3×32×32, batch 32", colours, CIFAR10CNN, 32, 3, 3),
    "svhn_cnn": case("3×32×32, batch 32", colours, SVHNCNN, 32, 3, 3),
    "p_cnn": p_cnn_case,
    "resnet18_gn": case("3×32×32, batch 8", colours, resnet18_gn, 8, 1, 1),
    "vit": case("3×32×32, batch 16", colours, ViT, 16, 2, 2),
    "cifar10_clip": case("3×32×32, clipped steps", colours, CIFAR10CNN, 16, 2, 2, options={"clip": 1.0}),
}  # fmt: skip
