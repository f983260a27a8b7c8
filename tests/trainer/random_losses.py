"""Losses of all kinds for `random_models`: what is given to fedsim, and how plain PyTorch calls it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from random_parts import RESETS
from torch import Tensor, nn

CLASSES, POSITIONS, WIDTH = 3, 5, 4
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Loss:
    """Attributes:

    name: what a specification calls it.
    target: the kind of target it wants, a key of `TARGETS`.
    output: shape of a sample's output.
    make: makes what is given to fedsim.
    plain: the same loss in plain PyTorch, (output, batch) → scalar; None: what `make` gives, called with the target.
    over_samples: is it a mean over samples, so that the loss of a test set is that of its samples?
    nasty, random: as in `RawSamples`.
    """

    name: str
    target: str
    output: tuple[int, ...]
    make: Callable[[random.Random], Any]
    plain: Callable[[Tensor, Batch], Tensor] | None = None
    over_samples: bool = True
    nasty: bool = False
    random: bool = False
    fresh: bool = False


LOSSES: dict[str, Loss] = {}


def loss(name: str, target: str, output: tuple[int, ...], given: Any, plain: Any = None, **how: Any) -> None:
    """`given`: what fedsim gets."""
    LOSSES[name] = Loss(name, target, output, lambda draw: given, plain, **how)


def labels(draw: np.random.Generator, n: int) -> Tensor:
    return torch.as_tensor(draw.integers(0, CLASSES, n))


def dense(draw: np.random.Generator, n: int) -> Tensor:
    found = draw.integers(0, CLASSES, (n, POSITIONS))
    found[draw.random(found.shape) < 0.2] = -100
    found[:, 0] = draw.integers(0, CLASSES, n)  # every sample has a label
    return torch.as_tensor(found)


def survival(draw: np.random.Generator, n: int) -> Tensor:
    events = draw.random(n) < 0.7
    return torch.as_tensor(np.stack([draw.exponential(size=n), events], 1))


TARGETS: dict[str, Callable[[np.random.Generator, int], Tensor]] = {
    "labels": labels,
    "dense": dense,
    "survival": survival,
    "numbers": lambda draw, n: torch.as_tensor(draw.standard_normal((n, 2))),
    "number": lambda draw, n: torch.as_tensor(draw.standard_normal((n, 1))),
    "several": lambda draw, n: torch.as_tensor((draw.random((n, CLASSES)) < 0.4).astype(float)),
    "binary": lambda draw, n: torch.as_tensor(draw.integers(0, 2, n)),
    "signs": lambda draw, n: torch.as_tensor(2.0 * draw.integers(0, 2, (n, 1)) - 1),
    "positive": lambda draw, n: torch.as_tensor(draw.integers(0, 4, (n, 1)).astype(float)),
    "distribution": lambda draw, n: torch.as_tensor(draw.dirichlet(np.ones(CLASSES), n)),
}
WITH_CLASSES = {"labels": CLASSES, "dense": CLASSES, "binary": 2}


def _dense_mean(output: Tensor, y: Tensor) -> Tensor:
    """The mean over samples of the mean over positions with a label; output [B, C, L]."""
    values = F.cross_entropy(output, y, reduction="none", ignore_index=-100)
    return (values.sum(1) / (y != -100).sum(1)).mean()


C = (CLASSES,)
for _ in range(1):  # built-in names
    loss("cross_entropy", "labels", C, "cross_entropy", lambda o, b: F.cross_entropy(o, b["y"]))
    loss("cross_entropy (dense)", "dense", (CLASSES, POSITIONS), "cross_entropy", lambda o, b: _dense_mean(o, b["y"]))
    loss(
        "cross_entropy (dense, classes last)",
        "dense",
        (POSITIONS, CLASSES),
        "cross_entropy",
        lambda o, b: _dense_mean(o.mT, b["y"]),
    )
    loss("squared", "numbers", (2,), "squared", lambda o, b: 0.5 * (o - b["y"]).square().sum(1).mean())
    loss(
        "logistic",
        "binary",
        (1,),
        "logistic",
        lambda o, b: F.binary_cross_entropy_with_logits(o[:, 0], b["y"].to(o.dtype)),
    )
    loss("multi_label", "several", C, "multi_label", lambda o, b: F.binary_cross_entropy_with_logits(o, b["y"]))

# ------------------------------------------------------------------------------------------- PyTorch's own


def _weights() -> Tensor:
    return torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


def _same(name: str, target: str, output: tuple[int, ...], given: Any, **how: Any) -> None:
    loss(name, target, output, given, **how)


_same("F.cross_entropy", "labels", C, F.cross_entropy)
_same("nn.CrossEntropyLoss()", "labels", C, nn.CrossEntropyLoss())
loss("nn.CrossEntropyLoss, the class", "labels", C, nn.CrossEntropyLoss, lambda o, b: F.cross_entropy(o, b["y"]))
_same("CrossEntropyLoss(label_smoothing)", "labels", C, nn.CrossEntropyLoss(label_smoothing=0.1))
_same("CrossEntropyLoss(weight)", "labels", C, nn.CrossEntropyLoss(weight=_weights()), over_samples=False)
_same(
    "CrossEntropyLoss(ignore_index)", "labels", C, nn.CrossEntropyLoss(ignore_index=1), over_samples=False, nasty=True
)
_same("CrossEntropyLoss(reduction=sum)", "labels", C, nn.CrossEntropyLoss(reduction="sum"), over_samples=False)
_same("CrossEntropyLoss(reduction=none)", "labels", C, nn.CrossEntropyLoss(reduction="none"))
_same("CrossEntropyLoss of distributions", "distribution", C, nn.CrossEntropyLoss())
_same("F.cross_entropy (dense)", "dense", (CLASSES, POSITIONS), F.cross_entropy, over_samples=False)
_same(
    "CrossEntropyLoss (dense, none)",
    "dense",
    (CLASSES, POSITIONS),
    nn.CrossEntropyLoss(reduction="none"),
    over_samples=False,
)
_same("partial(F.cross_entropy)", "labels", C, functools.partial(F.cross_entropy, reduction="none"))
_same("partial(F.cross_entropy, smoothing)", "labels", C, functools.partial(F.cross_entropy, label_smoothing=0.2))
_same("F.mse_loss", "numbers", (2,), F.mse_loss)
_same("nn.MSELoss()", "numbers", (2,), nn.MSELoss())
_same("nn.MSELoss(reduction=sum)", "numbers", (2,), nn.MSELoss(reduction="sum"), over_samples=False)
_same("nn.MSELoss of one number", "number", (1,), nn.MSELoss())
_same("nn.MSELoss, broadcasting", "numbers", (1,), nn.MSELoss(), nasty=True)
_same("nn.L1Loss()", "numbers", (2,), nn.L1Loss())
_same("nn.SmoothL1Loss()", "numbers", (2,), nn.SmoothL1Loss())
_same("F.huber_loss", "number", (1,), F.huber_loss)
_same("nn.PoissonNLLLoss()", "positive", (1,), nn.PoissonNLLLoss())
_same("nn.SoftMarginLoss()", "signs", (1,), nn.SoftMarginLoss())
_same("nn.HingeEmbeddingLoss()", "signs", (1,), nn.HingeEmbeddingLoss())
_same("nn.MultiMarginLoss()", "labels", C, nn.MultiMarginLoss())
_same("nn.BCEWithLogitsLoss()", "several", C, nn.BCEWithLogitsLoss())
_same("BCEWithLogitsLoss(pos_weight)", "several", C, nn.BCEWithLogitsLoss(pos_weight=_weights()))
_same("nn.MultiLabelSoftMarginLoss()", "several", C, nn.MultiLabelSoftMarginLoss())
_same("nn.KLDivLoss", "distribution", C, nn.KLDivLoss(reduction="batchmean"))

# --------------------------------------------------------------------------------------- per sample, one's own


def per_sample(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def focal(output: Tensor, target: Tensor) -> Tensor:
    values = F.cross_entropy(output, target, reduction="none")
    return (1 - (-values).exp()).square() * values


def focal_mean(output: Tensor, target: Tensor) -> Tensor:
    return focal(output, target).mean()


def of_batch(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch["y"], reduction="none")


def of_batch_scalar(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch["y"]) + 0.01 * output.square().mean()


def with_inputs(output: Tensor, batch: Batch) -> Tensor:
    """Reads the inputs as well."""
    return F.cross_entropy(output, batch["y"], reduction="none") * (1 + batch["x"].double().flatten(1).mean(1).abs())


def odd_names(p: Tensor, q: Tensor) -> Tensor:
    return F.cross_entropy(p, q)


def odd_names_of_batch(a: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(a, b["y"], reduction="none")


class Callable_:
    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def method(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)


def _batch(function: Any) -> Any:
    """Plain: called with the batch."""
    return lambda o, b: function(o, b).mean()


_same("per sample", "labels", C, per_sample)
_same("focal, per sample", "labels", C, focal)
_same("focal, mean", "labels", C, focal_mean)
_same("lambda", "labels", C, lambda output, target: F.cross_entropy(output, target, reduction="none"))
_same("a callable object", "labels", C, Callable_())
_same("a method", "labels", C, Callable_().method)
_same("odd names", "labels", C, odd_names)
loss("(output, batch)", "labels", C, of_batch, _batch(of_batch))
loss("(output, batch), scalar", "labels", C, of_batch_scalar, _batch(of_batch_scalar))
loss("(output, batch), inputs", "labels", C, with_inputs, _batch(with_inputs))
loss("(a, b), a batch", "labels", C, odd_names_of_batch, _batch(odd_names_of_batch))
_same(
    "a column", "labels", C, lambda output, target: per_sample(output, target)[:, None], nasty=True, over_samples=False
)
_same(
    "in single precision",
    "labels",
    C,
    lambda output, target: per_sample(output.float(), target),
    nasty=True,
    over_samples=False,
)

# ------------------------------------------------------------------------------------------- over the batch


def cox(output: Tensor, target: Tensor) -> Tensor:
    """Cox's partial likelihood (Breslow), of output [B, 1] and (time, event) [B, 2]."""
    order = target[:, 0].argsort(descending=True)
    risk, event = output[order, 0], target[order, 1]
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp(min=1)


