"""IFCA, several models on the server: its formula, its limits, and two populations that it tells apart."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from library import Naive, with_
from naive_strategies import BY_DATA, CLIENTS, SEEDS, UNIFORM

from fedsim import EvaluationOptions, Execution, Simulation, load
from fedsim.availability import Bernoulli, Uniform
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Natural
from fedsim.evaluation.personal import Personal
from fedsim.local import SGD
from fedsim.models import Linear, Mean
from fedsim.strategies import IFCA, FedAvg

NEVER = -1


class NaiveIFCA(Naive):
    starts: dict[int, np.ndarray]  # seed → [k, d]
    eta, weights, gradients = 1.0, UNIFORM, False

    def begin(self):
        self.clusters, self.choice = list(self.starts[self.seed]), [NEVER] * CLIENTS
        self.lonely = 0

    def round(self, t, active):
        groups: dict[int, list[int]] = {}
        for i in active:
            losses = [self.learner.loss(i, x) for x in self.clusters]
            self.choice[i] = losses.index(min(losses))
            groups.setdefault(self.choice[i], []).append(i)
        self.lonely += bool(active) and len(groups) < len(self.clusters)
        moved = list(self.clusters)
        for j, group in groups.items():
            mass = sum(self.weights[i] for i in (active if self.gradients else group))
            step = sum(self.weights[i] * self.learner.innovation(i, self.clusters[j], t) for i in group)
            moved[j] = self.clusters[j] - self.eta * step / mass
        self.clusters = moved
        self.members = [self.choice.count(j) for j in range(len(moved))]
        self.model = moved[self.members.index(max(self.members))]


CASES = {
    "ifca": (IFCA(2, 1.5), NaiveIFCA),
    "three, by data": (
        IFCA(3, 1.5, server_lr=0.7, weighting="data"),
        with_(NaiveIFCA, eta=0.7, weights=BY_DATA),
    ),
    "gradients": (IFCA(2, 1.5, "gradients"), with_(NaiveIFCA, gradients=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_round_follows_the_formula(name, follows, federated):
    strategy, naive = CASES[name]
    starts = federated(strategy).initial_state().clusters.numpy()
    found = follows(strategy, with_(naive, starts=dict(zip(SEEDS, starts, strict=True))))
    assert any(len(set(one.choice) - {NEVER}) > 1 for one in found)  # clients differ in what suits them
    assert any(one.lonely for one in found)  # and there are rounds in which somebody's model is nobody's


def test_one_model_is_fedavg_bit_for_bit(models):
    for weighting in ("uniform", "data"):
        one, other = (s(server_lr=0.7, weighting=weighting) for s in (functools.partial(IFCA, 1), FedAvg))
        assert torch.equal(models(one), models(other))
    assert not torch.equal(models(IFCA(2, 1.5)), models(FedAvg()))


def test_gradients_are_averaged_over_all_who_take_part(models):
    """With one model both averages are one; with several, gradient averaging moves a cluster by its share."""
    torch.testing.assert_close(models(IFCA(1, average="gradients")), models(FedAvg()), rtol=0, atol=1e-14)


def test_models_begin_apart_by_seed_and_number():
    def clusters(k: int, seeds: tuple[int, ...]) -> torch.Tensor:
        return populations(IFCA(k, 2.0), seeds=seeds, size=400).initial_state().clusters

    four = clusters(4, (3, 5))
    assert torch.equal(clusters(2, (5,))[0], four[1, :2])  # whatever k, and whoever stands beside it
    noise = four.flatten(0, 1)  # the initial model is zero
    assert noise.std(1).sub(2.0).abs().max() < 5 * 2.0 / np.sqrt(2 * 400)
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 5 / np.sqrt(400)
    assert not clusters(1, (3,)).any()


OFF = (-4.0, -4.1, 3.0, 3.2, -3.9, 3.1)  # the middles of six clients' points: two populations, three clients each


def points(offsets=OFF, size: int = 1) -> Dataset:
    """f_i(x) = ½ mean ‖x − z‖² over 4 + i points of each client."""
    owners = np.repeat(np.arange(len(offsets)), 4 + np.arange(len(offsets)))
    draw = 0.3 * np.random.default_rng(2).standard_normal((len(owners), size))
    x = torch.as_tensor(draw + np.array(offsets)[owners, None])
    return Dataset("populations", x, loss="half_squared_distance", owners=torch.as_tensor(owners))


def populations(strategy, size: int = 1, **options) -> Simulation:
    given = {"local": SGD(lr=0.5, steps=2, batch_size=None), "rounds": 25, "seeds": (0, 2),
             "execution": Execution(dtype="float64"), "evaluation": EvaluationOptions(every=100)}  # fmt: skip
    data = options.pop("data", None) or points(size=size)
    return Simulation(data, Mean, clients=len(OFF), strategy=strategy, **given | options)


def means_of(simulation: Simulation, held: str = "training") -> torch.Tensor:
    """[R, m, d] of every client's points."""
    x = simulation.dataset.train_x
    tables = [t if held == "training" else t.validation for t in simulation.partition_tables]
    parts = [[x[torch.as_tensor(p).long()] for p in np.split(t.order, t.offsets[1:-1])] for t in tables]
    return torch.stack([torch.stack([part.mean(0) for part in one]) for one in parts])


