"""FedAMP against its formula, and where it must be local training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from library import Naive, compare, points
from naive_strategies import LRS, SEEDS, script

from fedsim.local import SGD
from fedsim.strategies import FedAMP, LocalOnly


class NaiveFedAMP(Naive):
    alpha, sigma, lam = 0.6, 2.0, 0.3

    def begin(self):
        self.models = [self.model.copy() for _ in self.rows()]

    def round(self, t, active):
        ends = {}
        for i in active:
            own = self.models[i]
            weights = {
                j: self.alpha * np.exp(-np.sum((own - self.models[j]) ** 2) / self.sigma) / self.sigma
                for j in active if j != i
            }  # fmt: skip
            mixture = (1 - sum(weights.values())) * own + sum(w * self.models[j] for j, w in weights.items())
            mu = self.lam / self.alpha
            ends[i] = self.learner.train(i, own, t, correction=mu * (own - mixture), mu=mu)
        for i, end in ends.items():
            self.models[i] = end
        self.model = np.mean(self.models, axis=0)


def test_every_round_follows_the_formula(regression, play):
    compare(regression(FedAMP(0.6, 2.0, 0.3)), NaiveFedAMP, play)


def test_without_the_penalty_it_is_local_training_bit_for_bit(regression, play):
    models = [
        [played.after.models.clone() for played in play(regression(strategy))]
        for strategy in (FedAMP(lam=0.0), LocalOnly())
    ]
    for one, other in zip(*models, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_groups_of_clients_part_where_all_would_meet(play):
    """Two groups of quadratics with optima at 0 and 20: distances within a group are small beside σ, between the groups
    they are not, so each group's models meet near its own mean."""
    simulation = points(FedAMP(0.2, 1.0, 4.0), [-0.5, 0.5, 19.5, 20.5], SGD(lr=0.1, steps=5), rounds=150)
    ends = simulation.run().state.models[:, 0]
    alone = points(LocalOnly(), [-0.5, 0.5, 19.5, 20.5], SGD(lr=0.1, steps=5), rounds=150).run().state.models[:, 0]
    assert float(ends[1] - ends[0]) < 0.9 * float(alone[1] - alone[0])
    torch.testing.assert_close(ends.unflatten(0, (2, 2)).mean(1), torch.tensor([0.0, 20.0]).double(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_replicates_are_the_same_alone_and_together(regression, play):
    together = list(play(regression(FedAMP(0.6, 2.0, 0.3))))
    counts = script()[:, 1:]
    alone = play(regression(FedAMP(0.6, 2.0, 0.3), counts, seeds=SEEDS[1:], rule={"lr": LRS[1]}))
    for one, other in zip(alone, together, strict=True):
        models = other.after.models.unflatten(0, (2, -1))[1].clone()
        torch.testing.assert_close(one.after.model[0], other.after.model[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(one.after.models, models, rtol=0, atol=1e-12)
