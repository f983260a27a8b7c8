"""Layers, and things that users' forward passes do, from which `random_models` composes modules at random.

A part takes a source of structure (`random.Random`) and a width, and returns how its module is built: the structure
is drawn once, weights whenever the module is built. Parts of features map [B, w] to [B, w], those of images [B, 4,
4, 4] to the same shape, and those of tokens and sequences read the input and give [B, w].
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

Build = Callable[[], nn.Module]
Make = Callable[[random.Random, int], Build]
VOCABULARY, TOKENS, CHANNELS, SIDE, STEPS, NUMBERS, FEATURES = 7, 5, 4, 4, 4, 3, 5


@dataclass(frozen=True)
class Part:
    """Attributes:

    name: what a specification calls it.
    make: draws its structure.
    nasty: does it do more than map numbers to numbers?
    random: does it draw random numbers in training, so that no reference written by hand has the same ones?
    tolerance: relative deviation that rounding explains, where the part computes in fewer digits.
    fresh: must it be built anew for each copy, since `copy.deepcopy` loses what it does?
    ready: is fedsim to get a module, not how to build one? Then every replicate starts from the same: buffers and
        frozen parameters that do not move are those of one module, whatever a replicate's seed.
    variants: how much more often than others it is drawn.
    """

    name: str
    make: Make
    nasty: bool = False
    random: bool = False
    tolerance: float = 1e-9
    fresh: bool = False
    ready: bool = False
    variants: int = 1


FEATURE_PARTS: dict[str, Part] = {}
IMAGE_PARTS: dict[str, Part] = {}
TOKEN_PARTS: dict[str, Part] = {}
SEQUENCE_PARTS: dict[str, Part] = {}
RESETS: list[Callable[[], None]] = []  # what puts state outside of modules back to its beginning


def part(table: dict[str, Part], name: str, **how: Any) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        assert name not in table, name
        table[name] = Part(name, make, **how)
        return make

    return register


def simple(table: dict[str, Part], name: str, layer: Callable[[int], nn.Module], **how: Any) -> None:
    """A part without structure of its own."""
    part(table, name, **how)(lambda draw, w: functools.partial(layer, w))


def reset() -> None:
    for back in RESETS:
        back()


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def apply(table: dict[str, Part], name: str, function: Callable[[Tensor], Tensor], **how: Any) -> None:
    simple(table, name, lambda w: Apply(function), **how)


def pattern(*shape: int) -> Tensor:
    """Numbers about zero that depend on nothing but the shape."""
    return torch.sin(torch.arange(1.0, 1.0 + int(np.prod(shape)))).reshape(shape)


# ---------------------------------------------------------------------------------------------------- ordinary layers

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU, functools.partial(nn.ReLU, inplace=True), nn.ELU, functools.partial(nn.ELU, inplace=True), nn.SELU, nn.CELU,  # noqa: E501
    nn.GELU, functools.partial(nn.GELU, approximate="tanh"), nn.SiLU, functools.partial(nn.SiLU, inplace=True), nn.Mish,
    nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Hardtanh,
    functools.partial(nn.Hardtanh, inplace=True), nn.Hardswish, nn.Hardsigmoid, nn.LeakyReLU,
    functools.partial(nn.LeakyReLU, 0.2, inplace=True), nn.LogSigmoid, functools.partial(nn.Threshold, 0.1, 0.0),
    functools.partial(nn.Softmax, -1), functools.partial(nn.LogSoftmax, -1), functools.partial(nn.Softmin, -1),
    nn.ReLU6, nn.PReLU,
]  # fmt: skip


@part(FEATURE_PARTS, "linear")
def _linear(draw: random.Random, w: int) -> Build:
    act, bias = draw.choice(ACTIVATIONS), draw.random() < 0.7
    return lambda: nn.Sequential(nn.Linear(w, w, bias=bias), act())


@part(FEATURE_PARTS, "wide linear")
def _wide(draw: random.Random, w: int) -> Build:
    act = draw.choice(ACTIVATIONS)
    return lambda: nn.Sequential(nn.Linear(w, w + 3), act(), nn.Linear(w + 3, w))


@part(FEATURE_PARTS, "activation")
def _activation(draw: random.Random, w: int) -> Build:
    return draw.choice(ACTIVATIONS)


@part(FEATURE_PARTS, "PReLU of channels")
def _prelu(draw: random.Random, w: int) -> Build:
    return lambda: nn.PReLU(w, init=0.1)


@part(FEATURE_PARTS, "GLU")
def _glu(draw: random.Random, w: int) -> Build:
    return lambda: nn.Sequential(nn.Linear(w, 2 * w), nn.GLU())


@part(FEATURE_PARTS, "BatchNorm1d")
def _batch_norm(draw: random.Random, w: int) -> Build:
    options = {
        "momentum": draw.choice([0.1, 0.1, 0.5, None, 1.0]),
        "affine": draw.random() < 0.7,
        "track_running_stats": draw.random() < 0.8,
        "eps": draw.choice([1e-5, 1e-2]),
    }
    return lambda: nn.BatchNorm1d(w, **options)


@part(FEATURE_PARTS, "InstanceNorm1d")
def _instance_norm(draw: random.Random, w: int) -> Build:
    options = {"affine": draw.random() < 0.5, "track_running_stats": draw.random() < 0.6}
    return lambda: nn.Sequential(nn.Unflatten(1, (2, w // 2)), nn.InstanceNorm1d(2, **options), nn.Flatten())


@part(FEATURE_PARTS, "residual")
def _residual(draw: random.Random, w: int) -> Build:
    inner = draw.choice([_linear, _batch_norm, _wide])(draw, w)
    return lambda: Residual(inner())


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.inner(x.clone())


@part(FEATURE_PARTS, "two branches")
def _branches(draw: random.Random, w: int) -> Build:
    first, second = _linear(draw, w), _wide(draw, w)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleDict({"left": first(), "right": second()})

        def forward(self, x: Tensor) -> Tensor:
            return self.branches["left"](x.clone()) + self.branches["right"](x.clone())

    return Branches


simple(FEATURE_PARTS, "LayerNorm", lambda w: nn.LayerNorm(w))
simple(FEATURE_PARTS, "RMSNorm", lambda w: nn.RMSNorm(w))
simple(FEATURE_PARTS, "GroupNorm", lambda w: nn.GroupNorm(2, w))
simple(
    FEATURE_PARTS,
    "LocalResponseNorm",
    lambda w: nn.Sequential(nn.Unflatten(1, (w, 1)), nn.LocalResponseNorm(2), nn.Flatten()),
)
simple(FEATURE_PARTS, "Identity", lambda w: nn.Identity())
simple(FEATURE_PARTS, "Flatten", lambda w: nn.Sequential(nn.Unflatten(1, (2, -1)), nn.Flatten()))
simple(FEATURE_PARTS, "lazy linear", lambda w: nn.Sequential(nn.LazyLinear(w), nn.Tanh()))
simple(FEATURE_PARTS, "lazy batch norm", lambda w: nn.Sequential(nn.LazyLinear(w), nn.LazyBatchNorm1d()))
simple(
    FEATURE_PARTS,
    "Conv1d",
    lambda w: nn.Sequential(nn.Unflatten(1, (2, w // 2)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten()),
)
simple(
    FEATURE_PARTS,
    "Conv1d, groups",
    lambda w: nn.Sequential(
        nn.Unflatten(1, (2, w // 2)), nn.Conv1d(2, 4, 1, groups=2), nn.Conv1d(4, 2, 1), nn.Flatten()
    ),
)
simple(
    FEATURE_PARTS,
    "ConvTranspose1d",
    lambda w: nn.Sequential(nn.Unflatten(1, (2, w // 2)), nn.ConvTranspose1d(2, 2, 3, padding=1), nn.Flatten()),
)
simple(
    FEATURE_PARTS,
    "pooling 1d",
    lambda w: nn.Sequential(nn.Unflatten(1, (2, w // 2)), nn.AdaptiveMaxPool1d(2), nn.Flatten(), nn.Linear(4, w)),
)
simple(FEATURE_PARTS, "weight norm", lambda w: parametrizations.weight_norm(nn.Linear(w, w)))
simple(FEATURE_PARTS, "orthogonal", lambda w: parametrizations.orthogonal(nn.Linear(w, w)), ready=True)
simple(FEATURE_PARTS, "spectral norm", lambda w: parametrizations.spectral_norm(nn.Linear(w, w)))
simple(FEATURE_PARTS, "spectral norm by hooks", lambda w: nn.utils.spectral_norm(nn.Linear(w, w)))


class Recurrent(nn.Module):
    """Reads features as a sequence of pairs, or a sequence as it is."""

    def __init__(self, recurrence: nn.RNNBase, w: int, size: int, output: int) -> None:
        super().__init__()
        self.recurrence, self.head, self.size = recurrence, nn.Linear(output, w), size

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrence(x.reshape(len(x), -1, self.size))[0][:, -1])


def recurrent(draw: random.Random, w: int, size: int) -> Build:
    kind, layers, both = draw.choice([nn.LSTM, nn.GRU, nn.RNN]), draw.choice([1, 1, 2]), draw.random() < 0.3
    options = {"proj_size": 2} if kind is nn.LSTM and draw.random() < 0.3 else {}
    output = (options.get("proj_size", 3)) * (2 if both else 1)
    return lambda: Recurrent(kind(size, 3, layers, batch_first=True, bidirectional=both, **options), w, size, output)


@part(FEATURE_PARTS, "recurrence")
def _recurrence(draw: random.Random, w: int) -> Build:
    return recurrent(draw, w, 2)


@part(FEATURE_PARTS, "recurrent cell")
def _cell(draw: random.Random, w: int) -> Build:
    kind = draw.choice([nn.GRUCell, nn.RNNCell, nn.LSTMCell])

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(w, w)

        def forward(self, x: Tensor) -> Tensor:
            state = self.cell(x)
            for _ in range(2):
                state = self.cell(x, state)
            return state[0] if isinstance(state, tuple) else state

    return Cell


@part(FEATURE_PARTS, "attention")
def _attention(draw: random.Random, w: int) -> Build:
    encoder, first = draw.random() < 0.5, draw.random() < 0.5

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if encoder:
                self.block: nn.Module = nn.TransformerEncoderLayer(
                    2, 2, 4, dropout=0.0, batch_first=True, norm_first=first
                )
            else:
                self.block = nn.MultiheadAttention(2, 1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            rows = x.reshape(len(x), -1, 2)
            found = self.block(rows) if encoder else self.block(rows, rows, rows, need_weights=first)[0]
            return x + found.flatten(1)

    return Attention


class Form(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.form = nn.Bilinear(w, w, w)

    def forward(self, x: Tensor) -> Tensor:
        return 0.1 * self.form(x, x.tanh())


simple(FEATURE_PARTS, "Bilinear", Form)


class Cosine(nn.Module):
    """Similarities to points that are learned."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.points, self.similarity = nn.Parameter(torch.randn(w, w)), nn.CosineSimilarity(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.similarity(x[:, None] + 0.01, self.points[None])


