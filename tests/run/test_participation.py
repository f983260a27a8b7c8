"""Absent clients, drift, staleness and utility, against loops over rounds and clients that were written down."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability.clock import ConstantDelay
from fedsim.data.datasets import Dataset
from fedsim.data.partition import Dirichlet, Natural
from fedsim.models import Linear
from fedsim.run.tracking import Tracking
from fedsim.strategies import FedAvgAll, FedAWE

# [T, R, m]: client 4 never comes in the first replicate; round 2 is empty in the second; client 1 counts twice once.
COUNTS = np.array(
    [
        [[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]],
        [[0, 2, 0, 0, 0], [0, 1, 1, 1, 0]],
        [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0]],
        [[1, 0, 0, 0, 0], [0, 0, 1, 0, 1]],
    ]
)
SIZES = (9, 12, 7, 10, 15)
ALL = ["absent", "drift", "staleness", "utility"]
QUIET = Tracking(progress="none", tensorboard=False)


def data(held: bool = True) -> Dataset:
    draw = np.random.default_rng(1)
    owners = np.repeat(np.arange(5), SIZES)
    x, y = draw.standard_normal((len(owners), 4)), draw.integers(0, 3, len(owners))
    test = draw.standard_normal((40, 4)), draw.integers(0, 3, 40)
    whose = torch.as_tensor(np.arange(40) % 5) if held else None
    return Dataset(
        "five", *map(torch.as_tensor, (x, y, *test)), classes=3, owners=torch.as_tensor(owners), test_owners=whose
    )


def simulation_of(Scripted: Any, dataset: Dataset, **given: Any) -> Simulation:
    options = {
        "clients": 5,
        "rounds": len(COUNTS),
        "seeds": (0, 1),
        "availability": Scripted(COUNTS),
        "evaluation": EvaluationOptions(every=1, diagnostics=ALL, client_samples=99),
        "execution": Execution(dtype="float64"),
    } | given
    return Simulation(dataset, Linear, **options)


def of(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    """[T + 1, R]"""
    return np.array([row[name] for row in rows]).reshape(-1, 2)


def ages() -> np.ndarray:
    """[T + 1, R, m] rounds since each client took part, by looking back round by round."""
    found = np.zeros((len(COUNTS) + 1, 2, 5))
    for t in range(len(COUNTS)):
        for r in range(2):
            for i in range(5):
                back = t
                while back >= 0 and not COUNTS[back, r, i]:
                    back -= 1
                found[t + 1, r, i] = t - back
    return found


def test_staleness_is_that_of_looking_back(Scripted, tmp_path) -> None:
    result = simulation_of(Scripted, data()).run(tmp_path, tracking=QUIET)
    np.testing.assert_array_equal(of(result.history, "staleness_mean"), ages().mean(2))
    np.testing.assert_array_equal(of(result.history, "staleness_max"), ages().max(2))
    told = json.loads((tmp_path / "summary.json").read_text())["staleness"]
    assert told["tau_max"] == ages().max((0, 2)).tolist()
    np.testing.assert_allclose(told["tau_avg"], ages()[1:].mean((0, 2)))


def test_staleness_over_all_rounds_does_not_depend_on_when_is_evaluated(Scripted, tmp_path) -> None:
    run = simulation_of(Scripted, data(), evaluation=EvaluationOptions(every=99, diagnostics=["staleness"]))
    run.run(tmp_path, tracking=QUIET)
    told = json.loads((tmp_path / "summary.json").read_text())["staleness"]
    assert told["tau_max"] == ages().max((0, 2)).tolist()


@pytest.mark.parametrize("strategy", [None, FedAWE, FedAvgAll])
def test_drift_is_how_far_local_work_leads_from_the_server_s_model(Scripted, play, strategy) -> None:
    def run() -> Simulation:
        return simulation_of(Scripted, data(), strategy=strategy() if strategy else None)

    found = of(run().run(tracking=QUIET).history, "client_drift")
    assert np.isnan(found[0]).all()
    for played in play(run()):
        for r in range(2):
            far = []
            for row in range(len(played.report.cohort)):
                count = int(played.report.cohort.host_index.multiplicity[row])
                if count and played.report.cohort.host_index.rows[row] // 5 == r:
                    far += count * [float((played.report.end[row] - played.before.model[r]).norm())]
            expected = np.mean(far) if far else np.nan
            np.testing.assert_allclose(found[played.t + 1, r], expected, rtol=1e-10)


@pytest.mark.parametrize("where", ["test", "validation", "training", "other owners"])
def test_absent_clients_by_the_nearest_samples_there_are(Scripted, where) -> None:
    dataset = data(held=where in ("test", "other owners"))
    partition = {
        "test": None,
        "validation": Natural(validation=0.3),
        "training": None,
        "other owners": Dirichlet(alpha=5.0),
    }[where]
    simulation = simulation_of(Scripted, dataset, partition=partition)
    prefix = {"test": "test_accuracy_by_client", "validation": "validation_accuracy"}.get(where, "client_accuracy")
    seen: list[np.ndarray] = []
    genuine = simulation.evaluator.__class__.__call__

    class Noting(type(simulation.evaluator)):  # type: ignore[misc]
        def __call__(self, *given: Any) -> Any:
            found = genuine(self, *given)
            seen.append(found.by_client[prefix])
            return found

    simulation.evaluator.__class__ = Noting
    history = simulation.run(tracking=QUIET).history
    for t, values in enumerate(seen):
        for r in range(2):
            gone = [i for i in range(5) if not t or not COUNTS[t - 1, r, i]]
            never = [i for i in range(5) if not COUNTS[:t, r, i].any()]
            for name, who in (("absent", gone), ("unseen", never)):
                expected = np.mean([values[r, i] for i in who]) if who else np.nan
                np.testing.assert_allclose(of(history, f"{prefix}_{name}")[t, r], expected, err_msg=f"{name} {t} {r}")
    assert f"{prefix}_absent" in simulation.column_descriptions


def test_utility_is_what_a_client_gains_per_round_in_which_it_could_take_part(Scripted) -> None:
    simulation = simulation_of(Scripted, data())
    result = simulation.run(tracking=QUIET)
    first, last = simulation.model.initial((0, 1)).double(), result.final_models
    for r in range(2):
        each = []
        for i in range(5):
            own = simulation.dataset.owners == i
            x, y = simulation.dataset.train_x[own], simulation.dataset.train_y[own]
            before, after = (
                float(torch.nn.functional.cross_entropy(simulation.model.evaluate(model[r], x), y))
                for model in (first, last)
            )
            chances = int((COUNTS[:, r, i] > 0).sum())
            each += [(before - after) / chances] if chances else []
        row = result.history[-2 + r]
        assert row["availability_normalised_utility"] == pytest.approx(np.mean(each), rel=1e-9)
        assert row["availability_normalised_utility_cv"] == pytest.approx(np.std(each) / np.mean(each), rel=1e-9)


def test_a_resumed_run_remembers_who_was_there(Scripted, tmp_path) -> None:
    whole = simulation_of(Scripted, data()).run(tmp_path / "whole", tracking=QUIET)
    simulation_of(Scripted, data(), rounds=2).run(tmp_path / "halves", tracking=QUIET)
    resumed = simulation_of(Scripted, data()).run(tmp_path / "halves", resume=True, tracking=QUIET)
    for row, other in zip(whole.history, resumed.history, strict=True):
        del row["seconds"], other["seconds"]
        np.testing.assert_equal(row, other)
    one, two = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "halves"))
    assert one["staleness"] == two["staleness"]


def test_what_is_not_asked_for_is_neither_remembered_nor_told(Scripted, tmp_path) -> None:
    run = simulation_of(Scripted, data(), evaluation=EvaluationOptions(every=1))
    assert run.participation.memory() == {}
    result = run.run(tmp_path, tracking=QUIET)
    assert not {"client_drift", "staleness_max"} & set(result.metric_names)
    assert "staleness" not in json.loads((tmp_path / "summary.json").read_text())


@pytest.mark.filterwarnings("error")
def test_where_nobody_has_gained_anything_utility_is_zero_and_has_no_spread(Scripted) -> None:
    """Rows that are under way until the run is over."""
    simulation = simulation_of(Scripted, data(), delay=ConstantDelay(9), strategy=FedAvgAll())
    history = simulation.run(tracking=QUIET).history
    assert of(history, "availability_normalised_utility")[1:].tolist() == [[0.0, 0.0]] * len(COUNTS)
    assert np.isnan(of(history, "availability_normalised_utility_cv")).all()
