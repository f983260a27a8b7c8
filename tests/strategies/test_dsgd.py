"""Mixing without a server: networks, their matrices, DSGD-GD by a naive loop, and what mixing cannot move."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from library import CLIENTS, Naive, with_
from naive_strategies import SEEDS

from fedsim import Execution, Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import GaussianMean
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.shift import Location
from fedsim.strategies import DSGD, FedPBC
from fedsim.strategies.topologies import TOPOLOGIES, CommunicationGraph

LINKS = {  # of four clients
    "ring": {(0, 1), (1, 2), (2, 3), (0, 3)}, "torus": {(0, 1), (2, 3), (0, 2), (1, 3)},
    "star": {(0, 1), (0, 2), (0, 3)}, "complete": {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)},
}  # fmt: skip


class NaiveDSGD(Naive):
    """Weights link by link; who is away keeps its model, and its neighbours what they would have given it."""

    links, mix, degrees = LINKS["ring"], "start", "all"

    def begin(self):
        self.models = [self.model.copy() for _ in range(CLIENTS)]

    def round(self, t, active):
        before = [row.copy() for row in self.models]
        after = list(before)
        for i in active:
            self.model = before[i]
            after[i] = before[i] - self.innovation(i, t)
        mixed = after if self.mix == "end" else before
        links = [pair for pair in self.links if set(pair) <= set(active)]
        count = self.links if self.degrees == "all" else links
        degree = [sum(i in pair for pair in count) for i in range(CLIENTS)]
        for i in active:
            row = mixed[i].copy()
            for pair in links:
                if i in pair:
                    (j,) = set(pair) - {i}
                    row += (mixed[j] - mixed[i]) / (1 + max(degree[i], degree[j]))
            self.models[i] = row if self.mix == "end" else row + after[i] - before[i]
        self.model = np.mean(self.models, 0)


@pytest.mark.parametrize("topology", LINKS)
@pytest.mark.parametrize(("mix", "degrees"), [("start", "all"), ("end", "there")])
def test_every_round_follows_the_formula(topology, mix, degrees, follows):
    naive = with_(NaiveDSGD, links=LINKS[topology], mix=mix, degrees=degrees)
    follows(DSGD(topology, mix=mix, degrees=degrees), naive)


def test_in_a_drawn_network_every_round_follows_the_formula_too(follows):
    network, everyone = CommunicationGraph("erdos_renyi", CLIENTS, 0.6, 1), np.arange(CLIENTS)
    links = {
        (int(i), int(j)) for i, j in zip(*np.nonzero(network.are_neighbours(everyone, everyone)), strict=True) if i < j
    }
    assert links == {(0, 1), (1, 2), (1, 3), (2, 3)}  # none of the others
    follows(DSGD("erdos_renyi", 0.6, seed=1), with_(NaiveDSGD, links=links))


def test_in_a_complete_network_mixing_after_the_steps_is_fedpbc(federated, play):
    runs = [
        [played.after for played in play(federated(strategy))]
        for strategy in (DSGD("complete", mix="end", degrees="there"), FedPBC(compute="active"))
    ]
    for mine, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(mine.models, theirs.models, rtol=0, atol=1e-12)
        torch.testing.assert_close(mine.model, mine.models.unflatten(0, (2, -1)).mean(1), rtol=0, atol=1e-12)


def test_a_replicate_alone_and_memory_on_disk_give_the_same_models(federated, play):
    """Ranks are in tests/core: they gather rows under a lock that threads in their place would share."""
    *_, whole = (played.after.models for played in play(federated(DSGD())))
    *_, alone = (played.after.models for played in play(federated(DSGD(), seeds=SEEDS[1:])))
    torch.testing.assert_close(alone, whole[CLIENTS:], rtol=0, atol=1e-12)
    disk = Execution(dtype="float64", chunk=2, memory="disk")
    *_, placed = (played.after.models for played in play(federated(DSGD(), execution=disk)))
    torch.testing.assert_close(placed, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("clients", [1, 2, 3, 4, 6, 12, 25])
def test_mixing_matrices_are_doubly_stochastic_whoever_is_there(topology, clients):
    if topology == "torus" and clients in (2, 3):
        with pytest.raises(ConfigError, match=rf"topology=torus .* {clients} is no such number"):
            CommunicationGraph(topology, clients)
        return
    network, draw = CommunicationGraph(topology, clients, 0.7), np.random.default_rng(clients)
    everyone = np.arange(clients)
    links = network.are_neighbours(everyone, everyone)
    assert (links == links.T).all()
    assert not links.diagonal().any()
    assert network.is_connected()
    reached = np.linalg.matrix_power(np.eye(clients) + links, clients) > 0
    assert reached.all()
    for share in (0.0, 0.3, 0.7, 1.0):
        there = np.flatnonzero(draw.random(clients) <= share)
        for everybody in (True, False):
            found = network.mixing_matrix(there, everybody)
            assert (found >= 0).all()
            np.testing.assert_allclose(found, found.T)
            np.testing.assert_allclose(found.sum(1), np.ones(len(there)))


def test_networks_have_their_degrees():
    everyone = np.arange(12)
    degrees = {name: CommunicationGraph(name, 12).degrees(everyone) for name in TOPOLOGIES}
    assert set(degrees["ring"]) == {2}
    assert set(degrees["torus"]) == {4}
    assert sorted(degrees["star"]) == [1] * 11 + [11]
    assert set(degrees["complete"]) == {11}
    many = CommunicationGraph("erdos_renyi", 200, 0.3, 1).degrees(np.arange(200)).sum() / 2
    pairs = 200 * 199 / 2
    assert abs(many - 0.3 * pairs) < 5 * (pairs * 0.3 * 0.7) ** 0.5


def game(strategy, epsilons, rule=None, **options) -> Simulation:
    return Simulation(
        GaussianMean(clients=4, means=[1.0, -2.0, 4.0, 3.0], std=0.0), functools.partial(Mean, start=2.0), clients=4,
        local=rule or SGD(lr=0.3, steps=1, batch_size=2), shift=Location(epsilons=epsilons, references="none"),
        strategy=strategy, execution=Execution(dtype="float64"), **options,
    )  # fmt: skip


def test_alike_sensitivities_make_the_mean_the_same_in_every_network(play):
    """θ̄ ← θ̄ − η(θ̄ − m̄ − ε θ̄), though clients' models differ."""
    for topology in ("ring", "star", "complete"):
        theta = 2.0
        for played in play(game(DSGD(topology), [0.4] * 4, rounds=8)):
            theta -= 0.3 * (theta - 1.5 - 0.4 * theta)
            assert played.after.model.item() == pytest.approx(theta, abs=1e-12)
            assert played.after.models.std() > 0.1


