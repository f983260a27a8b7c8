"""Batches drawn with replacement have the size that was asked for, however little a client has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim import Simulation
from fedsim.data.datasets import Dataset
from fedsim.local import SGD
from fedsim.models import Mean

SIZES = (1, 3, 50)


@pytest.mark.parametrize("drop_last", [True, False])
def test_every_client_draws_batch_size_samples(drop_last):
    owners = np.repeat(np.arange(3), SIZES)
    x = torch.as_tensor(owners, dtype=torch.float32)[:, None]
    data = Dataset("points", x, loss="half_squared_distance", owners=torch.as_tensor(owners))
    rule = SGD(steps=4, batch_size=8, sampling="replacement", drop_last=drop_last)
    simulation = Simulation(data, Mean, clients=3, local=rule)
    cohort = simulation.federation.make_cohort(np.ones((1, 3)), np.ones((1, 3)))
    chunk = simulation.trainer.batches.plan(cohort, 0).chunk(np.arange(3))
    assert (chunk.sizes == 8).all()
    for step in range(4):
        batch = chunk.batch(step, 0, 3, torch.float32)
        assert "weight" not in batch
        assert torch.equal(batch["x"][..., 0], torch.arange(3.0)[:, None].expand(3, 8))  # each its own samples


def test_small_clients_draw_each_of_their_samples_equally_often():
    """Client 1 has three samples and draws 4·8 a round: a thousand rounds, five standard deviations."""
    owners = np.repeat(np.arange(3), SIZES)
    x = torch.arange(len(owners), dtype=torch.float32)[:, None]
    data = Dataset("points", x, loss="half_squared_distance", owners=torch.as_tensor(owners))
    simulation = Simulation(data, Mean, clients=3, local=SGD(steps=4, batch_size=8, sampling="replacement"))
    cohort = simulation.federation.make_cohort(np.ones((1, 3)), np.ones((1, 3)))
    counts, draws = np.zeros(3), 0
    for t in range(300):
        chunk = simulation.trainer.batches.plan(cohort, t).chunk(np.array([1]))
        seen = np.concatenate([chunk.batch(s, 0, 1, torch.float32)["x"].numpy().ravel() for s in range(4)]).astype(int)
        counts += np.bincount(seen - 1, minlength=3)
        draws += len(seen)
    assert abs(counts - draws / 3).max() < 5 * np.sqrt(draws * 2 / 9)


def test_the_batches_of_a_round_are_independent() -> None:
    """Of 1,000 samples two batches of 20 share 0.4 on average, wherever in them: by 5 σ over 4 rounds of 10 steps, for
    batches that follow one another as for the others."""
    x = torch.arange(1000, dtype=torch.float32)[:, None]
    data = Dataset("points", x, loss="half_squared_distance")
    simulation = Simulation(data, Mean, clients=1, local=SGD(steps=10, batch_size=20, sampling="replacement"))
    cohort = simulation.federation.make_cohort(np.ones((1, 1)), np.ones((1, 1)))
    shared: dict[bool, list[int]] = {True: [], False: []}  # of neighbours, and of the others
    for t in range(4):
        chunk = simulation.trainer.batches.plan(cohort, t).chunk(np.array([0]))
        batches = [chunk.batch(s, 0, 1, torch.float32)["x"].numpy().ravel() for s in range(10)]
        for s, one in enumerate(batches):
            for before, other in enumerate(batches[:s]):
                shared[before == s - 1].append(int((one[:, None] == other).sum()))
    for counts in shared.values():
        mean = len(counts) * 20 * 20 / 1000
        assert abs(sum(counts) - mean) < 5 * np.sqrt(mean)