def sup_con(output: Tensor, target: Tensor) -> Tensor:
    z = F.normalize(output + 0.01, dim=1)
    scores = z @ z.T / 0.5 - 1e9 * torch.eye(len(z), dtype=z.dtype)
    alike = (target[:, None] == target[None]).to(z.dtype) * (1 - torch.eye(len(z), dtype=z.dtype))
    return -((scores - scores.logsumexp(1, keepdim=True)) * alike).sum() / alike.sum().clamp(min=1)


def info_nce(output: Tensor, target: Tensor) -> Tensor:
    """Of a sample and the next one as its positive."""
    z = F.normalize(output + 0.01, dim=1)
    return F.cross_entropy(z @ z.roll(1, 0).T / 0.5, torch.arange(len(z)))


def rank_net(output: Tensor, target: Tensor) -> Tensor:
    difference = output[:, 0][:, None] - output[:, 0][None]
    wanted = (target[:, 0][:, None] > target[:, 0][None]).to(output.dtype)
    return (F.softplus(-difference) * wanted).sum() / wanted.sum().clamp(min=1)


def list_net(output: Tensor, target: Tensor) -> Tensor:
    return -(target[:, 0].softmax(0) * output[:, 0].log_softmax(0)).sum()


def list_net_per_sample(output: Tensor, target: Tensor) -> Tensor:
    """One number per sample, of the whole batch."""
    return -(target[:, 0].softmax(0) * output[:, 0].log_softmax(0))


