"""What is no sum over clients is NumPy's and SciPy's answer for each replicate's rows, whatever the others hold."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from fedsim.core import Cohort, Federation

counted = st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=3)


def cohort_of(counts: list[list[int]]) -> Cohort:
    """All clients compute, of whom those with a count take part: rows that must be left out are there."""
    federation = Federation(tuple(range(len(counts))), 4, np.ones(4 * len(counts), np.int64), dtype=torch.float64)
    return federation.full_cohort(federation.make_cohort(np.array(counts), np.ones((len(counts), 4))))


def parts(rows: torch.Tensor, counts: list[list[int]]) -> list[np.ndarray]:
    """By hand: each replicate's rows, each as often as its client counts."""
    by_client = rows.reshape(len(counts), 4, -1).numpy()
    return [np.repeat(own, count, axis=0) for own, count in zip(by_client, counts, strict=True)]


@settings(max_examples=40, deadline=None)
@given(counts=counted, q=st.floats(0, 1), fraction=st.floats(0, 0.49), seed=st.integers(0, 99))
def test_they_are_those_of_numpy_and_scipy_in_every_replicate(counts, q, fraction, seed):
    cohort = cohort_of(counts)
    rows = torch.as_tensor(np.random.default_rng(seed).standard_normal((4 * len(counts), 3)))
    quantile, median, trimmed = cohort.quantile(rows, q), cohort.median(rows), cohort.trimmed_mean(rows, fraction)
    spread, apart = (
        cohort.map_replicates(lambda replicate_rows: replicate_rows.amax(0) - replicate_rows.amin(0), rows),
        cohort.pairwise_distances(rows),
    )
    for replicate, own in enumerate(parts(rows, counts)):
        if not len(own):
            assert not quantile[replicate].any()
            assert not spread[replicate].any()
            assert not len(apart[replicate])
            continue
        close = {"rtol": 1e-9, "atol": 1e-7}
        np.testing.assert_allclose(quantile[replicate], np.quantile(own, q, axis=0), **close)
        np.testing.assert_allclose(median[replicate], np.median(own, axis=0), **close)
        np.testing.assert_allclose(trimmed[replicate], scipy.stats.trim_mean(own, fraction), **close)
        np.testing.assert_allclose(spread[replicate], np.ptp(own, axis=0), **close)
        np.testing.assert_allclose(apart[replicate], cdist(own, own), **close)


def test_a_mean_by_each_is_the_cohorts_mean():
    cohort = cohort_of([[1, 0, 2, 1], [0, 0, 0, 0], [0, 3, 0, 0]])
    rows = torch.arange(24.0, dtype=torch.float64).reshape(12, 2).sin()
    torch.testing.assert_close(
        cohort.map_replicates(lambda replicate_rows: replicate_rows.mean(0), rows), cohort.mean(rows)
    )


def test_several_arguments_meet_row_by_row_and_a_round_without_anybody_has_the_same_shape():
    rows, weight = torch.arange(8.0), torch.tensor([1.0, 2.0, 3.0, 4.0] * 2)

    def both(own, weights):
        return torch.stack([own @ weights, weights.sum()])

    found = cohort_of([[0, 1, 1, 0], [0, 0, 0, 0]]).map_replicates(both, rows, weight)
    assert found.tolist() == [[1 * 2 + 2 * 3, 5], [0, 0]]
    assert cohort_of([[0] * 4, [0] * 4]).map_replicates(both, rows, weight).tolist() == [[0, 0], [0, 0]]


def test_a_value_of_another_shape_in_every_replicate_is_refused():
    with pytest.raises(ValueError, match=r"must be a tensor of one shape, and not \[1\]"):
        cohort_of([[1, 1, 0, 0], [1, 0, 0, 0]]).map_replicates(lambda replicate_rows: replicate_rows, torch.zeros(8))
    with pytest.raises(ValueError, match="one shape, and not float"):
        cohort_of([[1, 1, 0, 0]]).map_replicates(
            lambda replicate_rows: 1.0 if len(replicate_rows) > 1 else replicate_rows, torch.zeros(4)
        )


@pytest.mark.parametrize(("call", "wrong"), [("quantile", 1.1), ("quantile", float("nan")), ("trimmed_mean", 0.5)])
def test_impossible_fractions_are_refused(call, wrong):
    with pytest.raises(ValueError, match=f"={wrong}"):
        getattr(cohort_of([[1] * 4]), call)(torch.zeros(4, 1), wrong)
