"""Runs that are stopped and resumed, and what makes two of them the same."""

from __future__ import annotations

import functools

import numpy as np
import torch

from fedsim import EvaluationOptions, Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.core.federation import Cohort
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Dirichlet
from fedsim.local import SGD, PerStep
from fedsim.models import MLP
from fedsim.run.tracking import Tracking
from fedsim.strategies import FedAWE

QUIET = Tracking(progress="none", tensorboard=False)


class Coins(Bernoulli):
    """Everybody in round 0, so that participation before an interruption differs from that after it; then coins.

    Once, in the middle of round `at`, `disturb` is called.
    """

    def __init__(self, at: int = -1, disturb=None) -> None:
        super().__init__(Uniform(0.4))
        self.at, self.disturb = at, disturb

    def sample(self, t: int) -> Cohort:
        """Asked once a round of the run, not when the process is tried before it."""
        if t == self.at:
            self.at = -1
            self.disturb()
        return super().sample(t)

    def counts(self, t: int) -> np.ndarray:
        return super().counts(t) if t else np.ones_like(super().counts(t))


def classes() -> Dataset:
    draw = np.random.default_rng(0)
    x, y = torch.as_tensor(draw.standard_normal((90, 4))), torch.as_tensor(draw.integers(0, 3, 90))
    return Dataset("blobs", x[:60], y[:60], x[60:], y[60:], classes=3)


def simulation_of(rounds=6, availability=None, strategy=None, **options) -> Simulation:
    return Simulation(
        classes(),
        functools.partial(MLP, hidden=(5,)),
        clients=5,
        availability=availability or Coins(),
        strategy=strategy or FedAWE(),
        local=SGD(lr=0.3, epochs=1, batch_size=4, schedule=PerStep(0.95)),
        rounds=rounds,
        **{
            "seeds": (1, 4),
            "partition": Dirichlet(1.0, "per_class"),
            "evaluation": EvaluationOptions(every=1, of=["global", "client_mean"]),
        }
        | options,
    )
