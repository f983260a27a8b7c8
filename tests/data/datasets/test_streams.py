"""Streams draw from the laws they state, client by client, and their exact samples have those laws' moments."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.core import ConfigError, rng
from fedsim.data.datasets import (
    BinaryGaussians,
    GaussianMean,
    HousePrices,
    Market,
    Pricing,
    PricingGroups,
    RegressionGroups,
)
from fedsim.data.datasets.pooled import PooledData
from fedsim.data.datasets.pricing import groups_from_uniforms
from fedsim.data.datasets.stream import StreamDataset

STREAMS = {
    "gaussian_mean": GaussianMean(4, std=2.0),
    "market": Market(4, dimension=2, std=1.5),
    "pricing": Pricing(4, dimension=3, per_client=True, std=1.5),
    "pricing_groups": PricingGroups(4, [[1.0, 2.0], [-1.0, 0.0], [3.0, 3.0]], spread=0.5, fractions=[0.2, 0.3, 0.5]),
    "house_prices": HousePrices(4, dimension=2, spread=0.5),
    "regression_groups": RegressionGroups(4, spread=0.5),
    "binary_gaussians": BinaryGaussians(4, positive=[[-1.0, -0.9], [-0.8, 0.5]], negative=[1.0, 1.2], dimension=2),
}


def keys_of(clients: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return rng.row_keys(torch.full_like(clients, seed), rng.Purpose.NOISE, clients, 3)


@pytest.mark.parametrize("uniforms", [0, 1])
def test_a_stream_is_given_the_numbers_that_it_takes(uniforms):
    """Clients [c], normals [c, B, w], and uniforms [c, B] or [c, 0]."""

    class Shapes(StreamDataset):
        def compose_samples(self, clients, normals, uniforms):
            self.seen = clients.shape, normals.shape, uniforms.shape
            return {"x": normals}

    data, clients = Shapes("shapes", 5, (3,), 3), torch.tensor([4, 0])
    data.uniforms = uniforms
    data.draw(clients, keys_of(clients), 7, torch.float64)
    assert data.seen == ((2,), (2, 7, 3), (2, 7 * uniforms))


@pytest.mark.parametrize("name", STREAMS)
def test_a_clients_draws_depend_on_nobody_else_and_on_no_batch_size(name):
    data, clients = STREAMS[name], torch.arange(4)
    whole = data.draw(clients, keys_of(clients), 8, torch.float32)
    some = data.draw(clients[2:3], keys_of(clients)[2:3], 5, torch.float32)
    other = data.draw(clients, keys_of(clients, 1), 8, torch.float32)
    assert whole["x"].shape == (4, 8, *data.shape)
    for entry, value in some.items():
        assert torch.equal(value, whole[entry][2:3, :5]), entry
    assert not torch.equal(whole["x"], other["x"])
    assert not torch.equal(whole["x"][0], whole["x"][1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STREAMS)
def test_exact_samples_agree_with_a_large_draw_and_their_moments_do_not_depend_on_the_keys(name):
    """Means and second moments of all entries: equal for any keys to rounding; within 6 σ of 200,000 draws."""
    data, clients, n = STREAMS[name], torch.arange(4), 200_000

    def moments(drawn):
        parts = [drawn[name].double() for name in ("x", "y") if name in drawn]
        z = torch.cat([part if part.dim() > 2 else part[..., None] for part in parts], dim=2)
        outer = z[..., :, None] * z[..., None, :]
        return z.mean(1), outer.mean(1), z.std(1), outer.std(1)

    one, two = (data.exact(clients, keys_of(clients, s), 400, torch.float64) for s in (0, 1))
    assert not torch.equal(one["x"], two["x"])
    fresh = moments(data.draw(clients, keys_of(clients), n, torch.float64))
    mixed = name in ("pricing_groups", "regression_groups", "binary_gaussians")  # which group: only in equal strata
    for found, other, drawn, spread in zip(moments(one)[:2], moments(two)[:2], fresh[:2], fresh[2:], strict=True):
        assert ((found - drawn).abs() <= 6 * spread / math.sqrt(n) + (0.05 * spread if mixed else 0)).all()
        if not mixed:
            torch.testing.assert_close(found, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["pricing_groups", "regression_groups"])
def test_every_groups_exact_moments_do_not_depend_on_the_keys(name):
    data, clients = STREAMS[name], torch.arange(4)
    entry = "component_x" if name == "pricing_groups" else "component_y"
    for seed in range(3):
        drawn = data.exact(clients, keys_of(clients, seed), 50, torch.float64)
        mean, square = drawn[entry].mean(1), drawn[entry].square().mean(1)
        if name == "pricing_groups":
            torch.testing.assert_close(mean, data.group_means, rtol=0, atol=1e-9)
            torch.testing.assert_close(square, data.group_means**2 + 0.25, rtol=0, atol=1e-9)
        else:  # E y = s μ, E y² = s² (μ² + σ²) + σ_n²
            torch.testing.assert_close(mean, data.slopes * 5 / 3, rtol=0, atol=1e-9)
            torch.testing.assert_close(square, data.slopes**2 * (25 / 9 + 1) + 4, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["pricing_groups", "regression_groups"])
def test_a_mixtures_sample_is_its_groups_component_in_the_base_fractions(name):
    data, clients, n = STREAMS[name], torch.arange(4), 20_000
    drawn = data.draw(clients, keys_of(clients), n, torch.float64)
    entry = "x" if name == "pricing_groups" else "y"
    for k, fraction in enumerate(data.fractions.tolist()):
        own = drawn["group"] == k
        assert torch.equal(drawn[entry][own], drawn[f"component_{entry}"][:, :, k][own])
        assert ((own.double().mean(1) - fraction).abs() < 5 * math.sqrt(fraction * (1 - fraction) / n)).all()


@pytest.mark.parametrize("name", ["pricing_groups", "regression_groups"])
def test_of_an_exact_sample_every_group_has_its_base_fraction(name: str) -> None:
    data, clients = STREAMS[name], torch.arange(4)
    group = data.exact(clients, keys_of(clients), 400, torch.float64)["group"]
    for row in group:
        assert row.bincount().tolist() == [round(400 * fraction) for fraction in data.fractions.tolist()]


def test_slopes_are_spread_evenly_around_those_of_their_groups() -> None:
    """Of 400 uniform numbers within ± 0.5, some lie in the outer tenth on either side."""
    away = RegressionGroups(400, slopes=[1.0, 3.0], spread=0.5).slopes - torch.tensor([1.0, 3.0])
    assert away.abs().max() <= 0.5
    assert (away.amin(0) < -0.4).all()
    assert (away.amax(0) > 0.4).all()


def test_house_prices_follow_their_regression():
    """Least squares on exact samples gives a_i and σ_n² back."""
    data, clients = STREAMS["house_prices"], torch.arange(4)
    drawn = data.exact(clients, keys_of(clients), 100, torch.float64)
    for client in range(4):
        x, y = drawn["x"][client], drawn["y"][client]
        fit = torch.linalg.lstsq(x, y[:, None])
        torch.testing.assert_close(fit.solution[:, 0], data.coefficients[client], rtol=0, atol=1e-9)
        assert (y - x @ fit.solution[:, 0]).square().mean().item() == pytest.approx(2.0333**2)
        assert abs(data.coefficients[client, 0].item() - 5 / 3) <= 0.5


def test_binary_gaussians_lie_around_their_classes_centres():
    """One centre a feature; rows are dealt out to the clients in turn."""
    data, clients, n = STREAMS["binary_gaussians"], torch.arange(4), 20_000
    drawn = data.draw(clients, keys_of(clients), n, torch.float64)
    for client, positive in enumerate([[-1.0, -0.9], [-0.8, 0.5]] * 2):
        for label, centre in ((0, [1.0, 1.2]), (1, positive)):
            x = drawn["x"][client][drawn["y"][client] == label]
            assert abs(len(x) / n - 0.5) < 5 * 0.5 / math.sqrt(n)
            assert ((x.mean(0) - torch.tensor(centre)).abs() < 5 * 0.5 / math.sqrt(len(x))).all()
            assert ((x.std(0) - 0.5).abs() < 0.02).all()


def test_one_row_of_centres_is_everybodys_and_one_number_every_features():
    clients, keys = torch.arange(3), keys_of(torch.arange(3))
    laws = [BinaryGaussians(3, positive=c, dimension=2, std=0.0) for c in (-0.8, [-0.8, -0.8], [[-0.8, -0.8]] * 3)]
    drawn = [law.draw(clients, keys, 50, torch.float64)["x"] for law in laws]
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    assert set(drawn[0].flatten().tolist()) == {1.0, -0.8}


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 50), dimension=st.integers(1, 7))
def test_exact_samples_of_any_size_are_white(size, dimension):
    data = Pricing(2, dimension=dimension, low=0.0, high=0.0)
    x = data.exact(torch.arange(2), keys_of(torch.arange(2)), size, torch.float64)["x"]
    assert x.shape[1] == data.num_exact_samples(size) >= size
    torch.testing.assert_close(x.mean(1), torch.zeros(2, dimension, dtype=torch.float64), rtol=0, atol=1e-9)
    eye = torch.eye(dimension, dtype=torch.float64).expand(2, -1, -1)
    torch.testing.assert_close(x.mT @ x / x.shape[1], eye, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Pricing(low=3.0, high=2.0), "low=3.0 exceeds high=2.0"),
        (lambda: PricingGroups(means=[1.0]), "at least two groups"),
        (lambda: PricingGroups(fractions=[0.5, 0.6]), "2 numbers that sum to 1"),
        (lambda: HousePrices(3, coefficient=[1.0, 2.0]), "dataset.coefficient has 2 entries, but clients=3"),
        (lambda: HousePrices(3, noise=-1.0), "noise"),
        (lambda: BinaryGaussians(3, positive=[]), "positive"),
        (
            lambda: BinaryGaussians(3, positive=[-1.0, -0.8]),
            r"positive=\[-1.0, -0.8\] must be .* \[\[-1\],\[-0.8\]\]",
        ),
        (lambda: BinaryGaussians(3, positive=[[1.0], [2.0, 3.0]]), "positive"),
        (lambda: BinaryGaussians(3, negative=[1.0, [2.0]], dimension=2), "negative"),
        (lambda: RegressionGroups(0), "clients"),
    ],
)
def test_settings_that_make_no_law_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_groups_are_equally_large_where_no_fractions_are_given(count):
    for stream in (PricingGroups(2, list(range(count))), RegressionGroups(2, slopes=list(range(1, count + 1)))):
        groups = groups_from_uniforms(stream.fractions, (torch.arange(60 * count) + 0.5) / (60 * count))
        assert groups.bincount().tolist() == [60] * count


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_exact_samples_of_pooled_data_are_equal_shares_of_all_members(size):
    data = PooledData(Pricing(3, dimension=1, low=2.0, high=6.0), 3)
    x = data.exact(torch.tensor([0]), keys_of(torch.tensor([0])), size, torch.float64)["x"]
    assert x.shape[1] == data.num_exact_samples(size) == 3 * data.inner_dataset.num_exact_samples(-(-size // 3))
    assert size <= x.shape[1]
