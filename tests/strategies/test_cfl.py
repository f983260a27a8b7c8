"""CFL against its formula with the best of all bipartitions, and two populations that it tells apart in time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from library import Naive, points, script, with_
from naive_strategies import BY_DATA, CLIENTS, SEEDS, UNIFORM
from numpy.linalg import norm

from fedsim import EvaluationOptions, load
from fedsim.core import ConfigError
from fedsim.local import SGD
from fedsim.strategies import CFL, FedAvg

NEVER = -1


class NaiveCFL(Naive):
    eta, weights, eps_1, eps_2, gamma, first, k = 1.0, UNIFORM, 10.0, 0.0, 0.0, 0, 3

    def begin(self):
        self.clusters, self.choice = [self.model.copy() for _ in range(self.k)], [NEVER] * CLIENTS
        self.updates, self.splits = self.rows(), []

    def round(self, t, active):
        for i in active:
            self.updates[i] = self.learner.innovation(i, self.clusters[max(self.choice[i], 0)], t)
            self.choice[i] = max(self.choice[i], 0)
        if active and NEVER not in self.choice and t >= self.first:
            for c in sorted(set(self.choice)):
                self.split(t, c)
        for c in set(self.choice) - {NEVER}:
            group = {i: self.updates[i] for i in active if self.choice[i] == c}
            if group:
                self.clusters[c] = self.clusters[c] - self.eta * self.over(group, self.weights)
        sizes = [sum(max(choice, 0) == c for choice in self.choice) for c in range(self.k)]
        self.model = self.clusters[sizes.index(max(sizes))]

    def split(self, t, c):
        group = [i for i in range(CLIENTS) if self.choice[i] == c]
        new = max(self.choice) + 1
        mean = self.over({i: self.updates[i] for i in group}, self.weights)
        largest = max(norm(self.updates[i]) for i in group)
        if new == self.k or len(group) < 2 or norm(mean) >= self.eps_1 or largest <= self.eps_2:
            return
        cosine = {
            (i, j): self.updates[i] @ self.updates[j] / norm(self.updates[i]) / norm(self.updates[j])
            for i, j in itertools.product(group, group)
        }
        halves = [half for size in range(1, len(group)) for half in itertools.combinations(group[1:], size)]
        across = [max(cosine[i, j] for i in half for j in group if j not in half) for half in halves]
        if np.sqrt((1 - min(across)) / 2) > self.gamma:
            self.clusters[new] = self.clusters[c].copy()
            for i in halves[across.index(min(across))]:
                self.choice[i] = new
            self.splits.append((t, c))


CASES = {
    "whenever possible": (CFL(10.0, 0.0, 3, 0), NaiveCFL, [1, 2]),
    "by data, later": (
        CFL(10.0, 0.0, 4, 4, 0.05, server_lr=0.7, weighting="data"),
        with_(NaiveCFL, eta=0.7, weights=BY_DATA, first=4, gamma=0.05, k=4), [1, 1],
    ),
    "near a stationary point": (CFL(0.25, 0.3, 3, 0), with_(NaiveCFL, eps_1=0.25, eps_2=0.3), [0, 2]),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_every_round_follows_the_formula(name, follows):
    strategy, naive, splits = CASES[name]
    found = follows(strategy, naive)
    assert sorted(len(one.splits) for one in found) == splits


@pytest.mark.slow
def test_one_cluster_is_fedavg(models):
    one = CFL(10.0, 0.0, max_clusters=1, start_round=0, server_lr=0.7, weighting="data")
    torch.testing.assert_close(models(one), models(FedAvg(server_lr=0.7, weighting="data")), rtol=0, atol=1e-13)


STEPS = SGD(lr=0.1, steps=2)
SHARE = 1 - 0.9**2  # of its distance to a client's optimum that a model moves in a round
OPPOSITE = [-1.0, 1.2, -1.1, 0.9]


@pytest.mark.slow
def test_two_populations_are_split_at_the_stationary_point_and_not_before(play):
    """F_i = ½ (x − u_i)² with all u_i far from x⁰: G_i = SHARE (x − u_i), and x − ū shrinks by 1 − SHARE a round. All
    updates point alike at first; the clusters are split in the first round in which the mean is below ε₁."""
    optima = np.array(OPPOSITE) - 5.0
    wanted = next(t for t in range(100) if SHARE * (1 - SHARE) ** t * abs(optima.mean()) < 0.05)
    assert wanted > 5
    simulation = points(CFL(0.05, 0.1, 2, 0), optima, STEPS, rounds=wanted + 40)
    for played in play(simulation):
        apart = played.after.choice.tolist() == [0, 1, 0, 1]
        assert apart == (played.t >= wanted)
        assert played.after.choice.max() == int(apart)
    ends = played.after.clusters[0, :, 0]
    torch.testing.assert_close(ends, torch.tensor([-6.05, -3.95]).double(), rtol=0, atol=1e-3)
    middle = simulation.strategy.client_mean(played.after, simulation.federation)
    torch.testing.assert_close(middle[0, 0], ends.mean(), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_clients_with_one_optimum_are_not_split():
    """ε₂ is a bound on updates, which all vanish."""
    state = points(CFL(0.05, 0.1, 4, 0), [-5.0] * 4, STEPS, rounds=60).run().state
    assert state.choice.tolist() == [0] * 4


@pytest.mark.slow
def test_a_lone_client_is_trained(play):
    *_, last = play(points(CFL(10.0, 0.0, 4, 0), [-5.0], STEPS, rounds=60))
    torch.testing.assert_close(last.after.model[0, 0], torch.tensor(-5.0).double(), rtol=0, atol=1e-4)
    assert last.after.choice.tolist() == [0]


@pytest.mark.slow
def test_complete_linkage_may_choose_worse_halves():
    """Merging by the least similar pair is no search for the least maximum."""
    strategy = CFL(linkage="complete")
    directions = torch.deg2rad(torch.tensor([0.0, 40.0, 80.0, 125.0, 300.0]).double())
    updates = 0.3 * torch.stack([directions.cos(), directions.sin()], 1)
    strategy.eps_1, strategy.eps_2 = 10.0, 0.0
    across = {}
    for linkage in ("single", "complete"):
        strategy.linkage = linkage
        leaving = strategy.split_off_mask(updates, torch.ones(5).double())
        cosine = (updates @ updates.T) / 0.09
        across[linkage] = float(cosine[leaving][:, ~leaving].max())
    assert across["single"] == pytest.approx(np.cos(np.deg2rad(60)))
    assert across["complete"] > across["single"] + 0.1


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_and_replicates_stay_apart(federated, play, tmp_path):
    def simulation(rounds: int, seeds=SEEDS):
        counts = np.concatenate([script(), script()])[:rounds]
        return federated(CFL(10.0, 0.0, 3, 2), counts=counts, seeds=seeds, evaluation=EvaluationOptions(every=100))

    *_, whole = play(simulation(10))
    assert whole.after.choice.max() == 2
    *_, alone = play(simulation(10, seeds=SEEDS[1:]))
    assert torch.equal(alone.after.choice, whole.after.choice.unflatten(0, (2, -1))[1])
    torch.testing.assert_close(alone.after.clusters[0], whole.after.clusters[1], rtol=0, atol=1e-12)
    simulation(7).run(tmp_path)
    resumed = simulation(10).run(tmp_path, resume=True).state
    for name in ("model", "clusters", "choice", "updates"):
        assert torch.equal(getattr(resumed, name), getattr(whole.after, name))
    choice = int(whole.after.choice[CLIENTS + 1])
    theta = load(tmp_path).client_model(1, replicate=1)
    assert torch.equal(torch.cat([value.flatten() for value in theta.values()]), whole.after.clusters[1, choice])


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"eps_1": 0.0}, "eps_1=0"), ({"max_clusters": 0}, "max_clusters=0"), ({"linkage": "ward"}, "linkage=")],
)
def test_what_makes_no_sense_is_refused_by_name(settings, said):
    with pytest.raises(ConfigError, match=said):
        CFL(**settings)


@pytest.mark.parametrize(
    ("updates", "split"),
    [
        ([[0.3] * 4, [-0.3] * 4], True),  # of length 0.6
        ([[0.3], [-0.3], [0.3], [-0.3]], False),
    ],
)
def test_a_cluster_is_split_where_the_update_of_one_client_is_longer_than_eps_2(
    updates: list[list[float]], split: bool
) -> None:
    rows = torch.tensor(updates, dtype=torch.float64)
    leaving = CFL(0.1, 0.5).split_off_mask(rows, torch.ones(len(rows), dtype=torch.float64))
    assert leaving.any().item() == split
