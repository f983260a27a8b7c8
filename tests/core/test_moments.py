"""Numbers drawn for clients have the mean and the variance that was asked for, exactly, by the clients' weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.core import ConfigError, Federation
from fedsim.core.heterogeneity import match_moments
from fedsim.data.datasets import GaussianMean
from fedsim.data.samples import StreamClientData
from fedsim.models import Mean, StatelessModel
from fedsim.shift import Location


@given(st.integers(2, 60), st.floats(-5, 5), st.floats(0.01, 9), st.integers(0, 2**31))
def test_moments_are_exact(clients, mean, variance, seed):
    draw = np.random.default_rng(seed)
    weights, draws = draw.dirichlet(np.ones(clients)), draw.standard_normal(clients)
    found = match_moments("key", mean, variance, weights, draws)
    assert weights @ found == pytest.approx(mean, abs=1e-9)
    assert weights @ (found - weights @ found) ** 2 == pytest.approx(variance, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("weight_variance", [0.0, 0.001])
def test_client_means_and_sensitivities_have_their_variance(seed, weight_variance):
    """p-fedavg §4: Var(m) = Σ w_i (m_i − m̄)², and Var(ε) likewise; draws times √variance give up to 1.7 times that."""
    data = GaussianMean(25, variance=0.6, seed=seed, weight_variance=weight_variance)
    federation = Federation((0,), 25, np.zeros(25, np.int64), client_shares=data.weights, weighting="data")
    shift = Location(0.9, variance=0.1, seed=seed)
    shift.setup(federation, StreamClientData(data, federation), StatelessModel(lambda: Mean((1,)), data.loss))
    weights = federation.client_weights[0]
    for numbers, mean, variance in ((data.means.numpy(), 10.0, 0.6), (shift.epsilons.numpy(), 0.9, 0.1)):
        assert weights @ numbers == pytest.approx(mean, abs=1e-9)
        assert weights @ (numbers - mean) ** 2 == pytest.approx(variance, rel=1e-9)


def test_one_client_cannot_differ_from_itself():
    with pytest.raises(ConfigError, match=r"variance=0\.6 needs at least two clients"):
        GaussianMean(1)
    assert GaussianMean(1, variance=0.0).means.tolist() == [10.0]
