"""What the papers prove, and what algebra gives for free: identities, closed-form biases, limits."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedsim import Execution, Simulation
from fedsim.availability import Bernoulli, Full, Groups
from fedsim.core import Cohort, Federation, Report
from fedsim.data.datasets import Dataset, Quadratics
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.strategies import FedAvg, FedAvgAll, FedAvgKnown, FedAWE, FedPBC

ALL = {
    "fedavg": FedAvg(),
    "fedavg by data": FedAvg(weighting="data", server_lr=0.7),
    "fedavg_all": FedAvgAll(),
    "fedavg_known": FedAvgKnown(),
    "fedpbc": FedPBC(),
    "fedpbc active": FedPBC(compute="active"),
    "fedawe": FedAWE(),
}

few = settings(max_examples=25, deadline=None)


def federation_of(replicates: int, clients: int) -> Federation:
    sizes = np.tile(np.arange(1, clients + 1), replicates)
    return Federation(tuple(range(replicates)), clients, sizes, dtype=torch.float64)


def report_of(cohort: Cohort, start: torch.Tensor, innovation: torch.Tensor) -> Report:
    nothing = torch.zeros(len(cohort), dtype=start.dtype)
    return Report(cohort, start, {"params": start - innovation}, nothing, nothing, nothing, 0)


def presence(rounds: st.SearchStrategy[int], replicates: int = 2, clients: int = 4) -> st.SearchStrategy[np.ndarray]:
    return rounds.flatmap(lambda n: arrays(np.int8, (n, replicates, clients), elements=st.integers(0, 1)))


@few
@given(counts=presence(st.integers(1, 8)))
def test_the_echoes_of_a_client_add_up_to_the_round_it_is_in(counts):
    """If i ∈ A^{R−1}, then Σ_{t<R} 1{i ∈ A^t} (t − τ_i(t)) = R, for every R at once."""
    rounds, replicates, clients = counts.shape
    federation, strategy = federation_of(replicates, clients), FedAWE()
    state = strategy.initial(torch.zeros(replicates, 1, dtype=torch.float64), federation)
    echoes = np.zeros(replicates * clients)
    for t in range(rounds):
        cohort = federation.make_cohort(counts[t], np.ones((replicates, clients)))
        start = strategy.start(state, cohort)
        before = state.last_seen.numpy().copy()
        state = strategy.aggregate(state, report_of(cohort, start, torch.zeros_like(start)), t)
        active = counts[t].reshape(-1) > 0
        echoes += active * (t - before)
        np.testing.assert_array_equal(echoes[active], t + 1)


@pytest.mark.slow
@few
@given(counts=presence(st.integers(1, 8)), server_lr=st.sampled_from([1.0, 0.3]))
def test_with_equal_linear_clients_nobody_seems_to_have_been_away(counts, server_lr, play, Scripted):
    """With F_i(x) = gᵀx every innovation is the same, and echoing makes x^{t+1} = x^0 − η_g s η (t + 1) g after any
    round in which somebody took part: Proposition 1 as the server sees it."""
    rounds, replicates, clients = counts.shape
    slope = torch.tensor([1.0, -2.0], dtype=torch.float64)
    dataset = Dataset("linear", slope.repeat(clients, 1), owners=torch.arange(clients))
    simulation = Simulation(
        dataset,
        Mean,
        clients=clients,
        availability=Scripted(counts),
        strategy=FedAWE(server_lr=server_lr),
        local=SGD(lr=0.1, steps=3),
        loss=lambda output, batch: (output * batch["x"]).sum(1),
        seeds=range(replicates),
        execution=Execution(dtype="float64"),
    )
    for played in play(simulation, rounds):
        for r in np.flatnonzero(counts[played.t].any(1)):
            expected = -server_lr * 3 * 0.1 * (played.t + 1) * slope
            torch.testing.assert_close(played.after.model[r], expected, rtol=0, atol=1e-12)


@few
@given(mask=arrays(np.int8, st.tuples(st.integers(1, 3), st.integers(1, 6)), elements=st.integers(0, 1)))
@pytest.mark.parametrize("name", ["fedpbc", "fedpbc active", "fedawe"])
def test_without_innovation_the_client_models_are_multiplied_by_the_mixing_matrix(name, mask):
    """W_ij = 1/|A| for i, j ∈ A, 1 on the diagonal of the absent; starting from the identity, the models become W."""
    strategy, (replicates, clients) = ALL[name], mask.shape
    federation = federation_of(replicates, clients)
    state = strategy.initial(torch.zeros(replicates, clients, dtype=torch.float64), federation)
    state.models.copy_(torch.eye(clients, dtype=torch.float64).repeat(replicates, 1))
    cohort = strategy.cohort(state, federation.make_cohort(mask, np.full(mask.shape, 0.5)))
    start = strategy.start(state, cohort)
    after = strategy.aggregate(state, report_of(cohort, start, torch.zeros_like(start)), 0)
    for mixing, active in zip(after.models.reshape(replicates, clients, clients), mask > 0, strict=True):
        expected = np.where(np.outer(active, active), 1 / max(active.sum(), 1), np.diag(~active))
        np.testing.assert_allclose(mixing, expected, atol=1e-14)
        np.testing.assert_allclose(mixing.sum(0), 1, atol=1e-14)
        np.testing.assert_allclose(mixing.sum(1), 1, atol=1e-14)


P, U = (0.9, 0.3), (0.0, 1.0)
STEPS = 2
HEARD = 1 - (1 - P[0]) * (1 - P[1])


def two_clients(strategy, lr: float, replicates: int = 32) -> Simulation:
    return Simulation(
        Quadratics(clients=2, points=list(U)),
        Mean,
        clients=2,
        availability=Bernoulli(Groups(*P)),
        strategy=strategy,
        local=SGD(lr=lr, steps=STEPS),
        seeds=range(replicates),
        execution=Execution(dtype="float64"),
    )


def long_run(
    simulation: Simulation, play, rounds: int, burn_in: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(mean, standard error) of the server's model and of the clients' mean, averaged over the rounds after burn-in;
    the error comes from the spread over independent replicates."""
    server, clients = [], []
    for played in play(simulation, rounds):
        if played.t >= burn_in:
            server.append(played.after.model[:, 0].numpy())
            clients.append(simulation.strategy.client_mean(played.after, simulation.federation)[:, 0].numpy())

    averages = [np.mean(values, axis=0) for values in (server, clients)]
    return [(a.mean(), a.std(ddof=1) / len(a) ** 0.5) for a in averages]


