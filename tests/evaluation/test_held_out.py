"""Clients on what was held out of them, and how they differ, against plain loops over clients."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Dirichlet, Natural
from fedsim.evaluation.personal import Personal
from fedsim.evaluation.spread import spread
from fedsim.models import Linear

SIZES = (7, 12, 5, 9, 22, 8, 4, 6, 11, 10, 5, 6, 13, 4, 5, 6, 7, 8, 15, 9)  # 20 clients: a tenth are two
EVERY = ["fairness", "worst25", "best5"]


def labelled(held: bool = True, classes: int = 3) -> Dataset:
    """Ragged owners; the last two have no test samples."""
    draw = np.random.default_rng(3)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    x, y = draw.standard_normal((len(owners), 5)), draw.integers(0, classes, len(owners))
    test_x, test_y = draw.standard_normal((90, 5)), draw.integers(0, classes, 90)
    whose = torch.as_tensor(np.concatenate([np.arange(18), draw.integers(0, 18, 72)])) if held else None
    return Dataset(
        "ragged", *map(torch.as_tensor, (x, y, test_x, test_y)), classes=classes,
        owners=torch.as_tensor(owners), test_owners=whose,
    )  # fmt: skip


def numbers() -> Dataset:
    """The same without labels."""
    data = labelled()
    assert data.train_y is not None
    assert data.test_y is not None
    data.train_y, data.test_y = data.train_y.double(), data.test_y.double()
    data.classes, data.loss = None, "squared"
    return data


class Line(nn.Linear):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape[0], 1)


def simulation_of(data: Dataset, model: Any = Linear, **given: Any) -> Simulation:
    options = {"clients": len(SIZES), "seeds": (0, 1), "execution": Execution(dtype="float64"), "rounds": 2} | given
    return Simulation(data, model, **options)


def models_of(simulation: Simulation) -> torch.Tensor:
    return torch.randn(2, simulation.model.dimension, generator=torch.Generator().manual_seed(0)).double()


def naive(values: list[float], rises: bool) -> dict[str, float]:
    """How a list of clients' numbers spreads, by formulas written out."""
    ordered = sorted(values, reverse=not rises)  # the worst first
    mean = sum(values) / len(values)

    def part(numbers: list[float], percent: int) -> float:
        count = max(1, int(len(values) * percent / 100))
        return sum(numbers[:count]) / count

    return {
        "worst10": part(ordered, 10),
        "best10": part(ordered[::-1], 10),
        "worst25": part(ordered, 25),
        "best5": part(ordered[::-1], 5),
        "variance": sum((v - mean) ** 2 for v in values) / len(values),
        "jain": sum(values) ** 2 / (len(values) * sum(v * v for v in values)),
    }


