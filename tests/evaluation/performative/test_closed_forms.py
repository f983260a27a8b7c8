"""One solver against every closed form: random sensitivities, laws and client weights, to 1e-6."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from fedsim import Simulation
from fedsim.data.datasets import BinaryGaussians, Dataset, GaussianMean, HousePrices, Pricing, PricingGroups
from fedsim.evaluation.performative import Risk, optimal_point, stable_point
from fedsim.models import Linear, Mean
from fedsim.shift import Contribution, Demand, GroupMean, Location, Response, Shift, Strategic
from fedsim.strategies import FedAvg

SETTINGS = settings(max_examples=15, deadline=None)
SLOPE = functools.partial(Linear, bias=False)


def risk_of(dataset, model, shift, clients, weighting="uniform", **options) -> Risk:
    strategy = FedAvg(weighting=weighting)
    simulation = Simulation(dataset, model, clients=clients, shift=shift, strategy=strategy, **options)
    return Risk(simulation.model, simulation.shift, simulation.data, 0)


def start_of(risk: Risk, value: float = 0.3) -> torch.Tensor:
    return torch.full((risk.model.dimension,), value, dtype=torch.float64)


def points(risk: Risk, method="auto", box=None) -> tuple[np.ndarray, np.ndarray]:
    """θ^PS and θ^PO."""
    start = start_of(risk)
    return stable_point(risk, start, box, method).numpy(), optimal_point(risk, [start], box).numpy()


def numbers(low: float, high: float, size: int):
    return st.lists(st.floats(low, high), min_size=size, max_size=size)


@pytest.mark.slow
@SETTINGS
@given(
    means=numbers(-5, 5, 4), epsilons=numbers(-1.5, 0.9, 4), method=st.sampled_from(["auto", "gradient", "repeated"])
)
def test_location_of_a_stream(means, epsilons, method):
    """θ^PS = m̄ / (1 − ε̄), θ^PO = Σ(1 − ε_i)m_i / Σ(1 − ε_i)². (Repeated minimisation needs |ε̄| < 1.)"""
    m, e = np.array(means), np.array(epsilons)
    if method == "repeated" and abs(e.mean()) > 0.8:
        return
    stable, best = points(risk_of(GaussianMean(4, means=means), Mean, Location(epsilons=epsilons), 4), method)
    np.testing.assert_allclose(stable, m.mean() / (1 - e.mean()), atol=1e-6)
    np.testing.assert_allclose(best, ((1 - e) * m).sum() / ((1 - e) ** 2).sum(), atol=1e-6)


@SETTINGS
@given(seed=st.integers(0, 10**6), weighting=st.sampled_from(["uniform", "data"]))
def test_location_of_stored_samples_with_client_weights(seed, weighting):
    """The same in d dimensions, with each client's own samples as its law and weights 1/m or n_i/N."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 9, 4)
    owners = np.repeat(np.arange(4), sizes)
    x = draw.normal(0, 3, (len(owners), 3))
    e = draw.uniform(-0.5, 0.9, 4)
    data = Dataset("points", torch.as_tensor(x), loss="half_squared_distance", owners=torch.as_tensor(owners))
    w = sizes / sizes.sum() if weighting == "data" else np.full(4, 0.25)
    m = np.stack([x[owners == i].mean(0) for i in range(4)])
    stable, best = points(risk_of(data, Mean, Location(epsilons=e.tolist()), 4, weighting))
    np.testing.assert_allclose(stable, w @ m / (1 - w @ e), atol=1e-6)
    np.testing.assert_allclose(best, (w * (1 - e)) @ m / (w @ (1 - e) ** 2), atol=1e-6)


@pytest.mark.slow
def test_the_papers_gaussian():
    """p-fedavg §4: m̄ = 10, ε̄ = 0.9 gives 100; the search starts 100 away and knows nothing of it."""
    risk = risk_of(GaussianMean(5), Mean, Location(0.9, 0.01), 5)
    for method in ("gradient", "repeated"):
        assert stable_point(risk, start_of(risk, 0.0), method=method).item() == pytest.approx(100.0, abs=1e-5)


@SETTINGS
@given(gammas=numbers(0.2, 4, 5), dimension=st.integers(1, 6), seed=st.integers(0, 1000), low=st.floats(1, 7))
def test_demand(gammas, dimension, seed, low):
    """θ^PS = μ̄₀/γ̄, θ^PO = half of it."""
    data = Pricing(5, dimension, low, low + 2, per_client=True, seed=seed)
    stable, best = points(risk_of(data, Mean, Demand(gammas, 0.0), 5))
    expected = data.means.numpy().mean(0) / np.mean(gammas)
    np.testing.assert_allclose(stable, expected, atol=1e-6)
    np.testing.assert_allclose(best, expected / 2, atol=1e-6)