@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.05, 0.3])
def test_fedavg_is_biased_exactly_as_proposition_1_of_fedpbc_says(lr, play):
    """x^∞ = [p₁u₁(1 − p₂/2) + p₂u₂(1 − p₁/2)] / (1 − (1−p₁)(1−p₂)), whatever the learning rate."""
    (p1, p2), (u1, u2) = P, U
    limit = (p1 * u1 * (1 - p2 / 2) + p2 * u2 * (1 - p1 / 2)) / HEARD
    (server, error), _ = long_run(two_clients(FedAvg(), lr), play, rounds=200, burn_in=80)
    assert error < 0.01
    assert abs(server - limit) < 5 * error
    assert abs(server - sum(U) / 2) > 20 * error  # the bias is there to be seen


@pytest.mark.slow
def test_fedpbc_reaches_the_unweighted_optimum(play):
    """Gossip keeps the clients' mean, so on quadratics it contracts to ū at the rate (1−η)^s, whoever is there.

    The server hears whoever is linked. With a = 1 − (1−η)^s the gap D of the two models before mixing has
    E D = aΔ / (1 − (1−a)(1−p₁p₂)), Δ = u₁ − u₂, so that E x^t = ū + (P{A={1}} − P{A={2}}) E D / (2 P{A≠∅}): O(η).
    """
    lr = 0.02
    (p1, p2), (u1, u2) = P, U
    simulation = two_clients(FedPBC(), lr, replicates=64)
    kept = (1 - lr) ** STEPS
    for played in play(simulation, 30):
        mean = simulation.strategy.client_mean(played.after, simulation.federation)
        expected = (u1 + u2) / 2 * (1 - kept ** (played.t + 1))
        np.testing.assert_allclose(mean, np.full_like(mean, expected), atol=1e-12)
    gap = (1 - kept) * (u1 - u2) / (1 - kept * (1 - p1 * p2))
    limit = (u1 + u2) / 2 + (p1 * (1 - p2) - p2 * (1 - p1)) * gap / (2 * HEARD)
    (server, error), _ = long_run(simulation, play, rounds=250, burn_in=170)
    assert abs(limit - 0.5) < 0.05
    assert error < 0.002
    assert abs(server - limit) < 5 * error


@pytest.mark.slow
def test_fedawe_reaches_the_unweighted_optimum(play):
    """In expectation up to the learning rate: the server's model within O(η), the clients' mean within O(η²)."""
    lr = 0.02
    a = 1 - (1 - lr) ** STEPS
    (server, error), (clients, clients_error) = long_run(two_clients(FedAWE(), lr), play, rounds=300, burn_in=200)
    assert error < 0.003
    assert abs(server - 0.5) < 5 * error + a
    assert abs(clients - 0.5) < 5 * clients_error + a**2


@pytest.mark.slow
def test_with_the_active_alone_computing_fedpbc_stays_biased(play):
    """The paper's Fig. 2b: the frequently linked client pulls the mean to itself."""
    _, (clients, error) = long_run(two_clients(FedPBC(compute="active"), 0.02), play, rounds=250, burn_in=120)
    assert clients < 0.5 - 20 * error


