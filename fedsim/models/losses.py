"""Per-sample losses, by name: (output [B, …], batch) → [B]."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_LABEL = -100  # a position without a label, as in PyTorch
MARGIN_NAME = "margin"
LossFunction = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def cross_entropy(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """−log softmax(output)_y, in nats; of labels of positions [B, …] the mean over the positions that have one. A batch
    may hold a margin [C], which a local rule takes off the outputs.

    Written out: under vmap `F.cross_entropy` goes through a decomposition that takes twice as long.
    """
    labels = batch["y"]
    if output.shape[:-1] != labels.shape:
        raise ValueError(f"outputs of shape {list(output.shape[1:])} for labels of shape {list(labels.shape[1:])}")
    if MARGIN_NAME in batch:
        output = output - batch[MARGIN_NAME]
    if labels.dim() == 1:
        return output.logsumexp(1) - output.gather(1, labels[:, None])[:, 0]
    label_mask = labels != IGNORED_LABEL
    losses = output.logsumexp(-1) - output.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (losses * label_mask).flatten(1).sum(1) / label_mask.flatten(1).sum(1).clamp(min=1)


def _torch_cross_entropy(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """`cross_entropy` in torch's own two kernels, forward and back."""
    has_class_labels = batch["y"].dim() == 1 and output.dim() == 2 and MARGIN_NAME not in batch
    return F.cross_entropy(output, batch["y"], reduction="none") if has_class_labels else cross_entropy(output, batch)


def fused_loss(loss: LossFunction) -> LossFunction:
    """Return the same loss with fewer kernels, for use without vmap."""
    return _torch_cross_entropy if loss is cross_entropy else loss


def multi_label(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean over k labels of log(1 + exp(∓output)), for y [B, k] of ones and zeros, in nats."""
    targets = batch["y"].to(output.dtype)
    if output.shape != targets.shape:
        raise ValueError(f"outputs of shape {list(output.shape[1:])} for labels of shape {list(targets.shape[1:])}")
    return F.binary_cross_entropy_with_logits(output, targets, reduction="none").flatten(1).mean(1)


def logistic(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """log(1 + exp(∓output)) for y = 1 and 0, one output per sample [B, 1], in nats."""
    if output.flatten(1).shape[1] != 1:  # broadcasting would hide it
        raise ValueError(f"outputs of shape {list(output.shape[1:])} for a binary label; logistic loss takes one")
    return F.binary_cross_entropy_with_logits(output.flatten(), batch["y"].to(output.dtype), reduction="none")


def squared(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """½‖output − y‖²."""
    return _half_squared(output, batch["y"])


def half_squared_distance(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """½‖output − x‖²: the sample itself is the target."""
    return _half_squared(output, batch["x"])


def inner_product(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """⟨output, x⟩: with model=mean, θᵀz."""
    return (output.flatten(1) * batch["x"].flatten(1)).sum(1)


def negative_revenue(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """−⟨output, x⟩: with model=mean, prices θ and demands z, the revenue θᵀz that is lost (profl §6)."""
    return -inner_product(output, batch)


def costed_revenue(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """−⟨output, x⟩ + ½⟨output², y⟩: with model=mean and dataset=market, what a player loses whose costs are y."""
    return 0.5 * (output.flatten(1).square() * batch["y"].flatten(1)).sum(1) - inner_product(output, batch)


def correct_share(output: Tensor, labels: Tensor, num_leading_dims: int) -> Tensor:
    """The share of each sample's labels that its output predicts, over the leading axes: 0 or 1 where there is one.

    Of outputs […, C] the class of the largest, of a single, logistic one […, 1] its sign. Positions without a label do
    not count. Of outputs […, k] for floating-point labels […, k] each one's sign.
    """
    if labels.is_floating_point():
        return ((output > 0) == (labels > 0.5)).to(output.dtype).flatten(num_leading_dims).mean(-1)
    predictions = (output[..., 0] > 0).to(torch.int64) if output.shape[-1] == 1 else output.argmax(-1)
    correct_mask = (predictions == labels).to(output.dtype)
    if labels.dim() == num_leading_dims:
        return correct_mask
    label_mask = (labels != IGNORED_LABEL).to(output.dtype)
    return (correct_mask * label_mask).flatten(num_leading_dims).sum(-1) / label_mask.flatten(num_leading_dims).sum(
        -1
    ).clamp(min=1)


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """The mean over a batch's samples, [..., B] → [...]; weighted where there are weights [..., B], 0 for padding."""
    return values.mean(-1) if weight is None else (values * weight).sum(-1) / weight.sum(-1)


def _half_squared(output: Tensor, target: Tensor) -> Tensor:
    flat_output, flat_target = output.reshape(len(output), -1), target.reshape(len(output), -1)
    if flat_output.shape != flat_target.shape:  # broadcasting would hide it
        raise ValueError(f"outputs of shape {list(output.shape[1:])} for targets of shape {list(target.shape[1:])}")
    return 0.5 * (flat_output - flat_target).square().sum(1)


LOSSES: dict[str, LossFunction] = {
    f.__name__: f
    for f in (
        cross_entropy,
        logistic,
        multi_label,
        squared,
        half_squared_distance,
        inner_product,
        negative_revenue,
        costed_revenue,
    )
}
# Losses under which no output is the score of a class.
UNLABELLED_LOSSES = (half_squared_distance, inner_product, negative_revenue, costed_revenue)
