"""Choosing among the available: the law of a draw, choices replicate by replicate, Oort's shares."""

from __future__ import annotations

import numpy as np
import torch

from fedsim.core import Federation
from fedsim.strategies import Oort
from fedsim.strategies.selection import choose_rows, draw_rows

REPLICATES = 3000


def test_drawing_follows_the_weights_without_replacement():
    """P{first i} = w_i and P{i, then j} = w_i w_j / (1 − w_i), among those who are there; five σ."""
    weights, there = torch.tensor([0.5, 0.3, 0.2, 9.0]), np.tile([1, 1, 1, 0], (REPLICATES, 1))
    federation = Federation(tuple(range(REPLICATES)), 4, np.ones(4 * REPLICATES))
    cohort = federation.make_cohort(there, np.ones(there.shape), t=3)
    w = weights.double().numpy()[:3]
    for k in (1, 2):
        picked = draw_rows(cohort, k, weights[cohort.client_index])
        share = np.bincount(picked.host_index.rows % 4, minlength=4) / REPLICATES
        law = w if k == 1 else w + [sum(w[j] * w[i] / (1 - w[j]) for j in range(3) if j != i) for i in range(3)]
        assert share[3] == 0
        assert (np.abs(share[:3] - law) < 5 * np.sqrt(law * (1 - law) / REPLICATES)).all()
        again = draw_rows(federation.make_cohort(there, np.ones(there.shape), t=3), k, weights[cohort.client_index])
        assert np.array_equal(picked.host_index.rows, again.host_index.rows)


def test_a_choice_sees_each_replicate_alone_and_its_positions_are_rows():
    federation = Federation((4, 5, 6), 3, np.ones(9))
    counts = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1]])
    cohort = federation.make_cohort(counts, np.ones((3, 3)))
    values = torch.tensor([5.0, 1.0, 2.0, 7.0, 3.0])
    seen = []
    picked = choose_rows(cohort, lambda draw, of: seen.append(of.tolist()) or of.argsort()[-1:], values)
    assert seen == [[5.0, 1.0], [2.0, 7.0, 3.0]]
    assert picked.host_index.rows.tolist() == [0, 7]


def test_oort_explores_less_and_less_and_takes_the_useful():
    """Of four known and four new clients, k = 4: ε_t·4 new ones, the others those with the largest utility."""
    federation = Federation((1, 2), 8, np.ones(16))
    strategy = Oort(4, cutoff=1.0, clip=1.0)
    state = strategy.initial(torch.zeros(2, 1), federation)
    state.last_seen[:4] = state.last_seen[8:12] = 2
    state.utility[:4] = torch.tensor([1.0, 9.0, 4.0, 3.0])
    state.utility[8:12] = torch.tensor([5.0, 0.0, 1.0, 7.0])
    everyone = np.ones((2, 8))
    for t, best in ((3, [[1], [3]]), (40, [[1, 2], [0, 3]]), (200, [[1, 2, 3], [0, 2, 3]])):
        rows = strategy.cohort(state, federation.make_cohort(everyone, everyone, t)).host_index.rows
        of = [rows[rows < 8], rows[rows >= 8] - 8]
        share = max(0.9 * 0.98**t, 0.2)
        for own, wanted in zip(of, best, strict=True):
            assert len(own) == 4
            assert (own >= 4).sum() == round(4 * share)
            assert own[own < 4].tolist() == wanted
