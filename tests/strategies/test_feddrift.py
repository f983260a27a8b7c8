"""FedDrift: each round against its formula, and populations that it separates when they drift apart."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from library import Naive, everybody, with_
from naive_strategies import BY_DATA, CLIENTS, UNIFORM, script

from fedsim import Execution, Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset, GaussianMean
from fedsim.data.drift import Replay
from fedsim.data.partition import Natural
from fedsim.evaluation.personal import Personal
from fedsim.local import SGD
from fedsim.models import Linear, Mean
from fedsim.strategies import IFCA, FedAvg, FedDrift

NEVER = EMPTY = -1


class NaiveFedDrift(Naive):
    """Clients and clusters one by one; merges by searching the closest pair of groups again and again."""

    delta, k, wait, eta, weights = 0.01, 4, 1, 1.0, UNIFORM

    def begin(self):
        self.clusters, self.isolation = [self.model.copy() for _ in range(self.k)], [0] + [EMPTY] * (self.k - 1)
        self.choice, self.loss, self.foundings, self.merges, self.refused = [NEVER] * CLIENTS, [0.0] * CLIENTS, 0, 0, 0

    def round(self, t, active):
        if not active:
            return
        losses = {i: [self.learner.loss(i, x) for x in self.clusters] for i in active}
        isolated = {i for i in active if self.choice[i] != NEVER and self.isolation[self.choice[i]] > 0}
        best = {i: min((j for j in range(self.k) if not self.isolation[j]), key=losses[i].__getitem__) for i in active}
        best |= {i: self.choice[i] for i in isolated}
        known = [i for i in active if self.choice[i] != NEVER and i not in isolated]
        drifted = [i for i in known if losses[i][best[i]] > self.loss[i] + self.delta]
        for i in active:
            self.choice[i], self.loss[i] = best[i], losses[i][best[i]]
        free = sorted((j for j in range(self.k) if j not in self.choice), key=self.isolation.__getitem__)
        starts = list(self.clusters)
        founders = drifted[: len(free)]
        for i, place in zip(founders, free, strict=False):
            starts[place], self.isolation[place], self.choice[i] = self.clusters[best[i]], self.wait, place
        self.foundings, self.refused = self.foundings + len(founders), self.refused + len(drifted) - len(founders)
        groups = {}
        for i in active:
            groups.setdefault(self.choice[i], []).append(i)
        compared = {}
        for i in set(active) - isolated - set(founders):
            compared.setdefault(self.choice[i], []).append(i)
        for j, group in groups.items():
            innovations = {i: self.learner.innovation(i, self.clusters[best[i]], t) for i in group}
            starts[j] = starts[j] - self.eta * self.over(innovations, self.weights)
            self.isolation[j] = max(self.isolation[j] - 1, 0)
        self.clusters = starts
        self.merge(losses, compared)
        sizes = [self.choice.count(j) for j in range(self.k)]
        self.model = self.clusters[sizes.index(max(sizes))]

    def merge(self, losses, compared):
        def mean_loss(j, group):
            return self.over({i: losses[i][j] for i in compared[group]}, self.weights)

        distance = {
            (j, other): max(mean_loss(j, other) - mean_loss(j, j), mean_loss(other, j) - mean_loss(other, other), 0)
            for j, other in itertools.permutations(compared, 2)
        }
        parts = [[j] for j in sorted(compared)]
        while len(parts) > 1:
            apart = {
                (a, b): max(distance[pair] for pair in itertools.product(parts[a], parts[b]))
                for a, b in itertools.combinations(range(len(parts)), 2)
            }
            a, b = min(apart, key=apart.__getitem__)
            if apart[a, b] >= self.delta:
                break
            parts[a] += parts.pop(b)
        for part in parts:
            sizes = {j: self.choice.count(j) for j in part}
            target = min(part)
            if len(part) > 1:
                total = sum(sizes.values())
                self.clusters[target] = sum(size / total * self.clusters[j] for j, size in sizes.items())
            for j in set(part) - {target}:
                self.isolation[j], self.merges = EMPTY, self.merges + 1
            self.choice = [target if j in part else j for j in self.choice]


OFFSETS = np.array([0.0, 0.4, 0.45, -1.5])


class Occupied(FedDrift):
    """Begins with four models that differ, and no isolated ones."""

    def initial(self, model, federation):
        state = super().initial(model, federation)
        clusters = state.clusters + torch.as_tensor(OFFSETS)[:, None]
        return dataclasses.replace(state, clusters=clusters, isolation=torch.zeros_like(state.isolation))


class NaiveOccupied(NaiveFedDrift):
    k = len(OFFSETS)

    def begin(self):
        super().begin()
        self.clusters, self.isolation = [self.model + offset for offset in OFFSETS], [0] * self.k


TWICE = np.concatenate([script(), script()])
CASES = {  # with the numbers of clusters that are founded, merged, and not founded for want of a place
    "founded": (FedDrift(0.01, 4, 1), NaiveFedDrift, TWICE, (3, 0, 0)),
    "isolated": (FedDrift(0.001, 2, 2), with_(NaiveFedDrift, delta=0.001, k=2, wait=2), TWICE, (2, 0, 4)),
    "merged": (Occupied(1.5, 4, 1), with_(NaiveOccupied, delta=1.5), everybody(), (0, 2, 0)),
    "merged by data": (
        Occupied(1.5, 4, 1, 0.7, "data"), with_(NaiveOccupied, delta=1.5, eta=0.7, weights=BY_DATA), TWICE, (0, 3, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_round_follows_the_formula(name, follows):
    strategy, naive, counts, events = CASES[name]
    found = follows(strategy, naive, counts=counts)
    assert tuple(sum(vars(one)[kind] for one in found) for kind in ("foundings", "merges", "refused")) == events


def test_one_cluster_is_fedavg(models):
    one = FedDrift(max_clusters=1, server_lr=0.7, weighting="data")
    torch.testing.assert_close(models(one), models(FedAvg(server_lr=0.7, weighting="data")), rtol=0, atol=1e-13)


def displaced(displacement: float = 1.0, **options) -> Replay:
    """From round 10 on the data of each second of six clients are displaced."""
    rounds, clients = np.repeat([0, 10], 6), np.tile(np.arange(6), 2)
    series = {"round": rounds, "displacement": displacement * (rounds > 0) * (clients % 2), "client": clients}
    return Replay(series, **options)


def drifting_apart(strategy, displacement: float) -> Simulation:
    """Mean estimation around 10."""
    return Simulation(
        GaussianMean(clients=6, variance=0.0), Mean, clients=6, strategy=strategy, drift=displaced(displacement),
        rounds=30, local=SGD(lr=0.3, steps=3, batch_size=64), seeds=(0, 1), execution=Execution(dtype="float64"),
    )  # fmt: skip


def test_two_concepts_have_a_model_each_after_an_abrupt_drift():
    """Each drifted client founds a cluster, and the three are merged when they have learned the same concept."""
    apart = drifting_apart(FedDrift(1.0, 6, 5), 3.0).run().state
    assert apart.choice.tolist() == [0, 1] * 6
    assert (apart.isolation >= 0).sum(1).tolist() == [2, 2]
    torch.testing.assert_close(apart.clusters[:, :2, 0], torch.tensor([[10.0, 13.0]] * 2).double(), rtol=0, atol=0.2)


@pytest.mark.parametrize("strategy", [FedDrift(0.5, 4, 5), IFCA(2, 0.5)])
def test_clients_whose_labels_are_exchanged_are_evaluated_with_the_model_that_fits_their_present_data(strategy):
    draw = np.random.default_rng(3)
    x, owners = draw.standard_normal((90, 2)), np.repeat(np.arange(6), 15)
    data = Dataset("exchanged", torch.as_tensor(x), torch.as_tensor((x[:, 0] > 0).astype(int)), classes=2,
                   owners=torch.as_tensor(owners))  # fmt: skip
    result = Simulation(
        data, Linear, clients=6, partition=Natural(validation=0.2), strategy=strategy, rounds=40, seeds=(1,),
        drift=displaced(moves="targets"), local=SGD(lr=0.5, steps=3, batch_size=None), personal=Personal(over="all"),
    ).run()  # fmt: skip
    assert result.final["personal_validation_accuracy"][0] > 0.8
    assert result.final["global_validation_accuracy"][0] < 0.7


def test_a_small_drift_founds_no_cluster():
    together = drifting_apart(FedDrift(1.0, 6, 5), 0.5).run().state
    assert together.choice.tolist() == [0] * 12


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"delta": 0.0}, "delta=0"), ({"max_clusters": 0}, "max_clusters=0"), ({"isolation": 0}, "isolation=0")],
)
def test_settings_without_meaning_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        FedDrift(**settings)
