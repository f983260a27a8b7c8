"""Fractions follow their formulas; training meets true samples of the mixture; weights carry the exact gradient."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from fedsim import Execution, Simulation
from fedsim.core import ConfigError, rng
from fedsim.data.datasets import Digits, GaussianMean, HousePrices, PricingGroups, RegressionGroups
from fedsim.data.partition import Dirichlet
from fedsim.local import SGD
from fedsim.models import Linear, Mean
from fedsim.shift import Contribution

M = 4


def simulation_of(dataset, model, shift, **options) -> Simulation:
    rule = SGD(lr=0.1, steps=3, batch_size=4)
    given = {"local": rule, "execution": Execution(dtype="float64")}
    return Simulation(dataset, model, clients=M, shift=shift, **given | options)


def drawn(dataset, client: int, size: int) -> dict[str, torch.Tensor]:
    """A base batch of one client."""
    one = torch.tensor([client])
    keys = rng.row_keys(torch.zeros_like(one), rng.Purpose.NOISE, one)
    batch = {name: value[0] for name, value in dataset.draw(one, keys, size, torch.float64).items()}
    return batch | {"client": one[0], "row": one[0]}


def linear(theta, i, data):
    return [0.5 + 0.5 * theta[0], 0.5 - 0.5 * theta[0]]


def budget(theta, i, data):
    left = [7.0 - float(theta @ mean) for mean in data.group_means[i]]
    return [r / sum(left) for r in left]


def loss(theta, i, data):
    """ℓ_k = ½E(θx + b − s_k x − n)²; ν_1 ∝ ℓ_2 + c."""
    second, first = 25 / 9 + 1, 5 / 3
    weight, bias = float(theta[0]), float(theta[1])
    losses = [0.5 * ((weight - s) ** 2 * second + 2 * (weight - s) * bias * first + bias**2 + 4.0)
              for s in data.slopes[i].tolist()]  # fmt: skip
    return [(losses[1] + 0.3) / (sum(losses) + 0.6), (losses[0] + 0.3) / (sum(losses) + 0.6)]


FORMS = {
    "linear": (lambda: PricingGroups(M, [1.0, -0.6], 0.3), Mean, lambda: Contribution(), linear, [0.4]),
    "budget": (lambda: PricingGroups(M, [[1.0, 2.0], [2.0, 0.5], [0.0, 1.0]], 0.3), Mean,
               lambda: Contribution("budget", budget=7.0), budget, [0.8, 1.1]),
    "loss": (lambda: RegressionGroups(M, spread=0.3), Linear, lambda: Contribution("loss", constant=0.3), loss,
             [1.7, 0.6]),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("client", [0, 3])
def test_fractions_follow_their_formula_and_samples_follow_the_fractions(form, client):
    """Each sample is its group's component, and groups are as frequent as ν says, to 5 σ of 20,000."""
    build, model, make, formula, theta = FORMS[form]
    data, shift, theta, n = build(), make(), torch.tensor(theta, dtype=torch.float64), 20_000
    shift = simulation_of(data, model, shift).shift
    batch = drawn(data, client, n)
    expected = formula(theta, client, data)
    np.testing.assert_allclose(shift.fractions(batch, theta), expected, atol=1e-9)
    moved = shift(batch, theta)
    entry = "y" if form == "loss" else "x"
    for k, fraction in enumerate(expected):
        own = moved["group"] == k
        assert torch.equal(moved[entry][own], batch[f"component_{entry}"][:, k][own])
        assert abs(own.double().mean().item() - fraction) < 5 * math.sqrt(fraction * (1 - fraction) / n)
    if form == "loss":
        assert torch.equal(moved["x"], batch["x"])


@pytest.mark.parametrize("form", FORMS)
def test_weights_carry_the_exact_gradient_of_the_mixtures_risk(form):
    """∇ Σ_k ν_k(θ) mean_j ℓ(z_jk; θ) by central differences of the formula written out, ν and ℓ both moving."""
    build, model, make, formula, theta = FORMS[form]
    data, shift, theta = build(), make(), torch.tensor(theta, dtype=torch.float64)
    simulation = simulation_of(data, model, shift)
    shift = simulation.shift
    batch = drawn(data, 1, 50)

    def risk(point):
        moved = shift.respond_differentiably(batch, point)
        losses = simulation.model.loss(simulation.model.evaluate(point, moved["x"]), moved)
        return (losses * moved["weight"]).sum() / moved["weight"].sum()

    def by_hand(point):
        parts = []
        for k, fraction in enumerate(formula(point, 1, data)):
            if form == "loss":
                errors = batch["x"][:, 0] * point[0] + point[1] - batch["component_y"][:, k]
                parts.append(float(fraction) * float((0.5 * errors**2).mean()))
            else:
                parts.append(float(fraction) * float((batch["component_x"][:, k] @ point).mean()))
        return sum(parts)

    assert float(risk(theta)) == pytest.approx(by_hand(theta), abs=1e-9)
    step = 1e-5 * torch.eye(len(theta), dtype=torch.float64)
    numeric = [(by_hand(theta + h) - by_hand(theta - h)) / 2e-5 for h in step]
    np.testing.assert_allclose(grad(risk)(theta), numeric, atol=1e-7)


