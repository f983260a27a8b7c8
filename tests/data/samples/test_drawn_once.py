"""Rows of equal seed and client meet equal samples of a stream, which are drawn once: the same bits."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.core import Federation
from fedsim.data.datasets import (
    BinaryGaussians,
    GaussianMean,
    HousePrices,
    Market,
    Pricing,
    PricingGroups,
    RegressionGroups,
)
from fedsim.data.samples import LocalWork
from fedsim.data.samples.client_data import BatchKeys
from fedsim.data.samples.drawn import StreamClientData
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.run.together import run_together
from fedsim.strategies import FedAvg

M = 5
STREAMS = {
    "gaussian_mean": lambda: GaussianMean(clients=M),
    "binary_gaussians": lambda: BinaryGaussians(clients=M),
    "house_prices": lambda: HousePrices(clients=M),
    "market": lambda: Market(clients=M),
    "pricing": lambda: Pricing(clients=M, dimension=3),
    "pricing_groups": lambda: PricingGroups(clients=M),
    "regression_groups": lambda: RegressionGroups(clients=M),
}


def batches(stream, seeds, clients, steps=3, kept=None, dtype=torch.float32):
    """Those of rows, at every step."""
    seeds, clients = np.array(seeds), np.array(clients)
    data = StreamClientData(stream, Federation(tuple(seeds), M, np.ones(M * len(seeds))))
    keys = BatchKeys(seeds, clients, torch.device("cpu"), 4, kept)
    load = data.workload(LocalWork(steps, None, 8), np.arange(len(seeds)))
    rows = torch.as_tensor(clients)
    feed = data.make_feed(rows, rows, keys, load, load.batch_sizes(), "pass")
    return [feed.batch_of_rows(step, slice(0, len(seeds)), 8, dtype) for step in range(steps)]


@pytest.mark.parametrize("name", STREAMS)
def test_what_is_drawn_once_is_what_each_row_would_draw(name, monkeypatch):
    """In any order, with rows that have no like, with what is redrawn every few rounds, in both precisions."""
    seeds, clients = [7, 7, 3, 7, 3, 3, 7, 7, 3], [0, 4, 0, 0, 1, 0, 4, 2, 0]
    ways = [{}, {"kept": 2}, {"dtype": torch.float64}]
    once = [batches(STREAMS[name](), seeds, clients, **way) for way in ways]
    monkeypatch.setattr(BatchKeys, "distinct_rows", lambda keys: None)
    each = [batches(STREAMS[name](), seeds, clients, **way) for way in ways]
    for one, other in zip(chain(*once), chain(*each), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[part], other[part]) for part in one)
    x = once[0][0]["x"]
    assert torch.equal(x[0], x[3])
    assert not torch.equal(x[0], x[2])


def test_likes_are_those_of_equal_seed_and_client():
    device = torch.device("cpu")
    assert BatchKeys(np.array([3, 3, 3]), np.array([0, 2, 4]), device, 0).distinct_rows() is None
    assert BatchKeys(np.array([3, 3, 2**62]), np.array([0, 2, 2]), device, 0).distinct_rows() is None
    assert BatchKeys(np.array([], dtype=np.int64), np.array([], dtype=np.int64), device, 0).distinct_rows() is None
    first, like = BatchKeys(np.array([2**62, 3, 3, 2**62, 3]), np.array([2, 2, 1, 2, 2]), device, 0).distinct_rows()
    assert first.tolist() == [2, 1, 0]
    assert like.tolist() == [2, 1, 0, 2, 1]


def run_of(seeds=(0, 1, 0, 1), rates=(1.0, 1.0, 0.5, 0.5)) -> Simulation:
    return Simulation(
        GaussianMean(clients=M),
        Mean,
        clients=M,
        availability=Bernoulli(Uniform(0.6)),
        strategy=FedAvg(list(rates)),
        local=SGD(lr=0.1, steps=3, batch_size=4),
        rounds=4,
        seeds=seeds,
        evaluation=EvaluationOptions(every=1),
        execution=Execution(executor="vmap", compile="never"),
    )


def test_a_run_and_runs_together_keep_their_bits(monkeypatch):
    def models():
        together = run_together([run_of(), run_of(seeds=(1, 1, 5, 0))])
        return [run_of().run().state.model, *(result.state.model for result in together)]

    once = models()
    monkeypatch.setattr(BatchKeys, "distinct_rows", lambda keys: None)
    assert all(torch.equal(one, other) for one, other in zip(once, models(), strict=True))


def test_fewer_samples_are_drawn(monkeypatch):
    drawn, genuine = [], GaussianMean.draw
    monkeypatch.setattr(GaussianMean, "draw", lambda *given: drawn.append(len(given[1])) or genuine(*given))
    run_of().run()
    shared = sum(drawn)
    drawn.clear()
    monkeypatch.setattr(BatchKeys, "distinct_rows", lambda keys: None)
    run_of().run()
    assert 2 * shared <= sum(drawn) + M  # that the probe draws too