@pytest.mark.slow
@SETTINGS
@given(gammas=numbers(-0.5, 0.9, 5), a=numbers(-3, 3, 5), method=st.sampled_from(["gradient", "repeated"]))
def test_response_in_one_dimension(gammas, a, method):
    """θ^PS = ā/(1 + γ̄), θ^PO = Σ(1 + γ_i)a_i / Σ(1 + γ_i)². (Repeated minimisation needs |γ̄| < 1.)"""
    g, a = np.array(gammas), np.array(a)
    data = HousePrices(5, coefficient=a.tolist(), spread=0.0)
    stable, best = points(risk_of(data, SLOPE, Response(gammas, 0.0), 5), method)
    np.testing.assert_allclose(stable, a.mean() / (1 + g.mean()), atol=1e-6)
    np.testing.assert_allclose(best, ((1 + g) * a).sum() / ((1 + g) ** 2).sum(), atol=1e-6)


@pytest.mark.slow
@SETTINGS
@given(gammas=numbers(0.0, 3, 4), a=numbers(-3, 3, 4), dimension=st.integers(1, 4), ridge=st.floats(0, 4))
def test_response_with_ridge_in_many_dimensions(gammas, a, dimension, ridge):
    """With S = E xxᵀ: ((1 + γ̄)S + λ)θ^PS = S ā, (mean (1 + γ)² S + λ)θ^PO = S mean (1 + γ)a."""
    g, a = np.array(gammas), np.array(a)
    data = HousePrices(4, dimension, coefficient=a.tolist())
    stable, best = points(risk_of(data, SLOPE, Response(gammas, 0.0), 4, ridge=ridge))
    second = np.eye(dimension) + 25 / 9 * np.ones((dimension, dimension))
    ones, eye = np.ones(dimension), np.eye(dimension)
    np.testing.assert_allclose(stable, np.linalg.solve((1 + g.mean()) * second + ridge * eye, second @ ones * a.mean()),
                               atol=1e-6)  # fmt: skip
    curve = ((1 + g) ** 2).mean() * second + ridge * eye
    np.testing.assert_allclose(best, np.linalg.solve(curve, second @ ones * ((1 + g) * a).mean()), atol=1e-6)


def test_the_papers_house_prices():
    """γ = 1.5, ridge 10/3: θ^PO = 0.584, where twice the performative risk, ridge included, is 5.43."""
    risk = risk_of(HousePrices(10), SLOPE, Response(1.5), 10, ridge=10 / 3)
    best = optimal_point(risk, [start_of(risk)], (-10.0, 10.0))
    assert best.item() == pytest.approx(0.584, abs=5e-4)
    assert 2 * risk.performative_risk(best).item() == pytest.approx(5.43, abs=5e-3)


@SETTINGS
@given(first=st.floats(0.3, 3), second=st.floats(-3, 0.2), spread=st.floats(0, 0.2))
def test_contribution_with_linear_fractions(first, second, spread):
    """θ^PS = −(a₁ + a₂)/(a₁ − a₂) with the clients' mean a_k, θ^PO half of it, both held inside [−1, 1]."""
    data = PricingGroups(5, [first, second], spread)
    risk = risk_of(data, Mean, shift := Contribution(), 5)
    a = data.group_means.numpy()[..., 0].mean(0)
    expected = -(a[0] + a[1]) / (a[0] - a[1])
    stable, best = points(risk, box=shift.box)
    np.testing.assert_allclose(stable, np.clip(expected, -1, 1), atol=1e-6)
    np.testing.assert_allclose(best, np.clip(expected / 2, -1, 1), atol=1e-6)


def test_contribution_of_opposite_groups_has_one_point():
    """profl Fig. 6b: a₁ = −a₂ = 0.5 gives θ^PS = θ^PO = 0."""
    stable, best = points(risk_of(PricingGroups(3), Mean, Contribution(), 3), box=(-1.0, 1.0))
    np.testing.assert_allclose([stable, best], 0.0, atol=1e-9)


class Root(Shift):
    """z ~ N(√(1 + θ), 1): a non-linear answer."""

    def __call__(self, batch, theta):
        return batch | {"x": batch["x"] + torch.sqrt(1 + theta)}


