"""Estimators of what answers: f̂ against NumPy per client, scores against autograd of the log-density."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.local.estimators import FractionEstimator, LeastSquaresEstimator, MeanEstimator, NoEstimator

CLIENTS, SAMPLES, NUMBERS, GROUPS = 3, 150, 4, 3


def batch_of(seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Samples with a constant feature, uneven groups, weights that are 0, 1 and in between, losses."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((CLIENTS, SAMPLES, NUMBERS)) * [1, 3, 0, 0.1] + [0, 5, 1.1, -2]
    y = draw.choice(GROUPS, (CLIENTS, SAMPLES), p=[0.6, 0.3, 0.1])
    weight = draw.choice([0.0, 1.0, 0.5], (CLIENTS, SAMPLES))
    x[weight == 0] = 1e4  # what does not count must not show
    arrays = {"x": x.reshape(CLIENTS, SAMPLES, 2, 2), "y": y, "group": y, "target": draw.standard_normal(y.shape)}
    batch = {name: torch.as_tensor(value) for name, value in arrays.items()}
    return batch, torch.as_tensor(weight), torch.as_tensor(draw.standard_normal((CLIENTS, SAMPLES)))


def own(batch: dict[str, torch.Tensor], weight: torch.Tensor, i: int) -> tuple[np.ndarray, ...]:
    x = batch["x"][i].reshape(SAMPLES, NUMBERS)
    return tuple(value.numpy() for value in (x, batch["y"][i], batch["target"][i], weight[i]))


def moment(log_density, f: np.ndarray, weight: torch.Tensor, losses: torch.Tensor, i: int) -> np.ndarray:
    """Σ_j w_j ℓ_j ∂log p(z_j; f)/∂f / Σ_j w_j, with autograd's gradient of the weighted sum of log-densities."""
    at = torch.as_tensor(f).clone().requires_grad_()
    scale = torch.where(weight[i] > 0, weight[i] * losses[i], 0.0) / weight[i].sum()
    value = sum(scale[j] * log_density(at, j) for j in range(SAMPLES) if scale[j] != 0)
    return torch.autograd.grad(value, at)[0].numpy()


@pytest.mark.parametrize("known", [None, 2.5])
@pytest.mark.parametrize("features", [None, [0, 3, 2]])
@pytest.mark.parametrize("groups", [1, GROUPS])
def test_means_of_features_or_of_each_class(groups: int, features: list[int] | None, known: float | None) -> None:
    batch, weight, losses = batch_of()
    chosen = list(range(NUMBERS)) if features is None else features
    estimator = MeanEstimator("x", NUMBERS, None if features is None else torch.tensor(features), groups, known)
    assert estimator.size == groups * len(chosen)
    f = estimator.estimate_statistic(batch, weight, torch.zeros(CLIENTS, estimator.size, dtype=torch.float64))
    found, spread = estimator.score_function_gradient(batch, weight, f, losses), estimator.variance(batch, weight, f)
    for i in range(CLIENTS):
        x, y, _, w = own(batch, weight, i)
        x, y = x[:, chosen], y if groups > 1 else np.zeros_like(y)
        means, variances = np.zeros((groups, len(chosen))), np.zeros((groups, len(chosen)))
        for k in range(groups):
            share = w * (y == k)
            means[k] = share @ x / share.sum()
            variances[k] = share @ (x - means[k]) ** 2 / share.sum() if known is None else known
        np.testing.assert_allclose(f[i].numpy(), means.reshape(-1), rtol=1e-12)
        flat = np.array([sum(w[y == k]) / w.sum() for k in range(groups)])[:, None]
        np.testing.assert_allclose(spread[i], (variances / flat).sum(), rtol=1e-9)
        alive = variances > 1e-20  # a feature that does not vary has no score

        def log_density(at, j, x=x, y=y, variances=variances, alive=alive):
            k = y[j]
            residual = (torch.as_tensor(x[j]) - at.reshape(groups, -1)[k])[torch.as_tensor(alive[k])]
            return -(residual.square() / torch.as_tensor(variances[k][alive[k]])).sum() / 2

        np.testing.assert_allclose(found[i].numpy(), moment(log_density, f[i].numpy(), weight, losses, i), atol=1e-9)


