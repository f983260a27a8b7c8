"""Who shows up follows p_i^t, and both are pure functions of (seed, round).

The keys of all draws are fixed; statistical bounds are five standard errors unless said.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from told import CLIENTS, Given, fractions_of, people, ready

from fedsim.availability import (
    Availability,
    Bernoulli,
    ClassCorrelated,
    Full,
    Groups,
    InterleavedSine,
    Jitter,
    Population,
    Sine,
    Staircase,
    Stationary,
    Trajectory,
    Uniform,
    UniformK,
)
from fedsim.core import ConfigError, Federation

SETTINGS = settings(max_examples=25, deadline=None)

TRAJECTORIES: dict[str, Callable[[], Trajectory]] = {
    "stationary": Stationary,
    "staircase": Staircase,
    "sine": Sine,
    "interleaved_sine": InterleavedSine,
    "jitter": Jitter,
}
PROCESSES: dict[str, Callable[[], Availability]] = {
    "full": Full,
    "uniform_k": lambda: UniformK(5),
    **{f"groups_{name}": (lambda make=make: Bernoulli(Groups(), make())) for name, make in TRAJECTORIES.items()},
    **{
        f"classes_{name}": (lambda make=make: Bernoulli(ClassCorrelated(), make()))
        for name, make in TRAJECTORIES.items()
    },
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TRAJECTORIES)
def test_clients_show_up_as_often_as_their_probabilities_say(name: str) -> None:
    """The count of every client over 2,000 rounds is Σ_t p_i^t within 5 σ, σ² = Σ_t p_i^t (1 − p_i^t)."""
    process = ready(Bernoulli(Given(0.0, 0.05, 0.3, 0.5, 0.9, 1.0), TRAJECTORIES[name]()), Population((0, 1), 6))
    rounds = range(2000)
    p = np.stack([process.probabilities(t) for t in rounds])
    seen = np.stack([process.counts(t) for t in rounds])
    assert set(np.unique(seen)) <= {0, 1}
    sigma = np.sqrt((p * (1 - p)).sum(0))
    assert (np.abs(seen.sum(0) - p.sum(0)) <= 5 * sigma + 1e-9).all()


def test_coins_are_independent_over_clients_rounds_and_replicates() -> None:
    process = ready(Bernoulli(Uniform(0.5)), Population((0, 1), 10))
    seen = np.stack([process.counts(t) for t in range(4000)]).reshape(4000, 20).astype(float)
    for pair in (np.corrcoef(seen.T), np.corrcoef(seen[:-1].T, seen[1:].T)):
        off = pair - np.eye(len(pair))
        assert np.abs(off).max() < 5 / np.sqrt(4000)


def test_a_client_of_probability_one_always_comes_and_of_zero_never() -> None:
    process = ready(Bernoulli(Given(0.0, 1.0)), Population((0,), 2))
    assert all(process.counts(t).tolist() == [[0, 1]] for t in range(500))


@SETTINGS
@given(m=st.integers(1, 30), data=st.data())
def test_uniform_k_draws_exactly_k_different_clients(m: int, data: st.DataObject) -> None:
    k, t = data.draw(st.integers(1, m)), data.draw(st.integers(0, 10**6))
    process = ready(UniformK(k), Population((0, 1), m))
    counts = process.counts(t)
    assert counts.sum(1).tolist() == [k, k]
    assert counts.max() == 1
    np.testing.assert_allclose(process.probabilities(t), k / m)


def test_uniform_k_is_uniform_over_clients_and_pairs() -> None:
    """Everybody with probability k/m, every pair with k(k − 1)/(m(m − 1)), over 4,000 rounds."""
    m, k, rounds = 7, 3, 4000
    process = ready(UniformK(k), Population((0,), m))
    seen = np.stack([process.counts(t)[0] for t in range(rounds)]).astype(float)
    pairs = np.stack([seen[:, i] * seen[:, j] for i, j in itertools.combinations(range(m), 2)], 1)
    for drawn, p in ((seen, k / m), (pairs, k * (k - 1) / (m * (m - 1)))):
        assert (np.abs(drawn.mean(0) - p) < 5 * np.sqrt(p * (1 - p) / rounds)).all()


def test_full_is_everybody() -> None:
    process = ready(Full(), Population((0, 1, 2), 5))
    for t in (0, 1, 100):
        assert process.counts(t).tolist() == [[1] * 5] * 3
        assert process.probabilities(t).tolist() == [[1.0] * 5] * 3


@pytest.mark.parametrize("name", PROCESSES)
def test_a_replicate_is_the_same_alone_and_in_company(name: str) -> None:
    """Every seed has its own trace, so that each algorithm meets it in whatever batch of seeds it is run."""
    alone = ready(PROCESSES[name](), people(3))
    company = ready(PROCESSES[name](), people(7, 3, 9))
    for t in (0, 1, 13, 500):
        assert np.array_equal(alone.counts(t)[0], company.counts(t)[1])
        assert np.array_equal(alone.probabilities(t)[0], company.probabilities(t)[1])


@pytest.mark.parametrize("name", PROCESSES)
def test_the_trace_does_not_depend_on_the_order_of_questions(name: str) -> None:
    """Out of order, twice, or after a restart: round t is round t."""
    process = ready(PROCESSES[name](), people(0, 1))
    forward = [(process.counts(t).copy(), process.probabilities(t).copy()) for t in range(30)]
    for fresh in (process, ready(PROCESSES[name](), people(0, 1))):
        for t in (29, 3, 3, 0, 17):
            assert np.array_equal(fresh.counts(t), forward[t][0])
            assert np.array_equal(fresh.probabilities(t), forward[t][1])


@pytest.mark.parametrize("name", [name for name in PROCESSES if name != "full"])
def test_rounds_and_seeds_differ(name: str) -> None:
    process = ready(PROCESSES[name](), people(0, 1))
    seen = np.stack([process.counts(t) for t in range(40)])
    assert (np.diff(seen, axis=0) != 0).any()
    assert (seen[:, 0] != seen[:, 1]).any()


@pytest.mark.parametrize("name", PROCESSES)
def test_counts_and_probabilities_have_a_place_for_every_virtual_client(name: str) -> None:
    process = ready(PROCESSES[name](), people(0, 1, 2))
    assert process.counts(0).shape == process.probabilities(0).shape == (3, CLIENTS)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_cohort_holds_those_who_came(name: str) -> None:
    """Rows, counts and true probabilities of `sample` are those of the round, and no one else's."""
    fractions = np.stack([fractions_of(0), fractions_of(1)])
    process = PROCESSES[name]().bind(Federation((0, 1), CLIENTS, np.ones(2 * CLIENTS), fractions))
    for t in (0, 15):
        cohort, counts, p = process.sample(t), process.counts(t).reshape(-1), process.probabilities(t).reshape(-1)
        assert np.array_equal(cohort.host_index.rows, np.flatnonzero(counts))
        assert np.array_equal(cohort.host_index.multiplicity, counts[counts > 0])
        assert np.array_equal(cohort.host_index.probability, p[counts > 0])


