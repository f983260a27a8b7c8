"""The division of a difference among its causes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fedsim.studies.attribution.shapley import shapley_values
from fedsim.studies.results.paired import PairedDifference


def by_orders(values: np.ndarray) -> np.ndarray:
    """The definition: the effect of removing a cause, averaged over all orders."""
    causes = int(math.log2(len(values)))
    shares = np.zeros((causes, values.shape[1]))
    for order in itertools.permutations(range(causes)):
        subset = 0
        for cause in order:
            shares[cause] += values[subset | 1 << cause] - values[subset]
            subset |= 1 << cause
    return shares / math.factorial(causes)


@pytest.mark.parametrize("causes", [1, 2, 3, 4, 5])
def test_shares_are_the_average_over_all_orders_and_add_up(causes: int) -> None:
    values = np.random.default_rng(causes).standard_normal((2**causes, 3))
    shares = shapley_values(values)
    np.testing.assert_allclose(shares, by_orders(values), atol=1e-12)
    np.testing.assert_allclose(shares.sum(0), values[-1] - values[0], atol=1e-12)


def test_effects_that_add_up_are_the_shares_and_a_cause_without_effect_has_none() -> None:
    effects = np.array([2.0, 0.0, -0.5])
    values = np.array([[sum(effects[i] for i in range(3) if subset >> i & 1)] for subset in range(8)])
    np.testing.assert_allclose(shapley_values(values)[:, 0], effects, atol=1e-12)


def test_values_of_some_subsets_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="not those of all subsets"):
        shapley_values(np.zeros((6, 1)))


def test_the_interval_is_students() -> None:
    low, high = PairedDifference(np.array([1.0, 2.0, 3.0, 4.0])).confidence_interval
    assert (low, high) == pytest.approx((0.4457, 4.5543), abs=1e-4)  # t_{0.975, 3} = 3.1824, s = 1.2910
    assert all(math.isnan(bound) for bound in PairedDifference(np.array([1.0])).confidence_interval)
