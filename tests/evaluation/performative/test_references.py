"""When there is no reference point: one sentence, not a number. And what a run makes of those that there are."""

from __future__ import annotations

import functools
import json
import logging

import numpy as np
import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.core import ConfigError, NoReferenceError
from fedsim.data.contamination import Point
from fedsim.data.datasets import BinaryGaussians, Dataset, Digits, GaussianMean, HousePrices, Pricing, PricingGroups
from fedsim.data.partition import Dirichlet
from fedsim.evaluation.performative import Risk, optimal_point, stable_point
from fedsim.evaluation.performative.references import references
from fedsim.evaluation.performative.search import EvaluationCounter
from fedsim.local import SGD
from fedsim.models import Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.shift import Contribution, Demand, GroupMean, Location, NoShift, Response, Shift, Strategic
from fedsim.strategies import FedAvg

SLOPE = functools.partial(Linear, bias=False)


class Pushed(Shift):
    """z + ε θ with any ε: Location refuses ε̄ ≥ 1 by itself."""

    def __init__(self, epsilon: float, **options) -> None:
        super().__init__(**options)
        self.epsilon = epsilon

    def __call__(self, batch, theta):
        return batch | {"x": batch["x"] + self.epsilon * theta}


def simulation_of(dataset, model, shift, clients=3, **options) -> Simulation:
    return Simulation(dataset, model, clients=clients, shift=shift, **options)


def risk_of(simulation: Simulation, replicate: int = 0, **options) -> Risk:
    return Risk(simulation.model, simulation.shift, simulation.data, replicate, **options)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("method", ["auto", "gradient", "repeated"])
@pytest.mark.parametrize("epsilon", [1.0, 1.001, 1.5, 3.0])
def test_no_stable_point_where_the_data_answer_at_least_as_strongly(epsilon, method):
    """ε̄ ≥ μ/L = 1 (p-fedavg): repeated training has nowhere to end, though θ = (1 − ε)⁻¹ m̄ solves the equation."""
    risk = risk_of(simulation_of(GaussianMean(3, means=[1.0, 2.0, 3.0]), Mean, Pushed(epsilon)))
    with pytest.raises(NoReferenceError, match="stable point") as refused:
        stable_point(risk, torch.zeros(1), method=method)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, ConfigError)


def test_just_below_there_is_one_and_the_gradient_finds_it():
    risk = risk_of(simulation_of(GaussianMean(3, means=[1.0, 2.0, 3.0]), Mean, Pushed(0.999)))
    assert stable_point(risk, torch.zeros(1)).item() == pytest.approx(2000.0, rel=1e-6)


def test_repeated_minimisation_stops_within_the_tolerance_of_its_limit() -> None:
    """Every step is half the one before, so that as much is left as the last one: θ^PS = 2 / (1 − 0.5) = 4."""
    risk = risk_of(simulation_of(GaussianMean(3, means=[1.0, 2.0, 3.0]), Mean, Pushed(0.5)), samples=4)
    found = stable_point(risk, torch.zeros(1), method="repeated", tolerance=0.02).item()
    assert 0 < 4 - found <= 0.02 * (1 + 4)


@pytest.mark.parametrize(
    ("build", "solve", "message"),
    [
        (lambda: (Pricing(3, 2), Mean, Demand(-1.0, 0.0)), "optimal", "is unbounded below; set shift.box"),
        (lambda: (Pricing(3, 2), Mean, Demand(-1.0, 0.0)), "stable", "stable point"),
        (lambda: (Pricing(3, 2), Mean, Demand(0.0, 0.0)), "optimal", "is unbounded below"),
        (lambda: (HousePrices(3), SLOPE, Response(-2.5, 0.0)), "stable", "stable point"),
        (lambda: (PricingGroups(3, [-0.5, 0.5]), Mean, Contribution()), "stable", "stable point"),
    ],
)
def test_other_points_that_do_not_exist_are_refused(build, solve, message):
    risk = risk_of(simulation_of(*build()))
    start = torch.full((risk.model.dimension,), 0.5, dtype=torch.float64)
    with pytest.raises(NoReferenceError, match=message):
        stable_point(risk, start) if solve == "stable" else optimal_point(risk, [start])