simple(FEATURE_PARTS, "CosineSimilarity", Cosine)


class Lists(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(1 + 0.1 * torch.randn(w)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(w)), "scale": nn.Parameter(torch.ones(()))})

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale + self.named["shift"]
        return x * self.named["scale"]


simple(FEATURE_PARTS, "ParameterList and ParameterDict", Lists)
apply(FEATURE_PARTS, "torch.where", lambda x: torch.where(x > 0.1, x, 0.3 * x.sin()))
apply(FEATURE_PARTS, "sort", lambda x: x.sort(-1).values)
apply(FEATURE_PARTS, "top k", lambda x: x * 0.1 + x.topk(2, dim=-1).values.sum(-1, keepdim=True))
apply(FEATURE_PARTS, "cumulative", lambda x: x.cumsum(-1) / 3)
apply(FEATURE_PARTS, "einsum", lambda x: torch.einsum("bi,bi,bj->bj", x, x.tanh(), x.sigmoid()))
apply(FEATURE_PARTS, "distances", lambda x: torch.cdist(x[:, :, None], x[:, None, :2].mT).mean(-1) + x)
apply(FEATURE_PARTS, "Fourier", lambda x: x + 0.1 * torch.fft.fft(x).abs())
apply(
    FEATURE_PARTS,
    "complex",
    lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(len(x), -1, 2)) * (0.5 + 0.5j)).flatten(1),
)
apply(FEATURE_PARTS, "interpolate", lambda x: F.interpolate(x[:, None], scale_factor=2.0, mode="linear")[:, 0, ::2])
apply(FEATURE_PARTS, "normalise", lambda x: F.normalize(x + 0.01, dim=-1))
apply(FEATURE_PARTS, "stop gradient", lambda x: x + (0.3 * x).tanh().detach())
apply(FEATURE_PARTS, "no_grad island", lambda x: x * without_gradient(x))
apply(FEATURE_PARTS, "single precision island", lambda x: x.float().tanh().double(), tolerance=1e-3)
apply(FEATURE_PARTS, "half precision island", lambda x: (x.bfloat16() * 0.5).double() + x, tolerance=5e-2)


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.sigmoid()