def outcomes(simulation: Simulation, row: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Hits, or squared errors, of every sample, one by one."""
    found = []
    for out, target in zip(simulation.model.evaluate(row, x), y, strict=True):
        hit = (
            float(out.argmax() == target) if simulation.dataset.classes else float(0.5 * (out - target).square().sum())
        )
        found.append(hit)
    return found


@pytest.mark.parametrize("make", [labelled, numbers], ids=["accuracy", "loss"])
def test_clients_are_judged_by_the_test_samples_that_were_held_out_of_them(make) -> None:
    data = make()
    simulation = simulation_of(data, Linear if data.classes else Line, evaluation=EvaluationOptions(diagnostics=EVERY))
    models = models_of(simulation)
    measured = simulation.evaluator(models)
    column = "test_accuracy_by_client" if data.classes else "test_loss_by_client"
    for r, row in enumerate(models):
        each = outcomes(simulation, row, data.test_x, data.test_y)
        by_client = [np.mean([e for e, o in zip(each, data.test_owners, strict=True) if o == i]) for i in range(18)]
        np.testing.assert_allclose(measured.by_client[column][r, :18], by_client, atol=1e-12)
        assert np.isnan(measured.by_client[column][r, 18:]).all()
        assert measured.metrics[column][r] == pytest.approx(np.mean(by_client), abs=1e-12)
        for name, value in naive(by_client, rises=bool(data.classes)).items():
            assert measured.metrics[f"{column}_{name}"][r] == pytest.approx(value, abs=1e-12), name
    assert measured.metrics.keys() <= simulation.column_descriptions.keys()


def test_validation_samples_are_looked_at_without_being_asked_for() -> None:
    """All of each client's, and of both replicates' own; the test set has no owners."""
    evaluation = EvaluationOptions(diagnostics=EVERY)
    partition = Dirichlet(alpha=1.0, validation=0.2)
    simulation = simulation_of(labelled(held=False), clients=10, partition=partition, evaluation=evaluation)
    models = models_of(simulation)
    measured = simulation.evaluator(models).metrics
    for r, row in enumerate(models):
        held = simulation.partition_tables[r].validation
        accuracies, losses = [], []
        for i in range(10):
            own = torch.as_tensor(held.order[held.offsets[i] : held.offsets[i + 1]]).long()
            if not len(own):
                continue
            x, y = simulation.dataset.train_x[own], simulation.dataset.train_y[own]
            accuracies.append(float(np.mean(outcomes(simulation, row, x, y))))
            losses.append(float(nn.functional.cross_entropy(simulation.model.evaluate(row, x), y)))
        assert measured["validation_accuracy"][r] == pytest.approx(np.mean(accuracies), abs=1e-12)
        assert measured["validation_loss"][r] == pytest.approx(np.mean(losses), abs=1e-12)
        for name, value in naive(accuracies, rises=True).items():
            assert measured[f"validation_accuracy_{name}"][r] == pytest.approx(value, abs=1e-12), name


def test_where_clients_own_models_are_scored_the_server_s_is_scored_there() -> None:
    partition = Natural(validation=0.2)
    both = [simulation_of(labelled(), partition=partition, personal=Personal(over)) for over in ("none", "all")]
    (alone, scored) = (simulation.run().final for simulation in both)
    assert not [name for name in scored if name.startswith("validation_")]
    assert alone["validation_accuracy"][0] == pytest.approx(scored["global_validation_accuracy"][0], abs=1e-12)
    assert alone["validation_accuracy_worst10"][0] == pytest.approx(
        scored["global_validation_accuracy_worst10"][0], abs=1e-12
    )


def test_without_a_split_fairness_is_that_of_training_samples_and_says_so() -> None:
    simulation = simulation_of(
        labelled(held=False), evaluation=EvaluationOptions(diagnostics=["fairness"], client_samples=99)
    )
    models = models_of(simulation)
    measured = simulation.evaluator(models)
    for r, row in enumerate(models):
        each = outcomes(simulation, row, simulation.dataset.train_x, simulation.dataset.train_y)
        edges = np.cumsum([0, *SIZES])
        values = [float(np.mean(each[a:b])) for a, b in itertools.pairwise(edges)]
        for name in ("variance", "jain", "best10"):
            found = measured.metrics[f"client_accuracy_{name}"][r]
            assert found == pytest.approx(naive(values, rises=True)[name], abs=1e-12)
    assert (
        "training" in simulation.column_descriptions["client_accuracy_jain"]
        or "own, shifted, data" in (simulation.column_descriptions["client_accuracy_jain"])
    )


def test_spreads_of_a_few_numbers() -> None:
    assert spread(np.array([1.0, 1.0, np.nan]), "jain", True) == 1
    assert spread(np.array([1.0, 0.0, 0.0, 0.0]), "jain", True) == 0.25  # one has everything
    assert np.isnan(spread(np.zeros(3), "jain", True))  # nobody has anything: there is nothing to share
    assert np.isnan(spread(np.full(3, np.nan), "variance", True))
    assert spread(np.arange(100.0), "worst7", True) == 3.0
    assert spread(np.arange(100.0), "worst7", False) == 96.0
    assert spread(np.arange(3.0), "worst10", True) == 0.0  # one client at least


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("fairness", "must be a list"),
        (3, "must be a list"),
        (["fair"], "meant fairness|fairness"),
        (["worst0"], "must be 1 to 100"),
        (["best101"], "must be 1 to 100"),
        (["drift", "drift"], "twice"),
        ([None], "is unknown"),
    ],
)
def test_what_is_no_diagnostic_is_refused(wanted: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EvaluationOptions(diagnostics=wanted)
