"""Equal values are ranked by random numbers of seed, round and client; what rounding makes of them decides nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.core.federation import Federation
from fedsim.core.ties import largest_positions, relative_tolerance, tie_breakers
from fedsim.data.datasets import Quadratics
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.strategies import CAFed, FedLaAvg, Oort, PowerOfChoice

RELATIVE = relative_tolerance(torch.float32)


def test_without_ties_the_largest_are_taken():
    draw = np.random.default_rng(0)
    for _ in range(50):
        values, k = draw.normal(size=30), int(draw.integers(0, 34))
        found = largest_positions(values, k, tie_breakers(1, np.arange(30), 0), RELATIVE)
        assert set(found) == set(np.argsort(-values)[:k])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rounding_does_not_change_who_is_taken(scale):
    draw = np.random.default_rng(1)
    for t in range(200):
        values = draw.integers(0, 4, 12).astype(float) * scale
        breakers, k = tie_breakers(3, np.arange(12), t), int(draw.integers(1, 12))
        rounded = [values + 1e-7 * scale * draw.normal(size=12) for _ in range(2)]
        one, other, exact = (set(largest_positions(given, k, breakers, RELATIVE)) for given in (*rounded, values))
        assert one == other == exact


def test_every_one_of_the_tied_is_taken_equally_often():
    counts = sum(
        np.bincount(largest_positions(np.ones(5), 2, tie_breakers(7, np.arange(5), t), 0.0), minlength=5)
        for t in range(2000)
    )
    assert np.abs(counts - 800).max() < 5 * np.sqrt(2000 * 0.4 * 0.6)  # five standard deviations


def test_infinite_and_missing_values_have_their_places():
    breakers = tie_breakers(0, np.arange(5), 0)
    values = np.array([np.nan, 1.0, np.inf, -np.inf, np.inf])
    assert set(largest_positions(values, 2, breakers, RELATIVE)) == {2, 4}
    assert set(largest_positions(values, 3, breakers, RELATIVE)) == {1, 2, 4}
    assert len(largest_positions(values, 1, breakers, RELATIVE)) == 1


def test_a_replicate_is_ranked_as_alone():
    both, alone = Federation((3, 9), 8, np.ones(16)), Federation((9,), 8, np.ones(8))
    found = [
        federation.make_cohort(np.ones(shape), np.ones(shape))
        .select_largest(torch.zeros(shape[0] * 8), 3)
        .host_index.virtual_clients
        % 8
        for federation, shape in ((both, (2, 8)), (alone, (1, 8)))
    ]
    assert found[0][3:].tolist() == found[1].tolist()


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: PowerOfChoice(2, 6),
        lambda: PowerOfChoice(2, 6, "last"),
        lambda: Oort(2, explore=0.0, explore_least=0.0, cutoff=1.0),
        lambda: CAFed(),
        lambda: FedLaAvg(0.25),
    ],
    ids=["power_of_choice", "last", "oort", "ca_fed", "fedlaavg"],
)
def test_executors_choose_alike_where_clients_are_alike(strategy):
    """Pairs of clients with equal data have equal losses, but for what each executor's rounding makes of them."""
    points = np.repeat(np.random.default_rng(2).normal(size=(4, 5)), 2, axis=0)
    runs = []
    for executor in ("loop", "vmap"):
        simulation = Simulation(
            Quadratics(clients=8, dimension=5, points=points),
            Mean,
            clients=8,
            strategy=strategy(),
            local=SGD(lr=0.3, steps=3),
            rounds=12,
            seeds=[0, 1],
            evaluation=EvaluationOptions(every=1),
            execution=Execution(executor, trial=False),
        )
        result = simulation.run()
        runs.append((np.array([row["train_loss"] for row in result.history]), result.state.model))
    assert np.allclose(runs[0][0], runs[1][0], rtol=1e-4)
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=1e-4, atol=1e-5)
