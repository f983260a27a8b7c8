"""Data that are drawn: synthetic(α, β), Gaussian means, quadratics; impossible settings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from published import SETTINGS, keys_of

from fedsim.core import ConfigError, rng
from fedsim.data.datasets import (
    Dataset,
    GaussianMean,
    Quadratics,
    Synthetic,
)
from fedsim.data.partition import Natural
from fedsim.data.partition.partition import Samples


def owners_of(data: Dataset) -> np.ndarray:
    assert data.owners is not None
    return data.owners.numpy()


@SETTINGS
@given(
    clients=st.integers(1, 12),
    features=st.integers(1, 8),
    classes=st.integers(2, 6),
    samples=st.integers(5, 40),
    seed=st.integers(0, 1000),
)
def test_synthetic_has_its_shapes_and_owners(
    clients: int, features: int, classes: int, samples: int, seed: int
) -> None:
    """A fifth of every client is held out; owners are sorted, and the natural partition gives each its own."""
    data = Synthetic(clients, features=features, classes=classes, samples=samples, seed=seed)
    assert data.train_y is not None
    assert data.test_x is not None
    held = int(0.2 * samples)
    assert data.train_x.shape == (clients * (samples - held), features)
    assert data.test_x.shape == (clients * held, features)
    assert data.train_x.dtype == torch.float32
    assert data.train_y.min() >= 0
    assert data.train_y.max() < classes
    owners = owners_of(data)
    assert (np.diff(owners) >= 0).all()
    table = Natural().table(Samples(len(data.train_x), data.train_y.numpy(), owners), clients, 0)
    assert (table.sizes == samples - held).all()
    assert np.array_equal(table.order, np.arange(len(owners)))


def test_synthetic_is_a_function_of_its_seed() -> None:
    a, b, c = Synthetic(5, seed=1), Synthetic(5, seed=1), Synthetic(5, seed=2)
    assert torch.equal(a.train_x, b.train_x)
    assert torch.equal(a.train_y, b.train_y)
    assert a.train_x.shape != c.train_x.shape or not torch.equal(a.train_x, c.train_x)


def test_synthetic_labels_come_from_one_linear_model_per_client() -> None:
    """y = argmax(W_i x + b_i) is linearly separable for each client: a linear fit reaches its own labels."""
    from sklearn.linear_model import LogisticRegression

    data = Synthetic(4, features=5, classes=3, samples=400, test_fraction=0.0, seed=0)
    assert data.train_y is not None
    assert data.test_x is None
    owners = owners_of(data)
    for client in range(4):
        x, y = data.train_x.numpy()[owners == client], data.train_y.numpy()[owners == client]
        if len(np.unique(y)) > 1:
            assert LogisticRegression(C=1e5, max_iter=2000).fit(x, y).score(x, y) > 0.97


def test_synthetic_inputs_have_the_papers_variances() -> None:
    """Within a client Var(x_j) = j^−1.2, whatever α and β; 5 σ of a variance estimated from n samples."""
    data = Synthetic(3, features=60, samples=2000, test_fraction=0.0)
    x, owners = data.train_x.numpy().astype(np.float64), owners_of(data)
    expected = np.arange(1, 61) ** -1.2
    for client in range(3):
        ratio = x[owners == client].var(0) / expected
        assert np.abs(ratio - 1).max() < 5 * np.sqrt(2 / 2000)


def test_beta_spreads_the_inputs() -> None:
    """v_i entrywise ~ N(B_i, 1), B_i ~ N(0, β): a client's average input over 60 features has variance β + 1/60."""

    def spread(beta: float) -> float:
        data = Synthetic(200, 0.0, beta, samples=40, test_fraction=0.0)
        return data.train_x.reshape(200, 40, 60).mean((1, 2)).var().item()

    for beta in (0.0, 1.0, 4.0):
        variance = beta + 1 / 60
        assert abs(spread(beta) - variance) < 5 * variance * np.sqrt(2 / 199) + 0.01


def test_synthetic_uses_every_class_over_all_clients() -> None:
    data = Synthetic(100, samples=50)
    assert data.train_y is not None
    counts = torch.bincount(data.train_y, minlength=10)
    assert len(counts) == 10
    assert counts.min() > 0.02 * counts.sum()
    assert counts.max() < 0.25 * counts.sum()


def test_synthetic_sizes_are_lognormal_with_a_floor_and_a_cap() -> None:
    """lognormal(4, 2) + 50 of which four fifths train: never below 40, at most the cap, median e⁴ + 50 ≈ 105."""
    sizes = np.bincount(owners_of(Synthetic(400, features=2, max_samples=1000)), minlength=400)
    assert sizes.min() >= 0.8 * 50
    assert sizes.max() == 0.8 * 1000
    total = sizes / 0.8
    below = (total < 50 + np.exp(4.0)).mean()
    assert abs(below - 0.5) < 5 * 0.5 / np.sqrt(400)


