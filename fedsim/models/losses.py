"""Per-sample losses, by name: (output [B, …], batch) → [B]."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def cross_entropy(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """−log softmax(output)_y, in nats."""
    return F.cross_entropy(output, batch["y"], reduction="none")


def squared(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """½‖output − y‖²."""
    return _half_squared(output, batch["y"])


def half_squared_distance(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """½‖output − x‖²: the sample itself is the target."""
    return _half_squared(output, batch["x"])


def _half_squared(output: Tensor, target: Tensor) -> Tensor:
    flat = target.reshape(len(output), -1)
    if output.flatten(1).shape != flat.shape:  # broadcasting would hide it
        raise ValueError(f"outputs of shape {list(output.shape[1:])} for targets of shape {list(target.shape[1:])}")
    return 0.5 * (output.flatten(1) - flat).square().sum(1)


LOSSES: dict[str, Loss] = {f.__name__: f for f in (cross_entropy, squared, half_squared_distance)}
