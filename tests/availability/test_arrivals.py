"""An open population: how many clients are present, how often they participate, and when they leave for good.

The keys of all draws are fixed; statistical bounds are five standard errors.
"""

from __future__ import annotations

import numpy as np
import pytest
from told import Given, ready_for

from fedsim import EvaluationOptions, Simulation
from fedsim.availability import Arrivals, Bernoulli, Uniform
from fedsim.core import ConfigError
from fedsim.data.datasets import Digits
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.strategies import FedVARP

REPLICATES, RATE, LIFETIME = 3000, 0.5, 8.0


def open_population(clients=60, **options):
    process = Arrivals(Uniform(1.0), initial=0.0, rate=RATE, lifetime=LIFETIME, **options)
    return ready_for(process, tuple(range(REPLICATES)), clients)


def assert_mean(values, expected, sigma):
    assert abs(values.mean() - expected) <= 5 * sigma / np.sqrt(len(values))


@pytest.mark.slow
def test_the_population_is_that_of_an_infinite_server_queue():
    """M/M/∞ from empty: Poisson with mean λ L (1 − e^{−t/L}), of whom p takes part; none of 60 clients is missing."""
    process = open_population()
    for t in (0, 4, 40):
        mean = RATE * LIFETIME * (1 - np.exp(-t / LIFETIME))
        present = process.present(t).sum(1)
        assert_mean(present, mean, np.sqrt(mean))
        fourth = mean + 3 * mean**2  # central moment of a Poisson variable
        assert_mean((present - mean) ** 2, mean, np.sqrt(max(fourth - mean**2, 0)))


@pytest.mark.slow
def test_clients_take_part_as_often_as_they_are_present():
    process = Arrivals(Given(*np.full(60, 0.3)), initial=0.0, rate=RATE, lifetime=LIFETIME)
    ready_for(process, tuple(range(REPLICATES)), 60)
    mean = 0.3 * RATE * LIFETIME * (1 - np.exp(-5))
    counts = process.counts(40)
    assert_mean(counts.sum(1), mean, np.sqrt(mean))  # a thinned Poisson variable is one
    assert not counts[~process.present(40)].any()
    assert np.array_equal(process.probabilities(40), 0.3 * process.present(40))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_batches_arrive_together(batch):
    """With constant lifetimes all who arrived in the last L rounds are present: b Poisson(λ L), which has variance b² λ
    L.
    """
    present = open_population(90, batch=batch, law="constant").present(20).sum(1)
    mean = batch * RATE * LIFETIME
    assert_mean(present, mean, np.sqrt(batch * mean))
    assert (present % batch == 0).mean() > 0.99  # of the last batch some may be missing
    assert np.var(present) == pytest.approx(batch * mean, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("law", "shape"), [("lognormal", 1.2), ("weibull", 0.5), ("weibull", 3.0)])
def test_the_mean_population_depends_on_lifetimes_by_their_mean_only(law, shape):
    """M/G/∞ at rest: Poisson(λ L) for these lifetimes too; even the longest tails are at rest after 400 rounds."""
    process = Arrivals(Uniform(1.0), initial=0.0, rate=RATE, lifetime=LIFETIME, law=law, shape=shape)
    present = ready_for(process, tuple(range(500)), 300).present(400).sum(1)
    mean = RATE * LIFETIME
    assert_mean(present, mean, np.sqrt(mean))


def test_those_of_round_0_leave_for_good():
    process = Arrivals(Uniform(1.0), initial=1.0, rate=0.0, lifetime=LIFETIME)
    ready_for(process, (0,), 20_000)
    gone = np.zeros((1, 20_000), dtype=bool)
    for t in (0, 3, 12):
        survival = np.exp(-t / LIFETIME)
        assert_mean(process.present(t)[0].astype(float), survival, np.sqrt(survival * (1 - survival)))
        assert (process.departed(t) | ~gone).all()
        gone = process.departed(t)
        assert np.array_equal(gone, ~process.present(t))


def test_given_rounds_are_kept_and_clients_join_by_number():
    process = ready_for(Arrivals(Uniform(1.0), joins=[0, 2, 2], leaves=[3, 9, 2]), (0,), 3)
    present = [process.present(t)[0].tolist() for t in range(5)]
    assert present == [[True, False, False]] * 2 + [[True, True, False]] + [[False, True, False]] * 2
    assert process.departed(4)[0].tolist() == [True, False, True]
    ordered = ready_for(Arrivals(initial=0.25, rate=0.5, order="number"), (0, 1), 8)
    for t in range(20):
        present = ordered.present(t)
        assert (np.diff(present.astype(int), axis=1) <= 0).all()
        assert present[:, :2].all()


def test_without_arrivals_and_departures_it_is_bernoulli():
    still, coins = (
        ready_for(process, (0, 4), 7) for process in (Arrivals(Uniform(0.4), initial=1.0), Bernoulli(Uniform(0.4)))
    )
    for t in (0, 5, 60):
        assert np.array_equal(still.counts(t), coins.counts(t))
        assert np.array_equal(still.probabilities(t), coins.probabilities(t))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Arrivals(initial=0.0, rate=0.0), "rate=0 lets no client join"),
        (lambda: Arrivals(law="lognormal", shape=4.0), "shape=4.0 must lie between 0 and 3 for lognormal"),
        (lambda: ready_for(Arrivals(joins=[1, 2]), (0,), 3), r"availability\.joins has 2 entries, but clients=3"),
        (lambda: ready_for(Arrivals(leaves=[1, 2]), (0,), 3), r"availability\.leaves has 2 entries, but clients=3"),
    ],
)
def test_an_impossible_population_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def small(availability, **options):
    return Simulation(
        Digits(), Linear, clients=4, rounds=6, local=SGD(lr=0.1, steps=1, batch_size=8), availability=availability,
        evaluation=EvaluationOptions(every=3, diagnostics=["presence"]), **options,
    )  # fmt: skip


@pytest.mark.slow
def test_clients_present_and_departed_are_measured_and_memory_keeps_those_that_left():
    run = small(Arrivals(Uniform(1.0), joins=[0, 0, 4, 9], leaves=[2, 9, 9, 20]), strategy=FedVARP())
    result = run.run()
    assert [row["present_clients"] for row in result.history] == [2, 1, 2]
    last = result.history[-1]
    accuracy = run.evaluator(result.state.model, None).client_accuracy[0]
    assert last["client_accuracy_present"] == pytest.approx(accuracy[[1, 2]].mean())
    assert last["client_accuracy_departed"] == pytest.approx(accuracy[0])
    assert np.isnan(result.history[0]["client_accuracy_departed"])
    assert result.state.memory[0].abs().sum() > 0  # client 0 left in round 2
    assert result.state.memory[3].abs().sum() == 0  # client 3 never joined


def test_presence_needs_a_population_that_changes():
    with pytest.raises(ConfigError, match="presence compares clients that are present with those that have left"):
        small(Bernoulli())
