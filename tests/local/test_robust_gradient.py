"""Robust Gradient (profl Alg. 3) against one client at a time in NumPy, and what it finds of contaminated outliers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.core import ConfigError
from fedsim.local import robust_gradient
from fedsim.local.robust_gradient import GradientOutlierFilter, gradient_outlier_scores


def clients(seed: int, sizes: tuple[int, ...], d: int, fraction: float, distance: float) -> tuple[np.ndarray, ...]:
    """Gradients [c, B, d] with N(μ_i, I) clean ones and outliers at `distance` in a direction of the client's own."""
    draw = np.random.default_rng(seed)
    g, mask, contaminated = (np.zeros((len(sizes), max(sizes), *tail)) for tail in ((d,), (), ()))
    for i, n in enumerate(sizes):
        clean = draw.standard_normal((n, d)) + draw.standard_normal(d)
        rotten = draw.random(n) < fraction
        direction = draw.standard_normal(d)
        clean[rotten] += distance * direction / np.linalg.norm(direction)
        where = np.sort(draw.permutation(max(sizes))[:n])  # holes in the mask are anywhere
        g[i, where], mask[i, where], contaminated[i, where] = clean, 1, rotten
        g[i, mask[i] == 0] = 1e6  # what is masked must not count
    return g, mask.astype(bool), contaminated.astype(bool)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("d", [1, 4, 70])
@pytest.mark.parametrize("options", [(10, 0.015, 0.05), (25, 0.02, 0.001), (2, 0.3, 0.5)])
def test_all_clients_at_once_are_each_client_alone(
    d: int, options: tuple[int, float, float], power: bool, monkeypatch: pytest.MonkeyPatch, robust
) -> None:
    if power:
        monkeypatch.setattr(robust_gradient, "MAX_DIAGONALISED_SIDE", 0)
    for seed, (fraction, distance) in enumerate([(0.1, 8.0), (0.2, 15.0), (0.4, 60.0), (0.0, 0.0)]):
        g, mask, _ = clients(seed, (50, 3, 61, 20), d, fraction, distance)
        kept = GradientOutlierFilter(*options)(torch.as_tensor(g), torch.as_tensor(mask)).numpy()
        for i in range(len(g)):
            own = np.flatnonzero(mask[i])
            assert list(own[robust(g[i, own], *options)]) == list(np.flatnonzero(kept[i])), (seed, i)


@pytest.mark.parametrize("d", [3, 40])
def test_scores_of_wide_tall_and_large_matrices_are_those_of_the_decomposition(
    d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).standard_normal((5, 12, d)) * np.geomspace(3, 1, d)
    expected = np.stack([((m @ np.linalg.svd(m)[2][0]) ** 2) for m in x])
    np.testing.assert_allclose(gradient_outlier_scores(torch.as_tensor(x)), expected, rtol=1e-9)
    monkeypatch.setattr(robust_gradient, "MAX_DIAGONALISED_SIDE", 0)
    np.testing.assert_allclose(gradient_outlier_scores(torch.as_tensor(x)), expected, rtol=1e-4)


@pytest.mark.parametrize("fraction", [0.1, 0.2])
@pytest.mark.parametrize("distance", [15.0, 50.0])
@pytest.mark.parametrize("d", [1, 5, 20])
def test_planted_outliers_are_found_and_clean_samples_kept(fraction: float, d: int, distance: float) -> None:
    """n = 500 gradients N(μ, I), outliers N(μ + distance·u, I), u a direction of the client's own; 20 clients, three
    seeds; default constants (ours)."""
    for seed in range(3):
        g, mask, contaminated = clients(seed, (500,) * 20, d, fraction, distance)
        kept = GradientOutlierFilter()(torch.as_tensor(g), torch.as_tensor(mask)).numpy()
        assert 1 - kept[contaminated].mean() >= 0.95
        assert kept[~contaminated].mean() >= 0.95


def test_nothing_to_find_ends_at_once_and_few_samples_are_left_alone() -> None:
    same = torch.ones(2, 6, 3)
    assert bool(GradientOutlierFilter()(same, torch.ones(2, 6, dtype=torch.bool)).all())
    zero = torch.zeros(1, 6, 3)
    assert bool(GradientOutlierFilter()(zero, torch.ones(1, 6, dtype=torch.bool)).all())
    mask = torch.tensor([[True, False, False, False, False, False], [False] * 6])
    assert torch.equal(GradientOutlierFilter()(torch.randn(2, 6, 3), mask), mask)


@pytest.mark.parametrize("options", [{"bins": 1}, {"sparse": 0.0}, {"sparse": 2}, {"settled": -1}])
def test_constants_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(options))}="):
        GradientOutlierFilter(**options)
