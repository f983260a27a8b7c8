"""The small regression that is timed."""

from __future__ import annotations

import numpy as np
import pytest
from timed import FULL, SEEDS, SIZES

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.local import SGD
from fedsim.strategies import FedAvg


@pytest.fixture(name="build")
def build_fixture(Regression, regression_of, Scripted):
    def build(counts=FULL, strategy=None, rule=None, **options) -> Simulation:
        given = {
            "seeds": SEEDS,
            "execution": Execution(dtype="float64"),
            "rounds": len(FULL),
            "evaluation": EvaluationOptions(1),
            "local": SGD(**{"lr": 0.02, "steps": 5, "batch_size": None} | (rule or {})),
        } | options
        availability = Scripted(counts) if isinstance(counts, np.ndarray) else counts
        return Simulation(
            regression_of(SIZES), Regression, clients=4, availability=availability, strategy=strategy or FedAvg(),
            **given,
        )  # fmt: skip

    return build
