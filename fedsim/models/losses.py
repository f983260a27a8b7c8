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
    return 0.5 * (output.flatten(1) - batch["y"].reshape(len(output), -1)).square().sum(1)


def half_squared_distance(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """½‖output − x‖²: the sample itself is the target."""
    return 0.5 * (output - batch["x"]).flatten(1).square().sum(1)


LOSSES: dict[str, Loss] = {f.__name__: f for f in (cross_entropy, squared, half_squared_distance)}
