"""A federation of unequal clients some of whom have no validation samples, with three models each."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch

from fedsim import Execution, Simulation
from fedsim.availability import Bernoulli, Sine, Uniform
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Natural
from fedsim.evaluation.personal import Personal
from fedsim.local import APFL, SGD, Ditto, PerFedAvg, PFedMe
from fedsim.models import Mean
from fedsim.strategies import FedAvg, FedAWE, LocalOnly

SIZES = (2, 10, 25, 4, 15, 30, 5, 20, 10, 10, 40)  # 20 %: none for clients 0 and 3


M = len(SIZES)


def points() -> Dataset:
    """f_i(x) = ½ mean ‖x − z‖² over the client's z in the plane."""
    draw = np.random.default_rng(4)
    owners = np.repeat(np.arange(M), SIZES)
    x = torch.as_tensor(draw.standard_normal((len(owners), 2)) + owners[:, None])
    return Dataset("points", x, loss="half_squared_distance", owners=torch.as_tensor(owners))


double = functools.partial(Execution, dtype="float64")


def simulation_of(**options) -> Simulation:
    """Full batches: s local steps of SGD contract towards the mean of the client's training samples by (1 − η)^s."""
    given = {"clients": M, "partition": Natural(validation=0.2), "personal": Personal(over="all", train_samples=99),
             "local": SGD(lr=0.1, steps=3, batch_size=None), "rounds": 3, "seeds": (3, 5),
             "execution": double(), "availability": Bernoulli(Uniform(0.6), Sine())}  # fmt: skip
    return Simulation(points(), functools.partial(Mean, start=2.0), **given | options)


def caught(simulation: Simulation) -> list:
    """Everything the personal evaluator is asked and answers, as the run goes on."""
    calls, judge = [], simulation.personal

    def asked(state, memory, t, online):
        before = {name: value.clone() for name, value in memory.clients.items()}
        rows = None if online is None else online.host_index.rows[online.host_index.multiplicity > 0]
        metrics, histograms = judge(state, memory, t, online)
        kept = getattr(state, "models", torch.zeros(0)).clone()
        calls.append((state.model.clone(), kept, before, t, rows, metrics, histograms))
        return metrics, histograms

    asked.columns = judge.columns
    simulation.measurement = dataclasses.replace(simulation.measurement, personal=asked)
    return calls


RULES = {
    "apfl": (lambda: APFL(alpha=0.3, lr=0.1, steps=3, batch_size=None), FedAvg),
    "pfedme": (lambda: PFedMe(penalty=2.0, inner_lr=0.1, lr=0.1, steps=3, batch_size=None), FedAvg),
    "ditto": (lambda: Ditto(penalty=0.7, lr=0.1, steps=3, batch_size=None), FedAvg),
    "perfedavg": (lambda: PerFedAvg(inner_lr=0.4, adapt_steps=2, lr=0.1, steps=3, batch_size=None), FedAvg),
    "local_only": (lambda: SGD(lr=0.1, steps=3, batch_size=None), LocalOnly),
    "apfl under fedawe": (lambda: APFL(alpha=0.3, lr=0.1, steps=3, batch_size=None), FedAWE),
}