def test_without_a_cap_the_sizes_are_li_et_als_lognormal_draws() -> None:
    """A cap cuts sizes and changes none that is below it; ⌊n/10⌋ of each client's samples are held out, by client."""
    draw = rng.generator(3, rng.Purpose.DATA).lognormal(4.0, 2.0, 60).astype(np.int64) + 50
    assert draw.max() > 1000
    for cap, sizes in ((None, draw), (1000, np.minimum(draw, 1000))):
        data = Synthetic(60, features=2, max_samples=cap, test_fraction=0.1, seed=3)
        assert data.test_owners is not None
        assert np.bincount(data.test_owners).tolist() == (sizes // 10).tolist()
        assert np.bincount(owners_of(data)).tolist() == (sizes - sizes // 10).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_mean_streams_have_the_clients_moments(dtype: torch.dtype) -> None:
    """Mean m_i within 5 σ/√n and variance σ², for every client, in the order that was asked."""
    data, n = GaussianMean(5, mean=10.0, variance=0.6, std=2.0), 40_000
    clients = torch.tensor([3, 0, 4])
    drawn = data.draw(clients, keys_of(3), n, dtype)["x"]
    assert drawn.shape == (3, n, 1)
    assert drawn.dtype == dtype
    z = drawn[:, :, 0].double()
    assert (z.mean(1) - data.means[clients]).abs().max() < 5 * 2.0 / np.sqrt(n)
    assert (z.var(1) - 4.0).abs().max() < 5 * 4.0 * np.sqrt(2 / n)
    assert (torch.corrcoef(z) - torch.eye(3)).abs().max() < 5 / np.sqrt(n)


def test_gaussian_mean_streams_are_keyed() -> None:
    """The same key draws the same samples, alone or in company, and a longer batch begins with the shorter one."""
    data, clients, keys = GaussianMean(5), torch.arange(5), keys_of(5)
    whole = data.draw(clients, keys, 8, torch.float32)["x"]
    assert torch.equal(data.draw(clients[2:3], keys[2:3], 8, torch.float32)["x"], whole[2:3])
    assert torch.equal(data.draw(clients, keys, 3, torch.float32)["x"], whole[:, :3])
    assert not torch.equal(data.draw(clients, rng.fold_in(keys, 1), 8, torch.float32)["x"], whole)
    assert data.stream


@SETTINGS
@given(clients=st.integers(2, 50), mean=st.floats(-20, 20), variance=st.floats(0, 5), seed=st.integers(0, 100))
def test_gaussian_means_are_centred_exactly(clients: int, mean: float, variance: float, seed: int) -> None:
    data = GaussianMean(clients, mean, variance, seed=seed)
    assert data.means.mean().item() == pytest.approx(mean, abs=1e-9)
    assert data.optimum is not None
    assert data.optimum.tolist() == pytest.approx([mean], abs=1e-9)


def test_gaussian_means_have_the_variance_asked_for() -> None:
    means = GaussianMean(4000, variance=0.6).means
    assert means.var(correction=0).item() == pytest.approx(0.6)
    assert (GaussianMean(10, variance=0.0).means - 10.0).abs().max() < 1e-12


def test_explicit_gaussian_means_are_kept() -> None:
    data = GaussianMean(3, means=[1.0, 2.0, 6.0])
    assert data.means.tolist() == [1.0, 2.0, 6.0]
    assert data.optimum is not None
    assert data.optimum.tolist() == [3.0]
    with pytest.raises(ConfigError, match=r"means has 3 entries, but clients=4"):
        GaussianMean(4, means=[1.0, 2.0, 6.0])


@SETTINGS
@given(clients=st.integers(1, 20), dimension=st.integers(1, 20), seed=st.integers(0, 100))
def test_the_optimum_of_quadratics_is_the_mean(clients: int, dimension: int, seed: int) -> None:
    """There the gradient Σ (x − u_i) of the average objective is zero. One point a client."""
    data = Quadratics(clients, dimension, seed=seed)
    assert data.optimum is not None
    assert data.train_x.shape == (clients, dimension)
    assert owners_of(data).tolist() == list(range(clients))
    assert (data.optimum - data.train_x).sum(0).abs().max() < 1e-10


def test_quadratics_are_fedpbcs() -> None:
    """u_i ~ N((i/1000)·1, 0.01·I), i = 1…m: residuals have mean 0 and variance 0.01."""
    u = Quadratics(100, 100).train_x.double()
    residual = u - torch.arange(1, 101)[:, None] / 1000
    assert abs(residual.mean().item()) < 5 * 0.1 / np.sqrt(residual.numel())
    assert abs(residual.var().item() - 0.01) < 5 * 0.01 * np.sqrt(2 / residual.numel())


def test_explicit_quadratic_points_may_be_numbers_or_vectors() -> None:
    numbers, vectors = Quadratics(2, points=[1.0, 4.0]), Quadratics(2, points=[[1.0, 0.0], [4.0, 2.0]])
    assert numbers.train_x.tolist() == [[1.0], [4.0]]
    assert numbers.optimum is not None
    assert numbers.optimum.tolist() == [2.5]
    assert vectors.optimum is not None
    assert vectors.optimum.tolist() == [2.5, 1.0]
    with pytest.raises(ConfigError, match=r"points has 2 entries, but clients=3"):
        Quadratics(3, points=[1.0, 4.0])


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: GaussianMean(3, variance=-1.0), r"variance=-1"),
        (lambda: Quadratics(3, 2, variance=-1.0), r"variance=-1"),
        (lambda: Synthetic(3, alpha=-1.0, samples=10), r"alpha=-1"),
        (lambda: Synthetic(3, beta=-1.0, samples=10), r"beta=-1"),
        (lambda: Synthetic(3, samples=10, test_fraction=1.5), r"test_fraction=1\.5"),
    ],
)
def test_impossible_settings_name_their_key(build: Callable[[], Dataset], key: str) -> None:
    """A negative variance has no root: not complex means, and not NumPy's error about them."""
    with pytest.raises(ConfigError, match=key):
        build()


def test_moving_a_data_set_moves_every_tensor() -> None:
    data = GaussianMean(3).to(torch.device("meta"))
    assert {data.means.device.type, data.train_x.device.type} == {"meta"}
    assert data.optimum is not None
    assert data.optimum.device.type == "meta"