def test_a_shift_of_ones_own_that_is_not_linear():
    """Loss zθ on z ~ N(√(1 + θ), 1): θ^PO = −2/3; θ^PS = −1, at the edge of where the answer exists."""
    risk = risk_of(GaussianMean(3, means=[0.0] * 3), Mean, Root(), 3, loss="inner_product")
    start = start_of(risk)
    assert optimal_point(risk, [start], (-1.0, 1.0)).item() == pytest.approx(-2 / 3, abs=1e-6)
    assert stable_point(risk, start, (-1.0, 1.0)).item() == pytest.approx(-1.0, abs=1e-6)


def classes(features: int = 3) -> Dataset:
    draw = np.random.default_rng(3)
    owners = np.repeat(np.arange(4), (30, 50, 20, 40))
    x = draw.standard_normal((140, features))
    y = (x.sum(1) + draw.standard_normal(140) > 0).astype(np.int64)
    data = {"loss": "logistic", "classes": 2, "owners": torch.as_tensor(owners)}
    return Dataset("classes", torch.as_tensor(x), torch.as_tensor(y), **data)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["gradient", "repeated"])
def test_strategic_classification_is_repeated_logistic_regression(method):
    """Against scikit-learn's LogisticRegression, fitted again and again to data that answer its last fit."""
    data, ridge, epsilons = classes(), 0.05, [0.5, 1.0, 0.2, 0.8]
    shift = Strategic(epsilons, 0.0, features=[0, 2])
    risk = risk_of(data, SLOPE, shift, 4, "data", ridge=ridge)
    stable = stable_point(risk, start_of(risk), method=method).numpy()
    x, y, owners = data.train_x.numpy(), data.train_y.numpy(), data.owners.numpy()
    theta = np.zeros(3)
    for _ in range(60):
        moved = x - np.array(epsilons)[owners, None] * theta * [1, 0, 1]
        theta = LogisticRegression(C=1 / (ridge * 140), fit_intercept=False, tol=1e-10).fit(moved, y).coef_[0]
    np.testing.assert_allclose(stable, theta, atol=1e-5)


def test_the_optimal_strategic_classifier_is_no_worse_than_any_other():
    """Nothing near θ^PO, nor θ^PS, nor the fit to data at rest, has a lower performative risk."""
    risk = risk_of(classes(), SLOPE, Strategic(0.7, 0.0), 4, ridge=0.05)
    stable, best = (torch.as_tensor(p) for p in points(risk))
    least = risk.performative_risk(best).item()
    assert least < risk.performative_risk(stable).item() - 1e-5
    draw = torch.Generator().manual_seed(0)
    for scale in (1e-3, 0.1, 1.0):
        for _ in range(20):
            other = best + scale * torch.randn(3, generator=draw, dtype=torch.float64)
            assert risk.performative_risk(other).item() > least


LAWS = {
    "location": (lambda: GaussianMean(3), Mean, lambda: Location(0.4, 0.1)),
    "demand": (lambda: Pricing(3, 2), Mean, lambda: Demand()),
    "response": (lambda: HousePrices(3, 2), Linear, lambda: Response(0.5, 0.2)),
    "strategic": (classes, Linear, lambda: Strategic(0.5, 0.2)),
    "group_mean": (lambda: BinaryGaussians(3, dimension=2), Linear, lambda: GroupMean()),
    "contribution": (lambda: PricingGroups(3, [[1.0, 2.0], [2.0, 0.5]]), Mean, lambda: Contribution("budget")),
}


@pytest.mark.parametrize("law", LAWS)
def test_gradients_through_the_shift_are_exact(law):
    """Central differences of R(θ, θ) and, with the data held still, of R(·, θ)."""
    build, model, make = LAWS[law]
    clients = 4 if law == "strategic" else 3
    risk = risk_of(build(), model, make(), clients, ridge=0.1)
    theta = 0.3 + 0.2 * torch.sin(torch.arange(risk.model.dimension)).double()
    step = 1e-5 * torch.eye(len(theta), dtype=torch.float64)
    full = [(risk.performative_risk(theta + h) - risk.performative_risk(theta - h)).item() / 2e-5 for h in step]
    still = [(risk(theta + h, theta) - risk(theta - h, theta)).item() / 2e-5 for h in step]
    np.testing.assert_allclose(risk.performative_gradient(theta), full, atol=1e-7)
    np.testing.assert_allclose(risk.decoupled_gradient(theta), still, atol=1e-7)
    assert not np.allclose(full, still, atol=1e-4)
