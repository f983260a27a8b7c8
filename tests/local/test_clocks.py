"""Whose clock a schedule follows: with epochs, clients of unequal size share the one that counts epochs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.core import Cohort
from fedsim.data.datasets import Dataset
from fedsim.local import SGD, Inverse, PerStep
from fedsim.local.schedules import elapsed_units
from fedsim.models import Mean
from fedsim.trainer.rates import learning_rates_of_steps

SIZES = (4, 400)


@pytest.mark.parametrize(
    ("unit", "expected"), [("step", 3 * 20 + 7), ("epoch", (3 * 20 + 7) // 5), ("round", 3)], ids=lambda v: str(v)
)
def test_what_has_gone_by(unit, expected):
    """In round 3, at local step 7 of 20, with 5 steps in a pass."""
    assert elapsed_units(unit, 3, 7, 20, 5) == expected
    assert PerStep(0.5, unit).factor(3, 7, 20, 5) == pytest.approx(0.5**expected)
    assert Inverse(2.0, unit).factor(3, 7, 20, 5) == pytest.approx(1 / (expected + 2))


def rates(unit: str, t: int) -> list[list[float]]:
    """The rates of a small and of a large client in a round of two epochs, step by step."""
    owners = np.repeat(np.arange(2), SIZES)
    data = Dataset("points", torch.randn(len(owners), 1), loss="half_squared_distance", owners=torch.as_tensor(owners))
    rule = SGD(lr=1.0, epochs=2, batch_size=4, schedule=PerStep(0.9, unit))
    simulation = Simulation(data, Mean, clients=2, local=rule, execution=Execution(dtype="float64"))
    cohort: Cohort = simulation.federation.make_cohort(np.ones((1, 2)), np.ones((1, 2)))
    plan = simulation.trainer.batches.plan(cohort, t)
    table = learning_rates_of_steps(rule, simulation.trainer.base_learning_rates[cohort.replicate_index], plan, t)
    return [table[:steps, row].tolist() for row, steps in enumerate(plan.load.steps)]


def test_with_epochs_a_large_client_is_no_further_than_a_small_one():
    """Round 10 of two epochs: 0.9^20, then 0.9^21, for whoever; counting steps the large one is at 0.9^2000."""
    small, large = rates("epoch", 10)
    assert small == pytest.approx([0.9**20, 0.9**21])
    assert large == pytest.approx([0.9**20] * 100 + [0.9**21] * 100)
    small, large = rates("step", 10)
    assert small[0] == pytest.approx(0.9**20)
    assert large[0] == pytest.approx(0.9**2000)


def test_the_rate_a_strategy_is_told_follows_the_same_clock():
    owners = np.repeat(np.arange(2), SIZES)
    data = Dataset("points", torch.randn(len(owners), 1), loss="half_squared_distance", owners=torch.as_tensor(owners))
    for unit, exponent in (("epoch", 6), ("step", 600), ("round", 3)):
        rule = SGD(lr=1.0, epochs=2, batch_size=4, schedule=PerStep(0.99, unit))
        simulation = Simulation(data, Mean, clients=2, local=rule, execution=Execution(dtype="float64"))
        cohort = simulation.federation.make_cohort(np.ones((1, 2)), np.ones((1, 2)))
        start = cohort.broadcast(simulation.initial_state().model)
        report = simulation.trainer.run(start, cohort, 3, simulation.initial_state().model)
        assert float(report.lr) == pytest.approx(0.99**exponent)
