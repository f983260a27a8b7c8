"""A replicate gives the same numbers alone as in company."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.data.datasets import Dataset
from fedsim.data.partition import IID, Partition, Table
from fedsim.data.partition.partition import Samples
from fedsim.local import SGD, Inverse, PerStep
from fedsim.models import MLP
from fedsim.strategies import FedAWE


def labelled() -> Dataset:
    draw = np.random.default_rng(0)
    x, y = torch.as_tensor(draw.standard_normal((61, 6))), torch.as_tensor(draw.integers(0, 3, 61))
    return Dataset("labelled", x, y, classes=3)


def dropping(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, classes))


class ByLot(Partition):
    """A shuffle in which the first client holds `seed` samples for every one of another's."""

    def table(self, samples: Samples, clients: int, seed: int) -> Table:
        self.share = seed
        return super().table(samples, clients, seed)

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> list[np.ndarray]:
        unit = samples.count // (self.share + clients - 1)
        return np.split(draw.permutation(samples.count), unit * (self.share + np.arange(clients - 1)))


COMPANY = {
    "epochs, uneven shares": {"rule": {"epochs": 2, "batch_size": 6}, "partition": ByLot()},
    "decay by steps": {"rule": {"steps": 4, "batch_size": 6, "schedule": PerStep(0.9)}, "partition": IID()},
    "decay by epochs, uneven shares": {
        "rule": {"epochs": 2, "batch_size": 6, "schedule": Inverse(offset=5.0)},
        "partition": ByLot(),
    },
    "replacement": {"rule": {"steps": 4, "batch_size": 6, "sampling": "replacement"}, "partition": IID()},
    "dropout": {"rule": {"epochs": 1, "batch_size": 5}, "partition": ByLot(), "model": dropping},
}


@pytest.mark.parametrize("case", COMPANY)
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_a_replicate_gives_the_same_numbers_alone_as_in_company(case, executor):
    options = COMPANY[case]

    def run(seeds):
        return Simulation(
            labelled(),
            options.get("model", functools.partial(MLP, hidden=(5,))),
            clients=5,
            partition=options["partition"],
            availability=Bernoulli(Uniform(0.6)),
            strategy=FedAWE(),
            local=SGD(lr=0.3, **options["rule"]),
            rounds=3,
            evaluation=EvaluationOptions(every=1),
            seeds=seeds,
            execution=Execution(dtype="float64", executor=executor),
        ).run()

    alone, company = run([5]), run([3, 5, 8])
    torch.testing.assert_close(alone.state.model[0], company.state.model[1], rtol=0, atol=1e-10)
    rows = [row for row in company.history if row["seed"] == 5]
    for mine, theirs in zip(alone.history, rows, strict=True):
        for name in (*alone.metric_names, "round", "active_clients", "mean_active_clients"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-10), name
