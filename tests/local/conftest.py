"""What tests of the performative rules share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def robust(gradients: np.ndarray, bins: int, sparse: float, settled: float) -> np.ndarray:
    """Robust Gradient for one client, as profl Alg. 3 writes it: gradients [n, d] → kept numbers."""
    kept, n = np.arange(len(gradients)), len(gradients)
    while True:
        g = gradients[kept]
        mean = g.mean(0)
        v = np.linalg.svd(g - mean, full_matrices=False)[2][0]
        tau = ((g - mean) @ v) ** 2
        counts, edges = np.histogram(tau, bins, (0, tau.max()))
        k = 0
        while counts[k] < sparse * len(kept):  # the leading sparse bins, which the paper does not foresee
            k += 1
        while k < bins and counts[k] >= sparse * len(kept):
            k += 1
        left = kept if k == bins else kept[tau < edges[k]]
        change = np.linalg.norm(mean - gradients[left].mean(0)) / np.linalg.norm(mean)
        if change < settled or len(left) <= n / 2 or len(left) == len(kept):
            return left
        kept = left


@pytest.fixture(scope="session", name="robust")
def robust_fixture() -> Any:
    return robust