def test_two_populations_are_separated_and_each_model_ends_at_its_groups_mean():
    """Clients' minima are their means; η s steps contract towards them, so a group ends at the mean of its means."""
    simulation = populations(IFCA(2, 1.0))
    state = simulation.run().state
    groups = np.array(OFF) > 0
    for r, means in enumerate(means_of(simulation)):
        choice = state.choice.reshape(2, -1)[r].numpy()
        assert (choice == choice[0]).tolist() == (groups == groups[0]).tolist()
        for j in (0, 1):
            torch.testing.assert_close(state.clusters[r, j], means[choice == j].mean(0), rtol=0, atol=1e-10)
    assert state.members.tolist() == [[3, 3], [3, 3]]
    assert torch.equal(state.model, state.clusters[:, 0])  # of equally many the first
    of_clients = simulation.strategy.client_mean(state, simulation.federation)
    torch.testing.assert_close(of_clients, state.clusters.mean(1))


def test_clients_of_opposite_labels_share_no_model_and_two_serve_them():
    """The same inputs, labels exchanged: one model can be right about half of them, two about all."""
    draw = np.random.default_rng(3)
    x = draw.standard_normal((90, 2))
    owners, y = np.repeat(np.arange(6), 15), (x[:, 0] > 0).astype(int)
    y = np.where(owners < 3, y, 1 - y)
    data = Dataset("opposite", *(torch.as_tensor(part) for part in (x, y)), classes=2, owners=torch.as_tensor(owners))

    def accuracy(strategy, model: str) -> float:
        result = Simulation(
            data, Linear, clients=6, partition=Natural(validation=0.2), strategy=strategy, rounds=30, seeds=(1,),
            local=SGD(lr=0.5, steps=3, batch_size=None), personal=Personal(over="all"),
        ).run()  # fmt: skip
        return result.final[f"{model}_validation_accuracy"][0]

    assert accuracy(IFCA(2, 0.5), "personal") > 0.85
    assert accuracy(FedAvg(), "global") < 0.7


def test_who_never_came_has_the_largest_clusters_model(federated, play):
    simulation = federated(IFCA(2, 1.5))
    *_, last = play(simulation)
    state = last.after
    choice = state.choice.reshape(len(SEEDS), -1)
    expected = [
        torch.stack([one[c] if c >= 0 else model for c in chosen]).mean(0)
        for one, chosen, model in zip(state.clusters, choice, state.model, strict=True)
    ]
    found = simulation.strategy.client_mean(state, simulation.federation)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-12)


def test_own_models_and_newcomers_first_ones_are_chosen_by_training_data(tmp_path):
    """Five train, the sixth joins; every client's personal loss is that of the model nearest to its training mean."""
    personal = Personal(over="all", newcomers=1, newcomer_epochs=1)
    simulation = populations(
        IFCA(2, 1.0), personal=personal, partition=Natural(validation=0.2), availability=Bernoulli(Uniform(0.6))
    )
    result = simulation.run(tmp_path)
    state, z = result.state, simulation.dataset.train_x
    for r, means in enumerate(means_of(simulation)):
        table = simulation.partition_tables[r].validation
        held = [z[torch.as_tensor(p).long()] for p in np.split(table.order, table.offsets[1:-1])]
        own = [state.clusters[r][(state.clusters[r] - mean).abs().sum(1).argmin()] for mean in means]
        losses = [(0.5 * (row - part).square().sum(1)).mean().item() if len(part) else np.nan
                  for row, part in zip(own, held, strict=True)]  # fmt: skip
        assert result.history[r - 2]["personal_validation_loss"] == pytest.approx(np.nanmean(losses[:5]))
        assert result.extra["newcomers"][0]["global_validation_loss"][r] == pytest.approx(losses[5])
        for i in range(5):
            choice = state.choice.reshape(2, -1)[r, i]
            assert torch.equal(load(tmp_path).client_model(i, replicate=r)["theta"], state.clusters[r, choice])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"k": 2, "spread": 0.0}, r"spread=0 makes all models start equal and stay equal"),
        ({"k": 0}, r"k=0"),
        ({"spread": -1.0}, r"spread=-1"),
        ({"average": "both"}, r"average="),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(settings, said):
    with pytest.raises(ConfigError, match=said):
        IFCA(**settings)


def test_the_bytes_of_k_models_go_down_and_of_one_up():
    traffic = populations(IFCA(3)).traffic
    assert (traffic.bytes_down, traffic.bytes_up) == (3 * 8, 8)