class Selected(nn.Module):
    """Whole numbers and masks in buffers."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(w).flip(0))
        self.register_buffer("mask", torch.arange(w) % 2 == 0)
        self.register_buffer("levels", torch.arange(w, dtype=torch.uint8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.order] * self.mask + 0.1 * x * self.levels


simple(FEATURE_PARTS, "whole numbers in buffers", Selected)

CONVOLUTIONS: list[dict[str, Any]] = [
    {"kernel_size": 1}, {"kernel_size": 3, "padding": 1}, {"kernel_size": 3, "padding": 1, "groups": 2},
    {"kernel_size": 3, "padding": 1, "groups": CHANNELS}, {"kernel_size": 3, "padding": 2, "dilation": 2},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, {"kernel_size": 3, "padding": "same", "bias": False},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
]  # fmt: skip


@part(IMAGE_PARTS, "Conv2d")
def _conv(draw: random.Random, w: int) -> Build:
    options, act = draw.choice(CONVOLUTIONS), draw.choice(ACTIVATIONS)
    return lambda: nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, **options), act())


@part(IMAGE_PARTS, "ConvTranspose2d")
def _transposed(draw: random.Random, w: int) -> Build:
    groups = draw.choice([1, 2, CHANNELS])
    return lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1, groups=groups)


@part(IMAGE_PARTS, "BatchNorm2d")
def _batch_norm2(draw: random.Random, w: int) -> Build:
    options = {"momentum": draw.choice([0.1, 0.3, None]), "affine": draw.random() < 0.7}
    return lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=draw_true(options), **options)


def draw_true(options: dict[str, Any]) -> bool:
    return bool(options["affine"] or options["momentum"])


@part(IMAGE_PARTS, "InstanceNorm2d")
def _instance_norm2(draw: random.Random, w: int) -> Build:
    options = {"affine": draw.random() < 0.5, "track_running_stats": draw.random() < 0.6}
    return lambda: nn.InstanceNorm2d(CHANNELS, **options)


class Squeeze(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(CHANNELS, 2, 1), nn.ReLU(), nn.Conv2d(2, CHANNELS, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(x)


simple(IMAGE_PARTS, "squeeze and excitation", Squeeze)
simple(IMAGE_PARTS, "GroupNorm of images", lambda w: nn.GroupNorm(2, CHANNELS))
simple(IMAGE_PARTS, "LocalResponseNorm of images", lambda w: nn.LocalResponseNorm(3))
simple(IMAGE_PARTS, "MaxPool2d", lambda w: nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2)))
simple(IMAGE_PARTS, "AvgPool2d", lambda w: nn.AvgPool2d(3, stride=1, padding=1))
simple(
    IMAGE_PARTS,
    "LPPool2d",
    lambda w: nn.Sequential(nn.Softplus(), nn.LPPool2d(2, 2), nn.Upsample(scale_factor=2, mode="bilinear")),
)
simple(
    IMAGE_PARTS, "adaptive pooling", lambda w: nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Upsample(SIDE, mode="bicubic"))
)
simple(
    IMAGE_PARTS, "adaptive maximum", lambda w: nn.Sequential(nn.AdaptiveMaxPool2d(3), nn.ReplicationPad2d((0, 1, 0, 1)))
)
simple(IMAGE_PARTS, "PixelShuffle", lambda w: nn.Sequential(nn.PixelShuffle(2), nn.Conv2d(1, CHANNELS, 2, stride=2)))
simple(
    IMAGE_PARTS,
    "PixelUnshuffle",
    lambda w: nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(16, 16, 1), nn.PixelShuffle(2)),
)
simple(IMAGE_PARTS, "ChannelShuffle", lambda w: nn.ChannelShuffle(2))
simple(IMAGE_PARTS, "Softmax2d", lambda w: nn.Softmax2d())
simple(IMAGE_PARTS, "padding", lambda w: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(CHANNELS, CHANNELS, 3)))
simple(
    IMAGE_PARTS,
    "Conv3d",
    lambda w: nn.Sequential(nn.Unflatten(1, (1, CHANNELS)), nn.Conv3d(1, 1, 3, padding=1), nn.Flatten(1, 2)),
)
simple(
    IMAGE_PARTS, "unfold and fold", lambda w: nn.Sequential(nn.Unfold(2, stride=2), nn.Fold((SIDE, SIDE), 2, stride=2))
)
simple(IMAGE_PARTS, "lazy convolution", lambda w: nn.LazyConv2d(CHANNELS, 1))
simple(
    IMAGE_PARTS,
    "weight norm of a convolution",
    lambda w: parametrizations.weight_norm(nn.Conv2d(CHANNELS, CHANNELS, 1)),
)


class Bag(nn.Module):
    def __init__(self, w: int, mode: str, weighted: bool, **options: Any) -> None:
        super().__init__()
        self.table, self.weighted = nn.EmbeddingBag(VOCABULARY, w, mode=mode, **options), weighted

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.ones(x.shape, dtype=self.table.weight.dtype) * 0.5 if self.weighted else None
        return self.table(x, per_sample_weights=weights)


class Positions(nn.Module):
    """An embedding and where in the sequence it was."""

    def __init__(self, w: int, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 3, **options)
        self.head = nn.Linear(3 * TOKENS, w)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).flatten(1))


def tokens(name: str, nasty: bool = False, **options: Any) -> None:
    simple(TOKEN_PARTS, name, lambda w: Positions(w, **options), nasty=nasty)


@part(TOKEN_PARTS, "EmbeddingBag")
def _bag(draw: random.Random, w: int) -> Build:
    mode = draw.choice(["sum", "mean", "max"])
    weighted, padding = mode == "sum" and draw.random() < 0.5, draw.choice([None, 0])
    return lambda: Bag(w, mode, weighted, padding_idx=padding)


tokens("Embedding")
tokens("Embedding, padding_idx", padding_idx=0)
tokens("Embedding, max_norm", nasty=True, max_norm=0.7)
tokens("Embedding, scale_grad_by_freq", nasty=True, scale_grad_by_freq=True)
tokens("Embedding, sparse", nasty=True, sparse=True)
simple(TOKEN_PARTS, "EmbeddingBag, max_norm", lambda w: Bag(w, "sum", False, max_norm=0.8), nasty=True)
simple(
    TOKEN_PARTS,
    "EmbeddingBag, scale_grad_by_freq",
    lambda w: Bag(w, "mean", False, scale_grad_by_freq=True),
    nasty=True,
)
simple(TOKEN_PARTS, "EmbeddingBag, sparse", lambda w: Bag(w, "sum", False, sparse=True), nasty=True)


class TiedTokens(nn.Module):
    """Reads tokens by a table, and compares with the same table."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(VOCABULARY, 3), nn.Linear(3, VOCABULARY, bias=False)
        self.out.weight = self.table.weight
        self.head = nn.Linear(VOCABULARY, w)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.out(self.table(x).mean(1)).tanh())


simple(TOKEN_PARTS, "tied embedding", TiedTokens)


@part(SEQUENCE_PARTS, "recurrence over a sequence")
def _over(draw: random.Random, w: int) -> Build:
    return recurrent(draw, w, NUMBERS)


class Packed(nn.Module):
    """Sequences of unequal lengths, packed."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.recurrence = nn.GRU(NUMBERS, w, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[:, :, 0] > 0).sum(1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.recurrence(packed)[1][-1]


simple(SEQUENCE_PARTS, "packed sequences", Packed, nasty=True)


class Encoder(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.inside = nn.Linear(NUMBERS, 4)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False
        )
        self.head = nn.Linear(4, w)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.inside(x)).mean(1))


class Temporal(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv1d(NUMBERS, 4, 2, dilation=2), nn.Linear(4, w)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.convolution(x.mT).relu().amax(-1))


simple(SEQUENCE_PARTS, "TransformerEncoder", Encoder)
simple(SEQUENCE_PARTS, "temporal convolution", Temporal)
