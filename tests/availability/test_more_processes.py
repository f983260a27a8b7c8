"""Chains, turns, multisets and recorded traces: their laws, and their purity.

The keys of all draws are fixed; statistical bounds are five standard errors.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from told import Given, ready_for

from fedsim.availability import (
    Availability,
    Bernoulli,
    Cyclic,
    Groups,
    InterleavedSine,
    LabelOrdered,
    Lognormal,
    Markov,
    Multiset,
    Sine,
    Trace,
    Uniform,
)
from fedsim.core import ConfigError, Federation

SETTINGS = settings(max_examples=25, deadline=None)
WEIGHTS = np.array([[0.5, 0.25, 0.15, 0.1, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]])
P = np.array([0.05, 0.3, 0.5, 0.9])


def chains(persistence: float, rounds: int, replicates: int = 4000) -> np.ndarray:
    """[T, R, m] many independent replicates of four chains."""
    process = ready_for(Markov(Given(*P), persistence), tuple(range(replicates)), len(P))
    return np.stack([process.counts(t) for t in range(rounds)]).astype(float)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("persistence", [0.0, 0.5, 0.9])
def test_a_chain_is_stationary_from_the_first_round_on(persistence: float) -> None:
    """In every single round the share of replicates that are on is p: no burn-in."""
    share = chains(persistence, 12).mean(1)
    assert (np.abs(share - P) <= 5 * np.sqrt(P * (1 - P) / 4000)).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("persistence", [0.0, 0.5, 0.9])
def test_a_chain_remembers_with_correlation_rho_to_the_lag(persistence: float) -> None:
    """Corr(s_t, s_{t+h}) = ρ^h, at every t; the bound is five standard errors of the mean product."""
    seen = (chains(persistence, 6) - P) / np.sqrt(P * (1 - P))
    for lag in (1, 3):
        products = seen[:-lag] * seen[lag:]
        sigma = products.std(1) / np.sqrt(products.shape[1])
        assert (np.abs(products.mean(1) - persistence**lag) <= 5 * sigma).all()


@pytest.mark.slow
def test_a_chain_moves_by_the_two_probabilities_of_its_docstring() -> None:
    rho = 0.6
    seen = chains(rho, 8)
    for i, p in enumerate(P):
        before, after = seen[:-1, :, i].ravel(), seen[1:, :, i].ravel()
        for state, expected in ((1, p + rho * (1 - p)), (0, p * (1 - rho))):
            moved = after[before == state]
            assert abs(moved.mean() - expected) <= 5 * np.sqrt(expected * (1 - expected) / len(moved))


def test_a_long_chain_of_one_replicate_is_there_a_share_p_of_the_time() -> None:
    """The variance of a time average is blown up by (1 + ρ)/(1 − ρ)."""
    process, rounds, rho = ready_for(Markov(Given(*P), 0.8), (3,), len(P)), 4000, 0.8
    share = np.stack([process.counts(t)[0] for t in range(rounds)]).mean(0)
    sigma = np.sqrt(P * (1 - P) / rounds * (1 + rho) / (1 - rho))
    assert (np.abs(share - P) <= 5 * sigma).all()


def test_chains_of_clients_and_replicates_are_independent() -> None:
    process = ready_for(Markov(Uniform(0.5), 0.5), (0, 1, 2), 5)
    seen = np.stack([process.counts(t) for t in range(3000)]).reshape(3000, -1).astype(float)
    bound = 5 * np.sqrt((1 + 0.25) / (1 - 0.25) / 3000)  # the product of two chains has correlation ρ²
    assert np.abs(np.corrcoef(seen.T) - np.eye(15)).max() < bound


def test_a_chain_of_probability_one_is_always_there_and_of_zero_never() -> None:
    process = ready_for(Markov(Given(0.0, 1.0), 0.7), (0,), 2)
    assert all(process.counts(t).tolist() == [[0, 1]] for t in range(300))
    assert process.probabilities(5).tolist() == [[0.0, 1.0]]


def test_without_persistence_a_chain_is_no_more_constant_than_a_coin() -> None:
    """Every state is then the fresh coin of its round."""
    seen = chains(0.0, 2)
    both = (seen[0] * seen[1]).mean(0)
    assert (np.abs(both - P**2) <= 5 * np.sqrt(P**2 * (1 - P**2) / 4000)).all()


PROCESSES = {
    "markov": lambda path: Markov(Groups(), 0.7),
    "cyclic": lambda path: Cyclic(3, 2),
    "multiset": lambda path: Multiset(6),
    "trace": Trace,
    "floor": lambda path: Bernoulli(Groups(), InterleavedSine(), floor=0.05),
    "lognormal": lambda path: Bernoulli(Lognormal(), Sine()),
}


def made(name: str, path: str, *seeds: int) -> Availability:
    weights = np.stack([np.random.default_rng(seed).dirichlet(np.ones(5)) for seed in seeds])
    return ready_for(PROCESSES[name](path), seeds, 5, weights=weights)


@pytest.mark.parametrize("name", PROCESSES)
def test_the_past_does_not_depend_on_the_order_of_questions(name: str, path: str) -> None:
    """Out of order, twice, after a restart in the middle, and set up again: round t is round t."""
    process = made(name, path, 0, 1)
    forward = [(process.counts(t).copy(), process.probabilities(t).copy()) for t in range(30)]
    again = made(name, path, 8)
    again.counts(12)
    again.setup(process.population)
    for fresh in (process, made(name, path, 0, 1), again):
        for t in (29, 3, 3, 0, 17, 18):
            assert np.array_equal(fresh.counts(t), forward[t][0])
            assert np.array_equal(fresh.probabilities(t), forward[t][1])


@pytest.mark.parametrize("name", PROCESSES)
def test_what_it_returns_may_be_written_to_without_changing_the_next_answer(name: str, path: str) -> None:
    """Counts belong to the caller."""
    process, untouched = made(name, path, 0, 1), made(name, path, 0, 1)
    for t in range(4):
        counts = process.counts(t)
        assert np.array_equal(counts, untouched.counts(t))
        if counts.flags.writeable:
            counts[:] = 9


@pytest.mark.parametrize("name", PROCESSES)
def test_a_replicate_is_the_same_alone_and_in_company(name: str, path: str) -> None:
    alone, company = made(name, path, 3), made(name, path, 7, 3, 9)
    for t in (0, 1, 13, 100):
        assert np.array_equal(alone.counts(t)[0], company.counts(t)[1])
        assert np.array_equal(alone.probabilities(t)[0], company.probabilities(t)[1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PROCESSES)
def test_counts_average_to_the_probabilities(name: str, path: str) -> None:
    """In a round, over 2,000 replicates: E count = p_i^t, and no count has a larger variance than p_i^t itself."""
    seeds, weights = tuple(range(2000)), np.tile(WEIGHTS[0], (2000, 1))
    process = ready_for(PROCESSES[name](path), seeds, 5, weights=weights)
    for t in (0, 1, 4, 9):
        p = process.probabilities(t)
        assert p.shape == process.counts(t).shape == (2000, 5)
        error = np.abs(process.counts(t).mean(0) - p.mean(0))
        assert (error <= 5 * np.sqrt(p.mean(0) / 2000) + 1e-12).all()


@pytest.mark.parametrize("name", [name for name in PROCESSES if name != "cyclic"])
def test_rounds_and_seeds_differ(name: str, path: str) -> None:
    process = made(name, path, 0, 1)
    seen = np.stack([process.counts(t) for t in range(40)])
    assert (np.diff(seen, axis=0) != 0).any()
    assert (seen[:, 0] != seen[:, 1]).any()


@SETTINGS
@given(m=st.integers(1, 40), length=st.integers(1, 4), data=st.data())
def test_groups_take_turns(m: int, length: int, data: st.DataObject) -> None:
    """Client i is there in the turns of group ⌊i · groups / m⌋ alone; no turn is empty, a cycle has everybody."""
    groups = data.draw(st.integers(1, m))
    process = ready_for(Cyclic(groups, length), clients=m)
    cycle = np.stack([process.counts(t) for t in range(groups * length)])
    for t, counts in enumerate(cycle):
        expected = [int(i * groups // m == t // length) for i in range(m)]
        assert counts.tolist() == [expected, expected]
        assert np.array_equal(process.probabilities(t), counts)
    assert (cycle.sum(0) == length).all()
    assert cycle.any(2).all()
    assert np.array_equal(process.counts(groups * length), cycle[0])


@pytest.mark.parametrize("k", [1, 10, 40])
def test_a_multiset_has_k_draws_by_weight_and_repeats_itself(k: int) -> None:
    """Counts sum to K; over T rounds client i has K w_i T of them within 5 σ, σ² = T K w_i (1 − w_i)."""
    process = ready_for(Multiset(k), clients=5, weights=WEIGHTS)
    seen = np.stack([process.counts(t) for t in range(2000)])
    assert (seen.sum(2) == k).all()
    assert (seen >= 0).all()
    assert (seen.max() > 1) == (k > 1)
    np.testing.assert_allclose(process.probabilities(3), k * WEIGHTS)
    sigma = np.sqrt(2000 * k * WEIGHTS * (1 - WEIGHTS))
    assert (np.abs(seen.sum(0) - 2000 * k * WEIGHTS) <= 5 * sigma).all()


def test_a_multiset_has_the_covariance_of_independent_draws() -> None:
    """Cov(n_i, n_j) = K (w_i 1{i=j} − w_i w_j): repeats are neither avoided nor favoured."""
    k, w = 8, WEIGHTS[0, :4]
    process = ready_for(Multiset(k), (0,), 4, weights=w[None])
    seen = np.stack([process.counts(t)[0] for t in range(5000)])
    expected = k * (np.diag(w) - np.outer(w, w))
    centred = seen - k * w
    products = centred[:, :, None] * centred[:, None, :]
    assert (np.abs(products.mean(0) - expected) <= 5 * products.std(0) / np.sqrt(5000)).all()


def test_a_multiset_without_weights_draws_evenly() -> None:
    assert np.array_equal(ready_for(Multiset(3), clients=4).probabilities(0), np.full((2, 4), 0.75))


def test_a_multiset_draws_by_the_federations_data() -> None:
    """Single-precision fractions of many clients still make a distribution."""
    sizes = np.random.default_rng(0).integers(1, 1000, 2 * 3001)
    process = Multiset(50).bind(Federation((0, 1), 3001, sizes))
    shares = sizes.reshape(2, -1) / sizes.reshape(2, -1).sum(1, keepdims=True)
    np.testing.assert_allclose(process.probabilities(0), 50 * shares, rtol=1e-6)
    cohort = process.sample(0)
    assert cohort.sum(cohort.multiplicity**0).tolist() == [50, 50]


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: Markov(persistence=-1), r"persistence=-1"),
        (lambda: Markov(persistence=1.2), r"persistence=1\.2"),
        (lambda: Markov(persistence=1.0), r"persistence=1"),  # its docstring says (−1, 1)
        (lambda: Cyclic(groups=0), r"groups=0"),
        (lambda: Cyclic(length=0), r"length=0"),
        (lambda: ready_for(Cyclic(7)), r"availability\.groups=7 exceeds clients=6"),
        (lambda: Multiset(0), r"k=0"),
        (lambda: Bernoulli(floor=1.5), r"floor=1\.5"),
        (lambda: LabelOrdered(low=-1), r"low=-1"),
        (lambda: Lognormal(sigma=-0.5), r"sigma=-0\.5"),
    ],
)
def test_impossible_settings_name_their_key(build, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        build()
