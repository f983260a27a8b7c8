"""Every shift under intermittent clients: executors agree, replicates agree with single runs, resumption is exact."""

from __future__ import annotations

import functools

import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Bernoulli, Sine, Uniform
from fedsim.data.contamination import FeatureNoise, Gaussian
from fedsim.data.datasets import BinaryGaussians, Dataset, Digits, HousePrices, Pricing, PricingGroups, RegressionGroups
from fedsim.data.partition import Dirichlet
from fedsim.local import SGD
from fedsim.models import Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.shift import Contribution, Demand, GroupMean, Location, Response, Strategic
from fedsim.strategies import FedAWE

M = 7
QUIET = Tracking(progress="none", tensorboard=False)
PIXELS = {"loss": "half_squared_distance"}


def digits_as_numbers() -> Dataset:
    """Digits with their value as the target of a regression, in an order that mixes them."""
    digits = Digits()
    return Dataset("numbers", digits.train_x, digits.train_y.float(), loss="squared")


CASES = {
    "strategic": (Digits, Linear, lambda **o: Strategic(0.3, 0.1, **o), {}),
    "group_mean": (Digits, Linear, lambda **o: GroupMean([0.1] * 5 + [0.4] * 5, 0.1, **o), {}),
    "location": (Digits, Mean, lambda **o: Location(0.4, 0.1, **o), PIXELS),
    "demand": (Digits, Mean, lambda **o: Demand(1.0, 0.5, **o), {"loss": "negative_revenue"}),
    "response": (digits_as_numbers, functools.partial(Linear, classes=1), lambda **o: Response(0.5, 0.1, **o), {}),
    "contribution, loss": (Digits, Linear, lambda **o: Contribution("loss", **o), {}),
    "contribution, budget": (Digits, Mean, lambda **o: Contribution("budget", budget=50.0, **o), PIXELS),
    "stream of demands": (lambda: Pricing(M), Mean, lambda **o: Demand(**o), {}),
    "stream of groups": (lambda: PricingGroups(M, [0.8, -0.5]), Mean, lambda **o: Contribution(**o), {}),
    "stream of answers": (lambda: RegressionGroups(M), Linear, lambda **o: Contribution("loss", **o), {}),
    "stream of houses": (lambda: HousePrices(M), Linear, lambda **o: Response(**o), {}),
    "stream of classes": (lambda: BinaryGaussians(M), Linear, lambda **o: GroupMean(**o), {}),
}


double = functools.partial(Execution, dtype="float64")
VMAP = double("vmap")


def simulation_of(case, seeds=(3, 5), rounds=2, way=VMAP, rotten=None, **options) -> Simulation:
    build, model, make, extra = CASES[case]
    data = build()
    return Simulation(
        data,
        model,
        clients=M,
        partition=Dirichlet(0.3) if data.classes is not None and not data.stream else None,
        availability=Bernoulli(Uniform(0.7), Sine(gamma=0.3)),
        strategy=FedAWE(),
        local=SGD(lr=0.05, steps=3, batch_size=6),
        shift=make(references="none", **options),
        contamination=rotten,
        rounds=rounds,
        seeds=seeds,
        evaluation=EvaluationOptions(every=1),
        execution=way,
        **extra,
    )


def timeless(history):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{"deploy": "step"}, {"deploy": "round", "inertia": 0.5}], ids=["step", "inert"])
@pytest.mark.parametrize("case", CASES)
def test_executors_chunks_and_company_change_nothing(case, options):
    """vmap, small chunks and the loop with two workers agree; a replicate runs alone as in company."""
    whole = simulation_of(case, **options).run()
    assert torch.isfinite(whole.state.models).all()
    assert not torch.equal(whole.state.model[0], whole.state.model[1])
    for way in (double("vmap", chunk=3), double("loop", chunk=4, workers=2)):
        other = simulation_of(case, way=way, **options)
        torch.testing.assert_close(other.run().state.models, whole.state.models, rtol=0, atol=1e-9)
    alone = simulation_of(case, seeds=(5,), **options).run()
    torch.testing.assert_close(alone.state.model[0], whole.state.model[1], rtol=0, atol=1e-9)
    company = [row for row in timeless(whole.history) if row["seed"] == 5]
    for mine, theirs in zip(timeless(alone.history), company, strict=True):
        for name, value in mine.items():
            assert value == pytest.approx(theirs[name], abs=1e-9), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("deploy", ["step", "round"])
@pytest.mark.parametrize("case", ["strategic", "contribution, loss", "stream of groups", "stream of houses"])
def test_resuming_with_inertia_is_bit_for_bit(case, deploy, tmp_path):
    options = {"deploy": deploy, "inertia": 0.8, "rotten": Gaussian(fraction=0.2, std=1.0)}
    straight = simulation_of(case, rounds=4, **options).run(tmp_path / "straight", tracking=QUIET)
    simulation_of(case, rounds=2, **options).run(tmp_path / "parts", tracking=QUIET)
    resumed = simulation_of(case, rounds=4, **options).run(tmp_path / "parts", resume=True, tracking=QUIET)
    assert torch.equal(resumed.state.models, straight.state.models)
    assert timeless(resumed.history) == timeless(straight.history)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_shift_is_felt_and_so_is_its_inertia(case):
    """Without it, or with data that stay near the initial model, training ends elsewhere."""
    plain = simulation_of(case)
    plain.shift.active = False
    ends = [simulation_of(case, **o).run().state.model for o in ({}, {"inertia": 0.9}, {"deploy": "round"})]
    ends.append(plain.run().state.model)
    for i, end in enumerate(ends):
        assert not any(torch.allclose(end, other, rtol=0, atol=1e-9) for other in ends[:i])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ["contribution, loss", "stream of groups", "group_mean"])
def test_contamination_composes_under_both_executors(case):
    rotten = FeatureNoise(fraction=0.3, std=2.0)
    vmapped = simulation_of(case, rotten=rotten, way=double("vmap", chunk=3)).run().state.models
    looped = simulation_of(case, rotten=rotten, way=double("loop")).run().state.models
    torch.testing.assert_close(looped, vmapped, rtol=0, atol=1e-9)
    assert not torch.allclose(simulation_of(case).run().state.models, vmapped)
