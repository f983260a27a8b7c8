"""What must be true of strategies with memory: limits, identities, means and frequencies over many rounds."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from naive_strategies import (
    CLIENTS,
    SCHEDULES,
    SEEDS,
    Learner,
    script,
)

from fedsim import Execution
from fedsim.availability import Full
from fedsim.core import Federation, Report
from fedsim.strategies import F3AST, MIFA, FedAU, FedAvg, FedOpt, FedProx, FedVARP, PFedAvg, Scaffold


def models_of(simulation, play) -> torch.Tensor:
    """[T, R, d] the models after every round."""
    return torch.stack([played.after.model for played in play(simulation)])


def test_fedprox_without_its_term_is_fedavg_exactly(play, regression):
    assert torch.equal(models_of(regression(FedProx(0.0)), play), models_of(regression(FedAvg()), play))
    assert not torch.equal(models_of(regression(FedProx(0.1)), play), models_of(regression(FedAvg()), play))


def test_with_everybody_there_fedvarp_and_mifa_are_fedavg(play, regression):
    """Then the memory is the round itself."""
    fedavg = models_of(regression(FedAvg(0.8), Full()), play)
    for strategy in (FedVARP(0.8), MIFA(0.8), MIFA(0.8, "gradient"), MIFA(0.8, wait_for_all=True)):
        torch.testing.assert_close(models_of(regression(strategy, Full()), play), fedavg, rtol=0, atol=1e-10)


def test_fedvarp_starts_as_fedavg(play, regression):
    """Nothing is remembered yet, whoever comes."""
    fedvarp, fedavg = (models_of(regression(s), play) for s in (FedVARP(0.8), FedAvg(0.8)))
    torch.testing.assert_close(fedvarp[0], fedavg[0], rtol=0, atol=1e-12)
    assert not torch.allclose(fedvarp[-1], fedavg[-1], atol=1e-3)


def test_scaffold_starts_as_fedavg(play, regression):
    """All control variates are zero."""
    scaffold, fedavg = (models_of(regression(s), play) for s in (Scaffold(0.8), FedAvg(0.8)))
    torch.testing.assert_close(scaffold[0], fedavg[0], rtol=0, atol=1e-12)
    assert not torch.allclose(scaffold[-1], fedavg[-1], atol=1e-3)


def test_scaffold_with_one_step_remembers_the_gradient_where_it_was_taken(play, regression):
    """Option II with s = 1: c_i⁺ = c_i − c + (g − c_i + c) = g."""
    simulation = regression(Scaffold(), rule={"steps": 1})
    learner = Learner(simulation.dataset, 1.0, SCHEDULES["constant"][1])
    for played in play(simulation):
        for row in played.report.cohort.host_index.rows:
            g = learner.innovation(row % CLIENTS, played.before.model[row // CLIENTS].numpy(), 0, steps=1)
            np.testing.assert_allclose(played.after.memory[row], g, atol=1e-10)


@pytest.mark.slow
def test_scaffold_arrives_at_the_common_optimum_where_fedavg_drifts(play, regression, regression_of):
    """Unequal clients, several local steps: SCAFFOLD's fixed point is the minimiser of the mean loss, FedAvg's not."""
    dataset = regression_of((6, 6, 6, 6))
    x, y = dataset.train_x.numpy(), dataset.train_y.numpy()
    optimum = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0]
    found = {}
    for name, strategy in (("scaffold", Scaffold()), ("fedavg", FedAvg())):
        execution = Execution(chunk=8, dtype="float64")
        simulation = regression(strategy, Full(), dataset=dataset, rule={"lr": 0.3, "steps": 3}, execution=execution)
        *_, last = play(simulation, 50)
        found[name] = np.abs(last.after.model.numpy() - optimum).max()
    assert found["scaffold"] < 1e-6 < 1e-2 < found["fedavg"]


@pytest.mark.parametrize("dtype", ["same", "float16", "bfloat16"])
def test_scaffolds_c_is_the_mean_of_the_clients_control_variates(dtype, play, regression):
    """After every round, also in a rounded memory."""
    for played in play(regression(Scaffold(memory_dtype=dtype), schedule="step")):
        state = played.after
        mean = state.memory.double().reshape(len(SEEDS), CLIENTS, -1).mean(1)
        torch.testing.assert_close(state.mean, mean, rtol=0, atol=1e-10)


def reported(federation: Federation, counts: np.ndarray, innovation: np.ndarray, lr: float = 1.0) -> Report:
    """A report in which the heard clients bring the given innovations [R·m, d]."""
    cohort = federation.make_cohort(counts, np.ones_like(counts, dtype=float))
    start = torch.zeros((len(cohort), innovation.shape[1]), dtype=federation.dtype)
    end = start - torch.as_tensor(innovation, dtype=federation.dtype)[cohort.rows]
    rates = torch.full((federation.num_replicates,), lr, dtype=federation.dtype)
    return Report(cohort, start, {"params": end}, start[:, 0], rates, start[:, 0] + lr, np.ones(len(cohort)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("dtype", "stored"), [("same", torch.float64), ("float32", torch.float32), ("float16", torch.float16)]
)
@pytest.mark.parametrize("strategy", [FedVARP, MIFA, functools.partial(MIFA, memory="gradient")])
def test_the_stored_mean_is_the_mean_of_the_memory_after_many_rounds(strategy, dtype, stored):
    """It is kept up to date by differences; a rounded memory has the mean of its rounded rows."""
    clients, draw = 7, np.random.default_rng(0)
    federation = Federation((0, 1, 2), clients, np.ones(3 * clients), dtype=torch.float64)
    made = strategy(memory_dtype=dtype)
    state, last = made.initial(torch.zeros(3, 4, dtype=torch.float64), federation), np.zeros((3 * clients, 4))
    lr = 0.5 if isinstance(strategy, functools.partial) else 1.0
    for t in range(500):
        counts = (draw.random((3, clients)) < 0.4).astype(int) * draw.integers(1, 4)  # a multiset now and then
        innovation = draw.standard_normal((3 * clients, 4))
        state = made.aggregate(state, reported(federation, counts, innovation, lr), t)
        heard = counts.reshape(-1) > 0
        last[heard] = innovation[heard] / lr
    assert state.memory.dtype == stored
    assert state.mean.dtype == torch.float64
    assert torch.equal(state.memory, torch.as_tensor(last).to(stored))
    mean = state.memory.double().reshape(3, clients, 4).mean(1)
    torch.testing.assert_close(state.mean, mean, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_in_single_precision_the_stored_mean_does_not_drift():
    """2,000 differences of float32 rows leave an error of rounding, far below the rows themselves."""
    draw, clients = np.random.default_rng(1), 5
    federation = Federation((0,), clients, np.ones(clients))
    made = FedVARP()
    state = made.initial(torch.zeros(1, 8), federation)
    for t in range(2000):
        counts = (draw.random((1, clients)) < 0.5).astype(int)
        state = made.aggregate(state, reported(federation, counts, draw.standard_normal((clients, 8))), t)
    torch.testing.assert_close(state.mean, state.memory.mean(0, keepdim=True), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "strategy",
    [FedVARP(), Scaffold(), FedOpt("adam"), FedOpt("yogi"), FedOpt("adagrad"), FedProx(), PFedAvg("I"), PFedAvg("II")],
    ids=lambda s: f"{type(s).__name__} {getattr(s, 'optimizer', '')}{getattr(s, 'scheme', '')}".strip(),
)
def test_an_empty_round_leaves_the_state_exactly_as_it_is(strategy, play, regression):
    for played in play(regression(strategy), 3):
        if played.t == 2:
            for field in dataclasses.fields(played.after):
                before, after = (getattr(state, field.name) for state in (played.before, played.after))
                assert torch.equal(before, after), field.name


def test_mifa_steps_in_an_empty_round_as_in_the_one_before(play, regression):
    """The memory has not changed, nor has the rate: the model moves by the same step again."""
    models = models_of(regression(MIFA()), play)
    assert not torch.equal(models[1], models[0])
    torch.testing.assert_close(models[2] - models[1], models[1] - models[0], rtol=0, atol=1e-12)


def test_mifa_waits_for_the_last_client_of_each_replicate_alone(play, regression):
    """In the first replicate client 3 comes in round 5; the second has met everybody earlier."""
    counts = script()
    complete = [int(np.flatnonzero(np.logical_or.accumulate(counts[:, r]).all(1))[0]) for r in range(2)]
    assert complete[0] == 5 > complete[1]
    for played in play(regression(MIFA(wait_for_all=True))):
        for r, ready in enumerate(complete):
            assert torch.equal(played.after.model[r], played.before.model[r]) == (played.t < ready)


@pytest.mark.parametrize("weighting", ["uniform", "data"])
@pytest.mark.parametrize("k", [1, 2, 9])
def test_f3ast_takes_the_most_urgent_of_the_available(k, weighting):
    """The largest w² / r² among those who came, per replicate; all of them where fewer than k came."""
    draw, clients = np.random.default_rng(2), 6
    sizes = draw.integers(1, 50, 2 * clients)
    federation = Federation((0, 1), clients, sizes, dtype=torch.float64)
    shares = sizes.reshape(2, clients) / sizes.reshape(2, clients).sum(1, keepdims=True)
    strategy = F3AST(k=k, weighting=weighting)
    for _ in range(100):
        frequency = draw.uniform(0.01, 1.0, (2, clients))
        counts = (draw.random((2, clients)) < draw.random()).astype(int)
        state = strategy.initial(torch.zeros(2, 1, dtype=torch.float64), federation)
        state.frequency = torch.as_tensor(frequency.reshape(-1))
        chosen = strategy.cohort(state, federation.make_cohort(counts, np.ones((2, clients)))).host_index.rows
        expected = []
        for r in range(2):
            w = shares[r] if weighting == "data" else np.full(clients, 1 / clients)
            urgency = w**2 / frequency[r] ** 2
            expected += sorted(
                r * clients + i for i in sorted(np.flatnonzero(counts[r]), key=lambda i: -urgency[i])[:k]
            )
        assert chosen.tolist() == expected


def test_f3ast_meets_newcomers_first():
    """A frequency of zero is infinitely urgent, but never a client that is away."""
    federation = Federation((0,), 4, np.ones(4))
    strategy = F3AST(k=1)
    state = strategy.initial(torch.zeros(1, 1), federation)
    state.frequency = torch.tensor([1e-6, 0.5, 0.0, 0.0])
    chosen = strategy.cohort(state, federation.make_cohort(np.array([[1, 1, 0, 1]]), np.ones((1, 4))))
    assert chosen.host_index.rows.tolist() == [3]


P = np.array([0.15, 0.4, 0.7, 1.0])


def participate(strategy, rounds: int):
    """State after so many rounds of independent coins with probabilities P."""
    federation = Federation((0, 1), len(P), np.ones(2 * len(P)), dtype=torch.float64)
    state, draw = strategy.initial(torch.zeros(2, 1, dtype=torch.float64), federation), np.random.default_rng(8)
    for t in range(rounds):
        counts = (draw.random((2, len(P))) < P).astype(int)
        state = strategy.aggregate(state, reported(federation, counts, np.zeros((2 * len(P), 1))), t)
    return state


@pytest.mark.slow
def test_fedaus_weights_approach_one_over_p():
    """Intervals are geometric: mean 1/p, variance (1 − p)/p²; T rounds close about T·p of them. Five σ."""
    rounds = 2500
    weight = participate(FedAU(cutoff=1000), rounds).mean_interval.reshape(2, -1).numpy()
    sigma = np.sqrt((1 - P) / P**2 / (rounds * P))
    assert (np.abs(weight - 1 / P) <= 5 * sigma + 1e-12).all()


@pytest.mark.slow
def test_a_cutoff_bounds_fedaus_weights():
    """min(interval, K) has mean (1 − (1 − p)^K) / p: the client that hardly comes is not blown up without bound."""
    rounds, cutoff = 2500, 4
    weight = participate(FedAU(cutoff=cutoff), rounds).mean_interval.reshape(2, -1).numpy()
    expected = (1 - (1 - P) ** cutoff) / P
    sigma = np.sqrt(np.minimum((1 - P) / P**2, cutoff**2 / 4) / (rounds / expected))
    assert weight.max() <= cutoff
    assert (np.abs(weight - expected) <= 5 * sigma + 1e-12).all()


@pytest.mark.slow
def test_f3asts_frequency_is_unbiased_for_p():
    """r̂ weights round s by a_s ∝ (1 − β)^{T − s}, Σ a_s = 1: mean p, variance p (1 − p) Σ a_s². Five σ."""
    rounds, beta = 2500, 0.002
    frequency = participate(F3AST(beta=beta), rounds).frequency.reshape(2, -1).numpy()
    a = (1 - beta) ** np.arange(rounds)
    a /= a.sum()
    unbiased = frequency / (1 - (1 - beta) ** rounds)
    sigma = np.sqrt(P * (1 - P) * (a**2).sum())
    assert (np.abs(unbiased - P) <= 5 * sigma + 1e-12).all()
    assert (np.abs(1 / unbiased - 1 / P) <= 5 * sigma / P / (P - 5 * sigma) + 1e-12).all()


def test_p_fedavgs_second_scheme_is_unbiased_for_the_first_kind(play, regression):
    """The mean over all pairs S of Σ_{k∈S} w_k (m/K) θ_k is Σ_i w_i θ_i, though single weights do not sum to 1."""
    pairs = [(i, j) for i in range(CLIENTS) for j in range(i)]
    drawn = []
    for pair in pairs:
        counts = np.zeros((1, len(SEEDS), CLIENTS), dtype=int)
        counts[:, :, list(pair)] = 1
        drawn.append(next(play(regression(PFedAvg("II"), counts), 1)).after.model)
    full = next(play(regression(PFedAvg("full"), Full()), 1)).after.model
    torch.testing.assert_close(torch.stack(drawn).mean(0), full, rtol=0, atol=1e-12)
