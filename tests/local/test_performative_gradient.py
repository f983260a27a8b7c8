"""L̂₁ + L̂₂ against autograd's gradient of the performative risk, through the shift.

Base samples are fixed and balanced, so that sample means are expectations: what is left is the finite difference.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.core import Federation
from fedsim.local import PoFL
from fedsim.local.estimators import DistributionEstimator, FractionEstimator, LeastSquaresEstimator, MeanEstimator

Batch = dict[str, Tensor]


class Losses:
    """An objective whose per-sample losses are a function of one client's parameters and batch, [d] → [B]."""

    def __init__(self, loss) -> None:
        self.loss = loss

    def per_sample(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        rows = [{k: v[i] for k, v in batch.items()} for i in range(len(params))]
        values = torch.stack([self.loss(p, row) for p, row in zip(params, rows, strict=True)])
        gradients = [torch.autograd.functional.jacobian(lambda p, row=row: self.loss(p, row), p)
                     for p, row in zip(params, rows, strict=True)]  # fmt: skip
        return values, torch.stack(gradients)


def estimated(estimator: DistributionEstimator, loss, sample, thetas: Tensor, length: int) -> Tensor:
    """The step direction [d] of PoFL at the last of the deployed models [T, d], whatever was deployed before."""
    rule = PoFL(lr=1.0, history=length, rcond=1e-10)
    rule.estimator = estimator
    federation = Federation((0,), 1, np.zeros(1), dtype=torch.float64)
    carry = {"params": thetas[:1]} | rule.memory(federation, thetas.shape[1])
    for theta in thetas:
        batch = {name: value[None] for name, value in sample(theta).items()}
        carry, _ = rule.step(carry | {"params": theta[None]}, batch, torch.ones(1, dtype=torch.float64), Losses(loss))
    return theta - carry["params"][0]


def exact(risk, theta: Tensor) -> Tensor:
    """Gradient of θ ↦ risk(θ), in which θ appears as the model and as what the data answer."""
    return torch.autograd.functional.jacobian(risk, theta)


def around(theta: list[float], step: float, count: int) -> Tensor:
    """`count` models at distance about `step`, and then θ."""
    at = torch.tensor(theta, dtype=torch.float64)
    away = torch.as_tensor(np.random.default_rng(0).standard_normal((count, len(theta))))
    return torch.cat([at + step * away, at[None]])


def grid(numbers: int) -> Tensor:
    """All sign patterns times √3, 0, with the first moments of independent standard normals up to the fourth."""
    levels, chances = [-(3**0.5), 0.0, 3**0.5], [1, 4, 1]
    rows = [
        p for p in itertools.product(range(3), repeat=numbers) for _ in range(int(np.prod([chances[k] for k in p])))
    ]
    return torch.tensor([[levels[k] for k in p] for p in rows], dtype=torch.float64)


MU, GAMMA = torch.tensor([6.0, 7.0], dtype=torch.float64), torch.tensor([1.5, 0.5], dtype=torch.float64)


@pytest.mark.parametrize("known", [None, 1.0])
@pytest.mark.parametrize("name", ["revenue", "distance"])
def test_a_linear_shift_of_the_mean(name: str, known: float | None) -> None:
    """z ~ N(μ − γ θ, I): demand with −θᵀz, and the location of ½‖θ − z‖²; exact, however far the models are apart."""
    noise = grid(2)

    def sample(theta: Tensor) -> Batch:
        return {"x": MU - GAMMA * theta + noise}

    def loss(params: Tensor, batch: Batch) -> Tensor:
        return -(batch["x"] @ params) if name == "revenue" else 0.5 * (params - batch["x"]).square().sum(1)

    for length in (2, 6):
        thetas = around([1.0, -0.5], 0.7, length)
        found = estimated(MeanEstimator("x", 2, known_variance=known), loss, sample, thetas, length)
        torch.testing.assert_close(found, exact(lambda t: loss(t, sample(t)).mean(), thetas[-1]), rtol=0, atol=1e-8)


def test_house_prices_answer_through_the_coefficients() -> None:
    """y = (a − γ θ)ᵀx + n, squared loss and ridge."""
    base, a = grid(3), torch.tensor([1.0, 2.0], dtype=torch.float64)
    x, n = base[:, :2] + 5 / 3, 2 * base[:, 2]

    def sample(theta: Tensor) -> Batch:
        return {"x": x, "y": x @ (a - GAMMA * theta) + n}

    def loss(params: Tensor, batch: Batch) -> Tensor:
        return 0.5 * (batch["x"] @ params - batch["y"]).square() + 0.5 * params.square().sum()

    thetas = around([0.3, 0.9], 0.4, 3)
    found = estimated(LeastSquaresEstimator(2), loss, sample, thetas, 3)
    torch.testing.assert_close(found, exact(lambda t: loss(t, sample(t)).mean(), thetas[-1]), rtol=0, atol=1e-8)


def test_contributions_answer_through_the_fractions() -> None:
    """Groups at a₁ = 0.7, a₂ = −0.3 with fractions ½ ± ½θ, loss zθ: the risk is θ(½(a₁ + a₂) + ½(a₁ − a₂)θ)."""
    group = torch.arange(40) % 2
    z = torch.where(group == 0, 0.7, -0.3).to(torch.float64) + 0.5 * grid(1).repeat(7, 1)[:40, 0]
    z = z - torch.stack([z[group == k].mean() - a for k, a in enumerate((0.7, -0.3))])[group]

    def sample(theta: Tensor) -> Batch:
        share = torch.cat([0.5 + 0.5 * theta, 0.5 - 0.5 * theta])
        return {"x": z[:, None], "group": group, "weight": share[group]}

    def loss(params: Tensor, batch: Batch) -> Tensor:
        return batch["x"][:, 0] * params[0]

    thetas = around([-0.35], 0.1, 2)
    found = estimated(FractionEstimator(2), loss, sample, thetas, 2)
    torch.testing.assert_close(found, 0.2 + thetas[-1], rtol=0, atol=1e-8)
    for point, want in ((-0.2, 0.0), (-0.4, -0.2)):  # θ^PO; θ^PS is no stationary point
        assert estimated(FractionEstimator(2), loss, sample, around([point], 0.1, 2), 2).item() == pytest.approx(
            want, abs=1e-9
        )


def test_a_curved_answer_is_found_up_to_the_distance_of_the_models() -> None:
    """z ~ N(√(1 + θ), 1), loss zθ: ∇ = √(1 + θ) + θ / 2√(1 + θ), zero at θ^PO = −2/3; the error falls with Δθ."""
    noise = grid(1)

    def sample(theta: Tensor) -> Batch:
        return {"x": (1 + theta).sqrt() + noise}

    def loss(params: Tensor, batch: Batch) -> Tensor:
        return batch["x"][:, 0] * params[0]

    errors = []
    for step in (0.1, 0.01, 0.001):
        thetas = around([-0.5], step, 4)
        found = estimated(MeanEstimator("x", 1), loss, sample, thetas, 4)
        errors.append((found - exact(lambda t: loss(t, sample(t)).mean(), thetas[-1])).abs().item())
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert errors[2] < 1e-3
    at_optimum = estimated(MeanEstimator("x", 1), loss, sample, around([-2 / 3], 1e-4, 4), 4)
    assert at_optimum.item() == pytest.approx(0, abs=1e-3)


def test_classes_answer_on_their_own() -> None:
    """x | y ~ N(m_y − γ_y θ, 1), a loss linear in x within each class: both classes' sensitivities are found."""
    noise = grid(2)
    y = torch.cat([torch.zeros(len(noise)), torch.ones(len(noise))]).to(torch.int64)
    base, gamma = torch.cat([noise - 1, noise + 1]), torch.tensor([0.1, 3.0], dtype=torch.float64)

    def sample(theta: Tensor) -> Batch:
        return {"x": base - gamma[y][:, None] * theta, "y": y}

    def loss(params: Tensor, batch: Batch) -> Tensor:
        sign = 1 - 2 * batch["y"]
        return sign * (batch["x"] @ params) + 0.5 * params.square().sum()

    thetas = around([0.4, -0.2], 0.3, 3)
    found = estimated(MeanEstimator("x", 2, groups=2), loss, sample, thetas, 3)
    torch.testing.assert_close(found, exact(lambda t: loss(t, sample(t)).mean(), thetas[-1]), rtol=0, atol=1e-8)


def test_the_first_steps_and_still_models_have_only_the_decoupled_gradient() -> None:
    def sample(theta: Tensor) -> Batch:
        return {"x": MU - GAMMA * theta + grid(2)}

    def loss(params: Tensor, batch: Batch) -> Tensor:
        return -(batch["x"] @ params)

    thetas = around([1.0, 1.0], 0.5, 3)
    decoupled = -(MU - GAMMA * thetas[-1])
    torch.testing.assert_close(estimated(MeanEstimator("x", 2), loss, sample, thetas, 4), decoupled)
    still = thetas[-1:].expand(6, -1)
    torch.testing.assert_close(estimated(MeanEstimator("x", 2), loss, sample, still, 4), decoupled)