def test_a_point_that_is_not_unique_is_refused():
    """Two softmax outputs without ridge may move together freely."""
    two = functools.partial(Linear, classes=2)
    data = BinaryGaussians(3, std=2.0)
    free = risk_of(simulation_of(data, two, Strategic(0.1), loss="cross_entropy"))
    with pytest.raises(NoReferenceError, match=r"not unique.*model\.ridge"):
        stable_point(free, torch.zeros(4))
    held = risk_of(simulation_of(data, two, Strategic(0.1), loss="cross_entropy", ridge=0.1))
    assert torch.isfinite(stable_point(held, torch.zeros(4))).all()


def test_two_outputs_and_one_answer_alike():
    """Softmax on two outputs is logistic regression in their difference, with half the ridge."""
    data = BinaryGaussians(3, std=1.0, dimension=2)
    one = risk_of(simulation_of(data, Linear, Strategic(0.4), ridge=0.1))
    two = risk_of(simulation_of(data, functools.partial(Linear, classes=2), Strategic(0.4), loss="cross_entropy",
                                ridge=0.2))  # fmt: skip
    point, pair = stable_point(one, torch.zeros(3)), stable_point(two, torch.zeros(6))
    weight, bias = pair[:4].reshape(2, 2), pair[4:]
    torch.testing.assert_close(torch.cat([weight[1] - weight[0], bias[1:] - bias[:1]]), point, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weighting", ["uniform", "data"])
def test_the_risk_is_that_of_plain_loops_over_all_stored_samples(weighting):
    """Ragged clients, every sample, the second replicate's own partition, in double precision for a float32 run."""
    simulation = simulation_of(Digits(), Linear, Strategic(0.3), seeds=(0, 4), partition=Dirichlet(0.3, "per_class"),
                               ridge=0.1, strategy=FedAvg(weighting=weighting))  # fmt: skip
    risk = risk_of(simulation, 1)
    theta, deployed = torch.sin(torch.arange(650.0)).double(), torch.cos(torch.arange(650.0)).double()
    data, table = simulation.dataset, simulation.partition_tables[1]
    total, w = 0.0, table.sizes / table.sizes.sum() if weighting == "data" else np.full(3, 1 / 3)
    for i in range(3):
        numbers = torch.as_tensor(table.order[table.offsets[i] : table.offsets[i + 1]]).long()
        direction = deployed[:640].reshape(10, 64)
        move = direction[1] - (direction.sum(0) - direction[1]) / 9
        x = data.train_x[numbers].double().flatten(1) - simulation.shift.epsilons[i] * move
        output = x @ theta[:640].reshape(10, 64).T + theta[640:]
        total += w[i] * torch.nn.functional.cross_entropy(output, data.train_y[numbers]).item()
    found = risk(theta, deployed)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(total + 0.05 * theta.square().sum().item(), abs=1e-9)


def found_by(simulation: Simulation) -> dict[str, torch.Tensor]:
    initial = simulation.model.initial(simulation.federation.seeds)
    return references(simulation.model, simulation.shift, simulation.data, initial)


@pytest.mark.slow
def test_auto_solves_what_is_cheap(caplog):
    caplog.set_level(logging.INFO)
    assert set(found_by(simulation_of(Pricing(3, 100), Mean, Demand()))) == {"distance_to_ps", "distance_to_po"}
    assert found_by(simulation_of(Pricing(3, 101), Mean, Demand())) == {}
    assert "the model has 101 parameters, more than 100; set shift.references=always to compute them" in caplog.text
    always = found_by(simulation_of(Pricing(3, 101), Mean, Demand(references="always")))
    assert always["distance_to_po"].shape == (1, 101)
    assert found_by(simulation_of(Pricing(3, 2), Mean, Demand(references="none"))) == {}
    assert found_by(simulation_of(Pricing(3, 2), Mean, NoShift())) == {}


@pytest.mark.parametrize("more", [0, 1])
def test_auto_counts_the_numbers_of_all_clients_inputs(more, monkeypatch):
    """Clients × samples × the numbers of one; as many as the bound are still solved for."""
    simulation = simulation_of(Pricing(3, 2), Mean, Demand())
    count = 3 * simulation.evaluator.data.width(None) * 2
    monkeypatch.setattr("fedsim.evaluation.performative.references.MAX_AUTO_INPUT_ENTRIES", count - more)
    assert bool(found_by(simulation_of(Pricing(3, 2), Mean, Demand()))) == (not more)


def run(folder, dataset, model, shift, seeds=(0, 1), strategy=None, **options):
    given = {"local": SGD(lr=0.1, steps=5, batch_size=8), "rounds": 4, "evaluation": EvaluationOptions(every=2)}
    options = given | {"execution": Execution(dtype="float64")} | options
    simulation = Simulation(dataset, model, clients=4, shift=shift, seeds=seeds, strategy=strategy, **options)
    result = simulation.run(folder, resume=True, tracking=Tracking(progress="none", tensorboard=False))
    return simulation, result


def test_distances_are_columns_of_the_metrics_and_say_what_they_are(tmp_path):
    data = Pricing(4, 3)
    _, result = run(tmp_path / "run", data, Mean, Demand(2.0, 0.0))
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    head = (tmp_path / "run" / "metrics.csv").read_text()
    for name in ("distance_to_ps", "distance_to_po", "performative_loss", "decoupled_loss"):
        assert f"# {name}: " in head
    stable = data.means.mean(0) / 2
    for r in (0, 1):
        (last,) = [row for row in rows if row["round"] == 4 and row["seed"] == r]
        for name, point in (("distance_to_ps", stable), ("distance_to_po", stable / 2)):
            assert last[name] == pytest.approx((result.state.model[r] - point).norm().item(), abs=1e-6)


def test_a_resumed_run_has_the_same_columns_and_numbers(tmp_path):
    options = {"dataset": BinaryGaussians(4), "model": Linear, "shift": GroupMean([0.0, 0.5], 0.0), "ridge": 0.05}
    _, straight = run(tmp_path / "straight", **options)
    run(tmp_path / "parts", rounds=2, **options)
    _, resumed = run(tmp_path / "parts", **options)
    assert "distance_to_ps" in straight.history[-1]
    for row, same in zip(resumed.history, straight.history, strict=True):
        assert {k: v for k, v in row.items() if k != "seconds"} == {k: v for k, v in same.items() if k != "seconds"}


def test_a_run_without_a_stable_point_says_so_and_goes_on(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    _, result = run(tmp_path / "run", GaussianMean(4, means=[1.0] * 4), Mean, Pushed(1.5), rounds=2)
    assert "no distance_to_ps: " in caplog.text
    assert "distance_to_ps" not in result.history[-1]
    assert result.history[-1]["distance_to_po"] > 0  # ½((1 − ε)θ − 1)² has its minimum at −2
    assert (
        len(caplog.records)
        == len({record.getMessage() for record in caplog.records if "trainer" not in record.name}) + 1
    )


class Jumping(Shift):
    """People who step over a threshold once the model has reached it, and back again: a risk without a gradient."""

    def __call__(self, batch, theta):
        return batch | {"x": batch["x"] + torch.where(theta > 1, -4.0, 4.0) + 0 * theta}


def test_what_seeks_reference_points_says_so_and_ends(caplog):
    caplog.set_level(logging.INFO)
    search = EvaluationCounter(30.0, clock=iter([0.0, 1.0, 9.0, 11.0, 12.0, 29.0, 31.5]).__next__)
    search.activity = "repeated minimisation, round 7 of at most 2000, goes to θ^PS"
    for _ in range(5):
        search.count_evaluation()
    assert [record.getMessage() for record in caplog.records] == [
        f"reference points: {search.activity}; {spent} s of at most 30 (shift.references_seconds)" for spent in (11, 29)
    ]
    with pytest.raises(
        NoReferenceError, match=r"given up after 32 s and 5 evaluations .* round 7 .* threshold"
    ) as ended:
        search.count_evaluation()
    assert "\n" not in str(ended.value)


def test_a_search_that_takes_too_long_is_named_in_the_summary_and_the_run_goes_on(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    shift = Jumping(references_seconds=1e-9)
    _, result = run(tmp_path / "run", GaussianMean(4, means=[1.0] * 4), Mean, shift, rounds=2)
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["references"]
    for name in ("stable", "optimal"):
        assert all("given up after 0 s" in verdict for verdict in told[name]["verdict"])
        assert told[name]["risk"] == [None, None]
    assert "no distance_to_ps: given up" in caplog.text
    assert "distance_to_ps" not in result.history[-1]


def test_a_response_in_jumps_is_refused_for_a_reason_without_any_clock():
    """Repeated minimisation goes from one side of the threshold to the other, for ever."""
    risk = risk_of(simulation_of(GaussianMean(3, means=[1.0] * 3), Mean, Jumping(references_seconds=None)))
    with pytest.raises(NoReferenceError, match="stable point"):
        stable_point(risk, torch.zeros(1), method="repeated")


@pytest.mark.parametrize("seconds", [0, -1, "soon", float("nan")])
def test_the_time_for_references_is_a_positive_number(seconds):
    with pytest.raises(ConfigError, match=r"references_seconds"):
        Jumping(references_seconds=seconds)


def test_stored_partitions_have_their_own_points_and_streams_share_theirs():
    draw = np.random.default_rng(0)
    data = Dataset("points", torch.as_tensor(draw.normal(0, 3, (40, 2))), loss="half_squared_distance")
    shift = Location(epsilons=[0.8, 0.0, -0.5, 0.3])
    stored = found_by(Simulation(data, Mean, clients=4, shift=shift, seeds=(0, 1)))["distance_to_po"]
    assert not torch.allclose(stored[0], stored[1])
    alone = found_by(Simulation(data, Mean, clients=4, shift=shift, seeds=(1,)))["distance_to_po"]
    torch.testing.assert_close(alone[0], stored[1], rtol=0, atol=1e-6)
    shared = found_by(simulation_of(Pricing(3, 2), Mean, Demand(), seeds=(0, 1)))["distance_to_po"]
    assert torch.equal(shared[0], shared[1])


def test_a_strategy_that_weighs_by_data_has_its_references_weighed_by_data():
    owners = torch.tensor([0] * 9 + [1])
    x = torch.arange(10.0)[:, None].double()
    data = Dataset("line", x, loss="half_squared_distance", owners=owners)
    for weighting, mean in (("uniform", (4.0 + 9.0) / 2), ("data", 4.5)):
        simulation = Simulation(
            data, Mean, clients=2, shift=Location(0.5), strategy=FedAvg(weighting=weighting), rounds=1
        )
        simulation.run()
        assert simulation.evaluator.references["distance_to_ps"].item() == pytest.approx(2 * mean, abs=1e-6)


def test_references_are_of_genuine_data_within_the_box():
    simulation = simulation_of(Pricing(3, 2), Mean, Demand(box=[0.0, 1.0]), contamination=Point(fraction=0.5), rounds=1)
    simulation.run()
    for name in ("distance_to_ps", "distance_to_po"):
        assert simulation.evaluator.references[name].tolist() == [[1.0, 1.0]]


@pytest.mark.slow
def test_training_ends_at_the_stable_point():
    """Repeated gradient descent on the current model's data, without noise: what the reference is for."""
    data = HousePrices(4, noise=0.0, std=0.0)
    shift = Response([1.0, 0.5, 0.0, -0.2], 0.0)
    rule = SGD(lr=0.05, steps=1, batch_size=2)
    result = Simulation(
        data, SLOPE, clients=4, shift=shift, local=rule, rounds=400, execution=Execution(dtype="float64")
    ).run()
    assert result.history[0]["distance_to_ps"] > 0.5
    assert result.history[-1]["distance_to_ps"] < 1e-6
    assert result.history[-1]["distance_to_po"] > 1e-3