def test_one_client_may_answer_more_than_it_is_told(play):
    """ε = 1.2 alone runs away; in a ring of mean sensitivity 0.4 nobody does. At a constant rate the limit solves
    (I − W + η(I − E)) x = η m, by hand, and is everybody's θ^PS = m̄/(1 − ε̄) as η falls."""
    epsilons, means = [1.2, 0.0, 0.6, -0.2], np.array([1.0, -2.0, 4.0, 3.0])
    mixing = np.array([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]) / 3

    def limit(rate: float) -> np.ndarray:
        return np.linalg.solve(np.eye(4) - mixing + rate * np.diag(1 - np.array(epsilons)), rate * means)

    *_, last = play(game(DSGD(), epsilons, SGD(lr=0.3, steps=1, batch_size=1), rounds=300))
    np.testing.assert_allclose(last.after.models[:, 0], limit(0.3), rtol=0, atol=1e-8)
    np.testing.assert_allclose(limit(1e-7), np.full(4, means.mean() / 0.6), rtol=0, atol=1e-5)


def test_networks_that_are_none_are_refused():
    with pytest.raises(ConfigError, match=r"topology='line'"):
        DSGD("line")
    with pytest.raises(ConfigError, match=r"strategy\.probability=0 leaves the graph of the 4 clients disconnected"):
        game(DSGD("erdos_renyi", 0.0), [0.4] * 4).initial_state()
    with pytest.raises(ConfigError, match=r"topology=torus .* 7 is no such number"):
        CommunicationGraph("torus", 7)
