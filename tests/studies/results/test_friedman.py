"""Ranks over many problems: Demšar's printed example and table, SciPy's statistic, groups by a naive loop."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedsim.studies.results.friedman import critical_difference, friedman_test, indistinguishable_groups, rank_scores

# Demšar 2006, Table 6: AUC of C4.5, with m, with cf, with both, on 14 data sets; Table 5(a): q_0.05 for k = 2 … 10.
AUC = [
    [0.763, 0.768, 0.771, 0.798], [0.599, 0.591, 0.590, 0.569], [0.954, 0.971, 0.968, 0.967],
    [0.628, 0.661, 0.654, 0.657], [0.882, 0.888, 0.886, 0.898], [0.936, 0.931, 0.916, 0.931],
    [0.661, 0.668, 0.609, 0.685], [0.583, 0.583, 0.563, 0.625], [0.775, 0.838, 0.866, 0.875],
    [1.000, 1.000, 1.000, 1.000], [0.940, 0.962, 0.965, 0.962], [0.619, 0.666, 0.614, 0.669],
    [0.972, 0.981, 0.9751, 0.975], [0.957, 0.978, 0.946, 0.970],
]  # fmt: skip
Q = [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164]


def test_demsars_example() -> None:
    """Mean ranks 3.143, 2.000, 2.893, 1.964; χ² = 9.28 and F = 3.69 as printed, without the correction for ties."""
    ranks = rank_scores(np.array(AUC))
    found = friedman_test(ranks)
    assert found.mean_ranks == pytest.approx([3.143, 2.000, 2.893, 1.964], abs=1e-3)
    chi_square = 12 * 14 / (4 * 5) * (float((found.mean_ranks**2).sum()) - 4 * 25 / 4)
    assert chi_square == pytest.approx(9.28, abs=5e-3)
    assert 13 * chi_square / (14 * 3 - chi_square) == pytest.approx(3.69, abs=5e-3)
    assert found.chi_square > chi_square  # ties take from the spread that equals would have
    assert found.p_value < 0.05
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=5e-3)


@pytest.mark.parametrize("k", range(2, 11))
def test_critical_values_are_those_of_the_printed_table(k: int) -> None:
    """To the last printed digit, but one of them: they are tables of three digits over √2."""
    assert critical_difference(k, 50) / np.sqrt(k * (k + 1) / 300) == pytest.approx(Q[k - 2], abs=1e-3)


@given(st.integers(2, 9), st.integers(3, 6), st.integers(0, 10_000), st.booleans())
def test_scipys_statistic_with_and_without_ties(problems: int, k: int, seed: int, ties: bool) -> None:
    draw = np.random.default_rng(seed)
    scores = draw.integers(0, 3, (problems, k)).astype(float) if ties else draw.standard_normal((problems, k))
    found = friedman_test(rank_scores(scores))
    if (scores == scores[:, :1]).all():
        assert (found.chi_square, found.p_value) == (0.0, 1.0)
        return
    assert found.chi_square == pytest.approx(stats.friedmanchisquare(*scores.T).statistic, abs=1e-9)
    naive = [[1 + sum(b > a for b in row) + (sum(b == a for b in row) - 1) / 2 for a in row] for row in scores]
    np.testing.assert_allclose(rank_scores(scores), naive)
    np.testing.assert_allclose(rank_scores(-scores, higher_is_better=False), naive)


def test_problems_that_agree_leave_no_doubt() -> None:
    assert friedman_test(np.tile([1.0, 2.0, 3.0], (4, 1))).p_value == 0.0


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(0, 20))
def test_groups_are_the_longest_that_fit(values: list[int], difference: int) -> None:
    ranks = np.sort(np.array(values, dtype=float))
    pairs = itertools.combinations(range(len(ranks)), 2)
    fit = [(a, b) for a, b in pairs if ranks[b] - ranks[a] <= difference]
    longest = [(a, b) for a, b in fit if not any((c, d) != (a, b) and c <= a and b <= d for c, d in fit)]
    assert indistinguishable_groups(ranks, difference) == longest


def test_problems_that_call_all_equal_say_nothing() -> None:
    """No statistic, and a disagreement as large is certain."""
    found = friedman_test(rank_scores(np.ones((5, 3))))
    assert found.mean_ranks.tolist() == [2.0, 2.0, 2.0]
    assert (found.chi_square, found.f_statistic, found.p_value, found.num_problems) == (0.0, 0.0, 1.0, 5)