def minibatches(regression_of, Regression, strategy, **options) -> Simulation:
    return Simulation(
        regression_of((6, 3, 9, 4)),
        Regression,
        clients=4,
        strategy=strategy,
        local=SGD(lr=0.05, steps=4, batch_size=3),
        seeds=(1, 8),
        execution=Execution(dtype="float64"),
        **options,
    )


@pytest.mark.parametrize(
    "strategy",
    [FedPBC(), FedPBC(compute="active"), FedAWE(), FedAvgAll(), FedAvgKnown()],
    ids=["fedpbc", "fedpbc active", "fedawe", "fedavg_all", "fedavg_known"],
)
def test_when_everybody_is_there_every_strategy_is_fedavg(strategy, play, Regression, regression_of):
    runs = [play(minibatches(regression_of, Regression, s, availability=Full()), 6) for s in (FedAvg(), strategy)]
    for plain, other in zip(*runs, strict=True):
        torch.testing.assert_close(other.after.model, plain.after.model, rtol=0, atol=1e-12)


@few
@given(
    p=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=5),
    server_lr=st.floats(0.1, 2.0),
    weighting=st.sampled_from(["uniform", "data"]),
)
def test_known_probabilities_make_the_expected_step_that_of_full_participation(p, server_lr, weighting):
    """E x^{t+1} summed over all 2^m outcomes (one replicate each): exact, no sampling. `fedavg_all` shrinks by p_i."""
    m = len(p)
    outcomes = np.array(list(itertools.product((0, 1), repeat=m)), dtype=np.int8)
    chance = torch.as_tensor(np.where(outcomes, p, 1 - np.array(p)).prod(1))
    federation = federation_of(len(outcomes), m)
    cohort = federation.make_cohort(outcomes, np.broadcast_to(p, outcomes.shape))
    x, innovations = torch.tensor([1.0, -3.0], dtype=torch.float64), torch.arange(2.0 * m, dtype=torch.float64)
    innovations = innovations.reshape(m, 2).cos()
    weights = torch.arange(1.0, m + 1, dtype=torch.float64)
    weights = weights / weights.sum() if weighting == "data" else torch.full((m,), 1 / m, dtype=torch.float64)
    expected = {FedAvgKnown: weights, FedAvgAll: weights * torch.tensor(p, dtype=torch.float64)}
    for kind, factors in expected.items():
        strategy = kind(server_lr=server_lr, weighting=weighting)
        state = strategy.initial(x.repeat(len(outcomes), 1), federation)
        after = strategy.aggregate(
            state, report_of(cohort, x.repeat(len(cohort), 1), innovations[cohort.client_index]), 0
        )
        torch.testing.assert_close(chance @ after.model, x - server_lr * factors @ innovations, rtol=0, atol=1e-11)


@pytest.mark.parametrize("empty", [(0, 1), (0,)], ids=["for all", "for one replicate"])
@pytest.mark.parametrize("name", ALL)
def test_an_empty_round_changes_nothing(name, empty, play, Scripted, Regression, regression_of):
    """Bit for bit, in every tensor of the state, between two rounds that do change it."""
    counts = np.ones((3, 2, 4), dtype=np.int8)
    counts[1, list(empty)] = 0
    simulation = minibatches(regression_of, Regression, ALL[name], availability=Scripted(counts, 0.5), rounds=3)
    _, second, third = play(simulation)
    for field in dataclasses.fields(second.before):
        before, after = (getattr(s, field.name).unflatten(0, (2, -1)) for s in (second.before, second.after))
        for r in range(2):
            if name == "fedpbc" and field.name == "models" and r in empty:
                # Algorithm 2 lets every client go on without a link: its own model is its own local training
                ends = second.report.end.unflatten(0, (2, -1))
                assert torch.equal(after[r], ends[r])
                assert not torch.equal(after[r], before[r])
            else:
                assert torch.equal(after[r], before[r]) == (r in empty), (field.name, r)
    assert torch.isfinite(third.after.model).all()
    assert not torch.equal(third.after.model, third.before.model)


@pytest.mark.parametrize("name", ALL)
def test_the_silence_of_one_replicate_is_not_heard_by_the_other(name, play, Scripted, Regression, regression_of):
    """The second replicate ends the same whether the first is there or not."""
    counts = np.ones((3, 2, 4), dtype=np.int8)
    counts[:, 1] = [[1, 0, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0]]
    absent = copy.deepcopy(counts)
    absent[:, 0] = 0
    ends = []
    for script in (counts, absent):
        simulation = minibatches(regression_of, Regression, ALL[name], availability=Scripted(script, 0.5))
        *_, last = play(simulation, 3)
        ends.append(last.after.model[1])
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)