def test_stored_samples_weigh_by_their_groups_fractions():
    """ν_k ∝ c + Σ_{l≠k} ℓ_l over the classes a client holds; weights ν/π sum to the client's sample count."""
    shift = Contribution("loss", constant=0.5, samples=10_000)
    simulation = simulation_of(Digits(), Linear, shift, partition=Dirichlet(0.3), seeds=(0, 1))
    shift = simulation.shift
    data = simulation.dataset
    theta = torch.sin(torch.arange(650.0)).double()
    module = nn.Linear(64, 10).double()
    module.weight.data, module.bias.data = theta[:640].reshape(10, 64), theta[640:]
    for row in (0, M + 2):
        numbers, size = simulation.data.share(row), int(simulation.federation.num_samples[row])
        x, y = data.train_x[numbers].double(), data.train_y[numbers]
        losses = nn.functional.cross_entropy(module(x.flatten(1)), y, reduction="none").detach().numpy()
        held = [k for k in range(10) if (y == k).any()]
        mean = {k: losses[(y == k).numpy()].mean() for k in held}
        raw = {k: 0.5 + sum(mean[j] for j in held if j != k) for k in held}
        batch = {"x": x, "y": y, "client": torch.tensor(row % M), "row": torch.tensor(row)}
        moved = shift(batch, theta)
        for k in held:
            share = (y == k).double().mean().item()
            weight = raw[k] / sum(raw.values()) / share
            np.testing.assert_allclose(moved["weight"][y == k], weight, rtol=1e-9)
        assert moved["weight"].sum().item() == pytest.approx(size)
        assert torch.equal(moved["x"], x)


def test_budgets_of_stored_groups_use_the_clients_own_means():
    shift = Contribution("budget", budget=30.0)
    simulation = simulation_of(Digits(), Mean, shift, loss="half_squared_distance", partition=Dirichlet(0.3))
    shift = simulation.shift
    data, numbers = simulation.dataset, simulation.data.share(2)
    theta = torch.linspace(0, 1, 64).double()
    x, y = data.train_x[numbers].double().flatten(1), data.train_y[numbers]
    left = np.array([float(30 - theta @ x[y == k].mean(0)) if (y == k).any() else 0.0 for k in range(10)])
    found = shift.fractions({"row": torch.tensor(2), "client": torch.tensor(2)}, theta)
    np.testing.assert_allclose(found, left / left.sum(), atol=1e-9)


@pytest.mark.parametrize("way", ["vmap", "loop"])
def test_padded_samples_stay_out(way):
    """Unequal clients in one chunk: weights of padding remain zero, so that everybody trains as if alone."""
    options = {"partition": Dirichlet(0.3, "per_class"), "execution": Execution(way, dtype="float64")}
    rule = SGD(lr=0.1, steps=2, batch_size=None)
    simulation = simulation_of(Digits(), Linear, Contribution("loss"), local=rule, **options)
    federation = simulation.federation
    start = torch.sin(torch.arange(M * 650.0)).double().reshape(M, 650)
    everybody = federation.make_cohort(np.ones((1, M)), np.ones((1, M)))
    together = simulation.trainer.run(start, everybody, 0, start[:1]).end
    for client in range(M):
        alone = federation.make_cohort(np.eye(M)[client][None], np.ones((1, M)))
        end = simulation.trainer.run(start[client : client + 1], alone, 0, start[:1]).end
        torch.testing.assert_close(end[0], together[client], rtol=0, atol=1e-10)


def test_out_of_range_parameters_leave_fractions_that_are_fractions():
    shift = Contribution()
    shift = simulation_of(PricingGroups(M), Mean, shift).shift
    thetas = torch.tensor([[-5.0], [-1.0], [1.0], [9.0]], dtype=torch.float64)
    batch = {"client": torch.tensor(0), "row": torch.tensor(0)}
    found = vmap(functools.partial(shift.fractions, batch))(thetas)
    assert found.tolist() == [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    assert shift.box == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: simulation_of(GaussianMean(M), Mean, Contribution()), "which dataset=gaussian_mean does not have"),
        (lambda: simulation_of(HousePrices(M), Linear, Contribution("loss")), "house_prices does not have"),
        (lambda: simulation_of(Digits(), Linear, Contribution()), r"shift\.form=linear is for two groups and one"),
        (lambda: simulation_of(Digits(), Linear, Contribution("budget")), "shift=contribution adds .*use model=mean"),
        (lambda: simulation_of(RegressionGroups(M), Linear, Contribution("budget")), "shift=contribution adds"),
        (lambda: Contribution("quadratic"), r"form='quadratic' is unknown"),
    ],
)
def test_groups_that_are_not_there_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
