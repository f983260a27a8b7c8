"""Which samples a client meets: every one once a pass, or any with equal chance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim import Execution, Simulation
from fedsim.data.datasets import Dataset
from fedsim.local import SGD
from fedsim.models import Mean


def simulation_of(sizes, rule: SGD, seeds) -> Simulation:
    """Client i holds sizes[i] samples; sample j is the number j, so that a batch says which samples it holds."""
    x = torch.arange(sum(sizes), dtype=torch.float64)[:, None]
    owners = torch.as_tensor(np.repeat(np.arange(len(sizes)), sizes))
    dataset = Dataset("numbered", x, loss="half_squared_distance", owners=owners)
    return Simulation(dataset, Mean, clients=len(sizes), local=rule, seeds=seeds, execution=Execution(dtype="float64"))


def everyone(simulation: Simulation):
    ones = np.ones((simulation.federation.num_replicates, simulation.federation.clients))
    return simulation.federation.make_cohort(ones, ones)


def seen(simulation: Simulation, t: int, row: int) -> list[np.ndarray]:
    """Numbers of the samples in each batch of a row."""
    chunk = simulation.trainer.batches.plan(everyone(simulation), t).chunk(np.array([row]))
    return [chunk.batch(k, 0, 1, torch.float64)["x"][0, :, 0].long().numpy() for k in range(int(chunk.steps[0]))]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    steps=st.integers(1, 9),
    t=st.integers(0, 50),
)
def test_a_pass_meets_every_sample_at_most_once(sizes, batch_size, drop_last, steps, t):
    """Short last batches are kept or dropped as asked; where they are kept, a pass covers everything."""
    rule = SGD(steps=steps, batch_size=batch_size, drop_last=drop_last)
    simulation = simulation_of(sizes, rule, seeds=(4,))
    firsts = np.concatenate([[0], np.cumsum(sizes)])
    for row, held in enumerate(sizes):
        batches = seen(simulation, t, row)
        assert len(batches) == steps
        own = np.arange(firsts[row], firsts[row + 1])
        size = min(batch_size, held)
        per_pass = held // size if drop_last else -(-held // size)
        for first in range(0, steps, per_pass):
            turn = batches[first : first + per_pass]
            met = np.concatenate(turn)
            assert len(np.unique(met)) == len(met)
            assert np.isin(met, own).all()
            if len(turn) == per_pass:
                assert len(met) == (per_pass * size if drop_last else held)
                assert all(len(batch) == size for batch in turn[:-1])


def test_passes_and_rounds_shuffle_afresh():
    simulation = simulation_of((40,), SGD(epochs=2, batch_size=10), seeds=(4, 9))
    orders = {}
    for t, row in itertools.product((0, 1), (0, 1)):
        batches = seen(simulation, t, row)
        orders |= {(t, row, turn): tuple(np.concatenate(batches[4 * turn :][:4])) for turn in (0, 1)}
    assert len(set(orders.values())) == 8
    assert all(sorted(order) == list(range(40)) for order in orders.values())


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sampling", ["pass", "replacement"])
def test_every_sample_is_as_likely_as_any_other(sampling):
    """Two batches of 2 out of 8 over 400 rounds and 5 clients. For draws with replacement the statistic is χ² with
    7 degrees of freedom, for a shuffle it is smaller: above 30 with probability 1e-4. Any two of the four draws
    coincide with probability 1/8 with replacement (5 σ), never within a pass."""
    rule = SGD(steps=2, batch_size=2, sampling=sampling)
    simulation = simulation_of((8,) * 5, rule, seeds=(0,))
    cohort = everyone(simulation)
    draws = []
    for t in range(400):
        chunk = simulation.trainer.batches.plan(cohort, t).chunk(np.arange(5))
        steps = [chunk.batch(k, 0, 5, torch.float64)["x"][..., 0].long().numpy() for k in range(2)]
        draws.append(np.concatenate(steps, axis=1))
    drawn = np.stack(draws)
    assert (drawn // 8 == np.arange(5)[:, None]).all()
    chance = {"pass": 0.0, "replacement": 1 / 8}[sampling]
    for j in range(4):
        assert chi_square(np.bincount(drawn[..., j].reshape(-1) % 8, minlength=8)) < 30
        for other in range(j):
            repeated = (drawn[..., j] == drawn[..., other]).mean()
            assert abs(repeated - chance) <= 5 * (chance * (1 - chance) / drawn[..., 0].size) ** 0.5