def vicreg(output: Tensor, target: Tensor) -> Tensor:
    centred = output - output.mean(0)
    spread = (centred.square().sum(0) / max(len(output) - 1, 1) + 1e-4).sqrt()
    covariance = centred.T @ centred / max(len(output) - 1, 1)
    return (
        F.relu(1 - spread).mean()
        + 0.1 * (covariance - covariance.diag().diag()).square().sum()
        + (output - target).square().mean()
    )


def correlation(output: Tensor, target: Tensor) -> Tensor:
    """1 − the concordance correlation of numbers."""
    a, b = output[:, 0], target[:, 0]
    return 1 - 2 * ((a - a.mean()) * (b - b.mean())).mean() / (
        a.var(unbiased=False) + b.var(unbiased=False) + (a.mean() - b.mean()).square() + 0.1
    )


def dice(output: Tensor, target: Tensor) -> Tensor:
    p = output.sigmoid()
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


def hardest(output: Tensor, target: Tensor) -> Tensor:
    """The mean of the larger half of the losses."""
    values = F.cross_entropy(output, target, reduction="none")
    return values.topk(max(1, len(values) // 2)).values.mean()


def balanced(output: Tensor, target: Tensor) -> Tensor:
    """Weighted by the labels' frequencies in the batch, per sample."""
    counts = F.one_hot(target, CLASSES).sum(0)
    return F.cross_entropy(output, target, reduction="none") / counts[target]


def max_of_batch(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none").max()


def variance(output: Tensor, target: Tensor) -> Tensor:
    values = F.cross_entropy(output, target, reduction="none")
    return values.mean() + 0.5 * values.var(unbiased=False)


def at_least_two(output: Tensor, target: Tensor) -> Tensor:
    """NaN for a single sample."""
    return F.cross_entropy(output, target) + 0.1 * output.var(0).mean()


def barlow(output: Tensor, batch: Batch) -> Tensor:
    z = (output - output.mean(0)) / (output.std(0, unbiased=False) + 0.1)
    return ((z.T @ z / len(z)) - torch.eye(z.shape[1], dtype=z.dtype)).square().sum()


def many_samples(output: Tensor, target: Tensor) -> Tensor:
    """Over the batch from nine samples on."""
    values = F.cross_entropy(output, target, reduction="none")
    return values - 0.5 * values.mean() if len(values) > 8 else values


def three_samples(output: Tensor, target: Tensor) -> Tensor:
    values = F.cross_entropy(output, target, reduction="none")
    return values * values.softmax(0) if len(values) == 3 else values


def by_size(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none") / len(output) ** 0.5


for _function, _target, _shape in (
    (many_samples, "labels", C), (three_samples, "labels", C), (by_size, "labels", C),
    (cox, "survival", (1,)), (sup_con, "labels", (WIDTH,)), (info_nce, "labels", (WIDTH,)), (rank_net, "number", (1,)),
    (list_net, "number", (1,)), (list_net_per_sample, "number", (1,)), (vicreg, "numbers", (2,)),
    (correlation, "number", (1,)), (dice, "several", C), (hardest, "labels", C), (balanced, "labels", C),
    (max_of_batch, "labels", C), (variance, "labels", C), (at_least_two, "labels", C),
):  # fmt: skip
    _same(_function.__name__, _target, _shape, _function, over_samples=False, nasty=True)
loss("barlow", "labels", C, barlow, _batch(barlow), over_samples=False, nasty=True)

# --------------------------------------------------------------------------------------------------- and others


def noisy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output + 0.1 * torch.randn_like(output), target, reduction="none")


def noisy_mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output * (0.5 + torch.rand(output.shape, dtype=output.dtype)), target)


def numpy_noise(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none") * (1 + np.random.random())  # noqa: NPY002


def in_batch_pairs(output: Tensor, target: Tensor) -> Tensor:
    """A margin to a sample that is drawn."""
    other = torch.randint(0, len(output), (len(output),))
    return F.cross_entropy(output, target) + 0.1 * (output - output[other]).square().mean()


for _function in (noisy, noisy_mean, numpy_noise, in_batch_pairs):
    _same(_function.__name__, "labels", C, _function, over_samples=False, nasty=True, random=True)


class Annealed:
    """Counts its calls, which enter."""

    def __init__(self, late: int = 0) -> None:
        self._calls, self.late = 0, late

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self._calls += 1
        scale = 1 / (1 + 0.2 * self._calls) if self._calls > self.late else 1.0
        return F.cross_entropy(output, target, reduction="none") * scale


class MovingLoss(nn.Module):
    """Keeps a mean in a buffer, which enters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        value = F.cross_entropy(output, target)
        self.mean = 0.9 * self.mean + 0.1 * value.detach()
        return value / (1 + self.mean)


class Learned(nn.Module):
    """Has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output * self.scale, target)


CALLS = [0]
RESETS.append(lambda: CALLS.__setitem__(0, 0))


def counting(output: Tensor, target: Tensor) -> Tensor:
    CALLS[0] += 1
    return F.cross_entropy(output, target) / (1 + 0.2 * CALLS[0])


LOSSES["a counter in a loss"] = Loss(
    "a counter in a loss", "labels", C, lambda draw: Annealed(), over_samples=False, nasty=True, fresh=True
)
LOSSES["a counter in a loss, late"] = Loss(
    "a counter in a loss, late",
    "labels",
    C,
    lambda draw: Annealed(draw.randint(2, 6)),
    over_samples=False,
    nasty=True,
    fresh=True,
)
LOSSES["a buffer in a loss"] = Loss(
    "a buffer in a loss", "labels", C, lambda draw: MovingLoss().double(), over_samples=False, nasty=True, fresh=True
)
LOSSES["a parameter in a loss"] = Loss(
    "a parameter in a loss", "labels", C, lambda draw: Learned().double(), over_samples=False, nasty=True, fresh=True
)
_same("a global in a loss", "labels", C, counting, over_samples=False, nasty=True)
_same("returns a float", "labels", C, lambda output, target: F.cross_entropy(output, target).item(), nasty=True)
_same("returns None", "labels", C, lambda output, target: None, nasty=True)
_same("returns a tuple", "labels", C, lambda output, target: (F.cross_entropy(output, target), output), nasty=True)
_same("returns an array", "labels", C, lambda output, target: np.ones(len(output)), nasty=True)
_same("detached", "labels", C, lambda output, target: F.cross_entropy(output, target).detach(), nasty=True)
_same("of other arguments", "labels", C, lambda output, target, weight: F.cross_entropy(output, target), nasty=True)
_same("in the other order", "labels", C, lambda target, output: F.cross_entropy(output, target), nasty=True)
_same("raises KeyError", "labels", C, lambda output, target: {}["key"], nasty=True)
_same("asserts four samples", "labels", C, lambda output, target: _asserted(output, target), nasty=True)
_same("writes into the output", "labels", C, lambda output, target: F.cross_entropy(output.mul_(2), target), nasty=True)
_same(
    "writes into the target",
    "labels",
    C,
    lambda output, target: F.cross_entropy(output, target.clamp_(max=1)),
    nasty=True,
)
_same(
    "by a list",
    "labels",
    C,
    lambda output, target: sum(F.cross_entropy(o[None], t[None]) for o, t in zip(output, target)) / len(output),  # noqa: B905
)
_same(
    "by a branch",
    "labels",
    C,
    lambda output, target: F.cross_entropy(output, target) * (2 if output.detach().max() > 0.5 else 1),
    nasty=True,
    over_samples=False,
)


def _asserted(output: Tensor, target: Tensor) -> Tensor:
    assert len(output) >= 4
    return F.cross_entropy(output, target)