def test_a_class_without_samples_keeps_its_last_mean() -> None:
    batch, weight, losses = batch_of()
    weight[0, batch["y"][0] == 1] = 0
    estimator = MeanEstimator("x", NUMBERS, groups=GROUPS)
    last = torch.arange(CLIENTS * estimator.size, dtype=torch.float64).reshape(CLIENTS, -1)
    f = estimator.estimate_statistic(batch, weight, last)
    assert torch.equal(f[0, NUMBERS : 2 * NUMBERS], last[0, NUMBERS : 2 * NUMBERS])
    assert not estimator.score_function_gradient(batch, weight, f, losses)[0, NUMBERS : 2 * NUMBERS].any()


@pytest.mark.parametrize("known", [None, 0.7])
def test_coefficients_are_least_squares(known: float | None) -> None:
    batch, weight, losses = batch_of()
    batch["y"] = batch["target"]
    estimator = LeastSquaresEstimator(NUMBERS, known)
    f = estimator.estimate_statistic(batch, weight, torch.zeros(CLIENTS, NUMBERS, dtype=torch.float64))
    found, total = estimator.score_function_gradient(batch, weight, f, losses), estimator.variance(batch, weight, f)
    for i in range(CLIENTS):
        x, _, y, w = own(batch, weight, i)
        root = np.sqrt(w)[:, None]
        expected = np.linalg.lstsq(root * x, root[:, 0] * y)[0]
        np.testing.assert_allclose(f[i].numpy(), expected, rtol=1e-8)
        variance = w @ (y - x @ expected) ** 2 / w.sum() if known is None else known

        def log_density(at, j, x=x, y=y, variance=variance):
            return -(y[j] - torch.as_tensor(x[j]) @ at).square() / (2 * variance)

        np.testing.assert_allclose(found[i].numpy(), moment(log_density, f[i].numpy(), weight, losses, i), atol=1e-9)
        gram = (w[:, None] * x).T @ x / w.sum()
        np.testing.assert_allclose(total[i], variance * np.trace(np.linalg.inv(gram)), rtol=1e-8)


def test_fractions_are_shares_and_their_score_is_the_categoricals() -> None:
    batch, weight, losses = batch_of()
    weight[1, batch["group"][1] == 2] = 0  # a group may be absent
    estimator = FractionEstimator(GROUPS)
    f = estimator.estimate_statistic(batch, weight, torch.zeros(CLIENTS, GROUPS, dtype=torch.float64))
    found = estimator.score_function_gradient(batch, weight, f, losses)
    for i in range(CLIENTS):
        _, group, _, w = own(batch, weight, i)
        np.testing.assert_allclose(f[i].numpy(), [w[group == k].sum() / w.sum() for k in range(GROUPS)])

        def log_density(at, j, group=group):
            return at[group[j]].log()

        np.testing.assert_allclose(found[i].numpy(), moment(log_density, f[i].numpy(), weight, losses, i), atol=1e-9)
        np.testing.assert_allclose(estimator.variance(batch, weight, f)[i], sum(v * (1 - v) for v in f[i].numpy()))


def test_a_client_without_a_single_sample_that_counts_has_finite_zeros() -> None:
    batch, weight, losses = batch_of()
    weight[2] = 0
    for estimator in (
        MeanEstimator("x", NUMBERS),
        LeastSquaresEstimator(NUMBERS),
        FractionEstimator(GROUPS),
        NoEstimator(),
    ):
        given = batch | {"y": batch["target"]} if isinstance(estimator, LeastSquaresEstimator) else batch
        f = estimator.estimate_statistic(given, weight, torch.zeros(CLIENTS, estimator.size, dtype=torch.float64))
        found = torch.cat([f[2], estimator.score_function_gradient(given, weight, f, losses)[2]])
        assert torch.equal(found, torch.zeros_like(found))
        assert torch.isfinite(estimator.variance(given, weight, f)).all()
