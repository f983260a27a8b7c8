"""Modules of all kinds, for inputs [B, 4] and three classes; and some that no row can hold."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.models import CharLSTM, LeafCNN, Transformer, ViT


class Running(nn.Module):
    """Statistics of its own: a mean that moves, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean = self.mean + (x.detach().mean(0) - self.mean) / (self.count + 2)
        return self.layer(x - self.mean)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrence, self.head = kind(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrence(x.reshape(len(x), 2, 2))[0][:, -1])


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else x * 2)


class Twice(nn.Module):
    """One layer in two places, and a parameter of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.scale = nn.Linear(4, 4), nn.Linear(4, 3), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).tanh() * self.scale))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(torch.stack([x, -x], 1)).mean(1))


class Randomly(nn.Module):
    """Random numbers of several kinds in one forward pass, in training only."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head, self.draw = nn.Linear(4, 6), nn.Linear(6, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.head(self.draw(x) if self.training else x)


class Residual(nn.Module):
    """A residual block with batch normalisation, and squeeze-and-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(1, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(1, 1, 1), nn.Sigmoid())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (1, 2, 2))
        x = x + self.block(x)
        return self.head((x * self.scale(x)).flatten(1))


def stochastic_depth(x: Tensor) -> Tensor:
    """As torchvision.ops.stochastic_depth, mode 'row'."""
    kept = torch.empty([len(x), 1], dtype=x.dtype).bernoulli_(0.7)
    return x * kept.div_(0.7)


def image(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: copy.deepcopy(nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *layers, nn.Flatten(), nn.LazyLinear(3)))


def block(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: copy.deepcopy(nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3)))


class Signs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(2, 5), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x > 0).long()).flatten(1))


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, x)


def frozen(module: nn.Sequential) -> nn.Module:
    module[0].requires_grad_(False)
    return module


class Tokens(nn.Module):
    """A language model that reads the numbers' signs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x > 0).long())


class Bag(nn.Module):
    """Sums of a table's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(2, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x > 0).long()))


class Prototypes(nn.Module):
    """Distances to points that are learned; a complex spectrum, sorted, beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.head = nn.Parameter(torch.randn(3, 4)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.rfft(x).abs().sort(-1).values) - torch.cdist(x, self.points)


ZOO: dict[str, Callable[[], nn.Module]] = {
    "logistic": lambda: nn.Linear(4, 3),
    "mlp": block(nn.ReLU()),
    "batch norm": block(nn.BatchNorm1d(6), nn.ReLU()),
    "batch norm, cumulative": block(nn.BatchNorm1d(6, momentum=None), nn.ReLU()),
    "batch norm by batches": block(nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU()),
    "batch norm of images": image(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.ReLU()),
    "batch norm of volumes": image(nn.Unflatten(2, (1, 2)), nn.BatchNorm3d(1), nn.ReLU()),
    "instance norm": image(nn.Conv2d(1, 3, 1), nn.InstanceNorm2d(3, affine=True, track_running_stats=True)),
    "group norm": image(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4), nn.ReLU()),
    "layer norm": block(nn.LayerNorm(6), nn.GELU()),
    "spectral norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)
    ),
    "spectral norm by hooks": lambda: nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)
    ),
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)
    ),
    "own statistics": Running,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "a branch by data": lambda: Branching(4, 3),
    "a layer twice": Twice,
    "attention": Attending,
    "lazy": lambda: nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3)),
    "prelu": block(nn.PReLU()),
    "embedding": lambda: Signs(),
    "vision transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), ViT((1, 2, 2), 3, patch=1, width=4, heads=2, layers=1)
    ),
    "residual": Residual,
    "functional dropout": lambda: Randomly(lambda x: F.dropout(x, 0.4)),
    "stochastic depth": lambda: Randomly(stochastic_depth),
    "gaussian noise": lambda: Randomly(lambda x: x + 0.1 * torch.randn_like(x) * torch.rand(6, dtype=x.dtype)),
    "noisy choice": lambda: Randomly(lambda x: x + F.gumbel_softmax(x, hard=True)),
    "alpha dropout": block(nn.SELU(), nn.AlphaDropout(0.2)),
    "random slopes": block(nn.RReLU()),
    "partly frozen": lambda: frozen(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))),
    "bilinear": lambda: Bilinear(),
    "character lstm": lambda: Tokens(CharLSTM(3, hidden=5)),
    "language model": lambda: Tokens(Transformer((4,), 3, width=4, heads=2, layers=1, every=False)),
    "as leaf's": image(nn.Upsample(scale_factor=4), LeafCNN((1, 8, 8), 3, hidden=6)),
    "transposed convolution": image(nn.ConvTranspose2d(1, 3, 2), nn.LocalResponseNorm(2)),
    "embedding bag": Bag,
    "prototypes": Prototypes,
}

UNVMAPPED = {"batch norm, cumulative", "spectral norm", "spectral norm by hooks", "a branch by data"}
STATISTICS = {
    "batch norm", "batch norm, cumulative", "batch norm of images", "batch norm of volumes", "instance norm",
    "spectral norm", "spectral norm by hooks", "own statistics", "residual",
}  # fmt: skip


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Saying(nn.Linear):
    """A linear layer and something that is done to its input."""

    def __init__(self, done: Callable[[Tensor], Any]) -> None:
        super().__init__(4, 3)
        self.done = done

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.done(x))


class Renewing(nn.Linear):
    """Statistics that evaluation moves."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().mean(0)
        return super().forward(x - self.seen)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "keeps a number": (lambda: Counting(4, 3), "Counting keeps 'calls' from one forward pass to the next"),
    "NumPy's noise": (lambda: Saying(lambda x: x + np.random.normal()), "Saying draws random numbers that cannot"),  # noqa: NPY002
    "Python's noise": (lambda: Saying(lambda x: x * random.random()), "Saying draws random numbers that cannot"),
    "multinomial": (
        lambda: Saying(lambda x: x * torch.multinomial(torch.ones(3), 1)), "multinomial in a forward pass draws from"
    ),
    "noise in evaluation": (lambda: Saying(lambda x: F.dropout(x, 0.5)), "Saying draws random numbers in evaluation"),
    "writes into its input": (lambda: Saying(lambda x: x.mul_(2)), "forward pass of Saying writes into its input"),
    "moves in evaluation": (Renewing, "Renewing changes its buffer 'seen' in evaluation"),
    "drops inside a recurrence": (
        lambda: Tokens(nn.Sequential(nn.Embedding(2, 3), nn.LSTM(3, 3, 2, dropout=0.2))), "applies dropout=0.2 inside"
    ),
    "other classes": (lambda: nn.Linear(4, 5), r"3 classes: expected \[2, 3\]"),
    "other inputs": (lambda: nn.Linear(5, 3), "model does not fit dataset=toy"),
    "nothing to train": (nn.Identity, "no trainable parameters"),
}  # fmt: skip
