"""What the main job's page says of its optimum, shown without the simulator: two minimisers, solved exactly."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from fedsim.data.datasets import Digits

RIDGE, CLASSES, RAREST = 0.01, 10, 0.05


def read(weights: torch.Tensor) -> tuple[float, float]:
    """Test accuracy, and that on zeros, in %, of the softmax regression whose class y weighs weights[y]."""
    data = Digits()
    x, tx = (part.flatten(1).double() for part in (data.train_x, data.test_x))
    y, ty = data.train_y, data.test_y
    each = (weights / weights.sum())[y] / torch.bincount(y, minlength=CLASSES)[y]
    theta = torch.zeros(CLASSES, x.shape[1] + 1, dtype=torch.double, requires_grad=True)

    def outputs(inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ theta[:, :-1].T + theta[:, -1]

    def objective() -> torch.Tensor:
        optimiser.zero_grad()
        loss = (each * cross_entropy(outputs(x), y, reduction="none")).sum() + RIDGE / 2 * theta.square().sum()
        loss.backward()
        return loss

    optimiser = torch.optim.LBFGS([theta], max_iter=3000, tolerance_change=1e-14, line_search_fn="strong_wolfe")
    optimiser.step(objective)
    assert theta.grad is not None
    assert theta.grad.norm() < 1e-6
    right = (outputs(tx).argmax(1) == ty).double()
    return round(100 * float(right.mean()), 1), round(100 * float(right[ty == 0].mean()))


def test_what_fedavg_tends_to_and_what_it_should() -> None:
    """Of Σ p_i F_i and of Σ F_i, where equally many clients hold each digit c, with p_c = 0.05 + 0.95 c / 9."""
    availability = RAREST + (1 - RAREST) * torch.arange(CLASSES, dtype=torch.double) / (CLASSES - 1)
    assert read(availability) == (86.9, 26)
    assert read(torch.ones(CLASSES, dtype=torch.double)) == (94.7, 100)
