"""Friedman's test of algorithms' ranks on many problems, and Nemenyi's critical difference (Demšar, JMLR 2006).

The problems are assumed to be independent; cells of one data set are not, and for them the results are descriptive.

>>> round(critical_difference(4, 14), 2)
1.25
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class FriedmanTest:
    """The result of Friedman's test.

    Attributes:
        mean_ranks: [k] mean rank of each algorithm, 1 is best; ties share their mean rank.
        chi_square: Friedman's statistic, corrected for ties, with k − 1 degrees of freedom.
        f_statistic: Iman and Davenport's statistic, k − 1 and (k − 1)(N − 1) degrees of freedom; infinite if all
            problems agree.
        p_value: p-value of f under the hypothesis of equal algorithms.
        num_problems: the number of problems N.
    """

    mean_ranks: np.ndarray
    chi_square: float
    f_statistic: float
    p_value: float
    num_problems: int


def rank_scores(scores: np.ndarray, higher_is_better: bool = True) -> np.ndarray:
    """Return the ranks [N, k] of scores [N, k] within each problem, 1 is best; ties share their mean rank.

    Args:
        scores: scores without NaN; a failure has an infinitely bad score.
        higher_is_better: whether larger scores are better.
    """
    return np.asarray(stats.rankdata(-scores if higher_is_better else scores, axis=1))


def friedman_test(ranks: np.ndarray) -> FriedmanTest:
    """Return Friedman's test of ranks [N, k], k ≥ 2 and N ≥ 2.

    Σ_j (R_j − N(k+1)/2)² · (k − 1) / Σ (r_ij − (k+1)/2)², which is 12N/(k(k+1)) (Σ R̄_j² − k(k+1)²/4) without ties.
    """
    problems, k = ranks.shape
    mean_rank = (k + 1) / 2
    spread = float(((ranks - mean_rank) ** 2).sum())
    if spread == 0:  # every problem calls all of them equal
        return FriedmanTest(ranks.mean(0), 0.0, 0.0, 1.0, problems)
    chi_square = (k - 1) * float(((ranks.sum(0) - problems * mean_rank) ** 2).sum()) / spread
    residual = problems * (k - 1) - chi_square
    f = (problems - 1) * chi_square / residual if residual > 1e-9 * chi_square else math.inf
    p = 0.0 if math.isinf(f) else float(stats.f.sf(f, k - 1, (k - 1) * (problems - 1)))
    return FriedmanTest(ranks.mean(0), chi_square, f, p, problems)


def critical_difference(k: int, problems: int, alpha: float = 0.05) -> float:
    """Return Nemenyi's critical difference of mean ranks of k algorithms at level α, q_α √(k(k+1)/(6N))."""
    q = float(stats.studentized_range.ppf(1 - alpha, k, np.inf)) / math.sqrt(2)
    return q * math.sqrt(k * (k + 1) / (6 * problems))


def indistinguishable_groups(ranks: np.ndarray, difference: float) -> list[tuple[int, int]]:
    """Return (first, last) of the maximal groups of two or more ascending mean ranks that span at most `difference`."""
    groups: list[tuple[int, int]] = []
    for first_index in range(len(ranks)):
        last_index = int(np.searchsorted(ranks, ranks[first_index] + difference, side="right")) - 1
        if last_index > first_index and not (groups and groups[-1][1] >= last_index):
            groups.append((first_index, last_index))
    return groups