def test_sampling_before_binding_is_an_error() -> None:
    with pytest.raises(ConfigError, match="bind"):
        Full().sample(0)


def test_more_than_all_clients_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"availability\.k=30 exceeds clients=25"):
        UniformK(30).setup(Population((0,), 25))


def test_more_groups_than_clients_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"availability\.base has 3 groups.*clients=2"):
        Groups(p=[0.1, 0.2, 0.3]).base(Population((0,), 2))


def test_class_correlated_without_labels_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"class_correlated needs class labels.*availability/base=uniform"):
        Bernoulli(ClassCorrelated()).setup(Population((0,), 5))


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: UniformK(0), r"k=0"),
        (lambda: UniformK(2.5), r"k=2\.5"),
        (lambda: Uniform(1.5), r"p=1\.5"),
        (lambda: Uniform(-0.1), r"p=-0\.1"),
        (lambda: Uniform(float("nan")), r"p=nan"),
        (lambda: Groups(0.1, 1.9), r"p\w*=1\.9"),
        (lambda: Groups(p=[0.5, -1.0]), r"p\[1\]=-1"),
        (lambda: ClassCorrelated(high=1.2), r"high=1\.2"),
        (lambda: ClassCorrelated(low=-0.5), r"low=-0\.5"),
        (lambda: Staircase(period=0), r"period=0"),
        (lambda: Staircase(low=1.4), r"low=1\.4"),
        (lambda: Sine(gamma=-0.3), r"gamma=-0\.3"),
        (lambda: Sine(period=2.5), r"period=2\.5"),
        (lambda: InterleavedSine(cutoff=2.0), r"cutoff=2"),
        (lambda: Jitter(width=-1.0), r"width=-1"),
    ],
)
def test_impossible_settings_name_their_key(build: Callable[[], object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        build()


@pytest.mark.parametrize(
    "process",
    [Full(), UniformK(1000), Bernoulli(Groups(), Sine()), Bernoulli(Uniform(), Jitter())],
    ids=["full", "uniform_k", "sine", "jitter"],
)
def test_a_million_clients_are_drawn_for_in_half_a_second(process: Availability) -> None:
    """Vectorised on the host; the best of three, as the machine may be busy."""
    process.setup(Population((0,), 1_000_000))
    taken = []
    for t in range(3):
        begin = time.perf_counter()
        assert process.counts(t).shape == (1, 1_000_000)
        taken.append(time.perf_counter() - begin)
    assert min(taken) < 0.5
