"""Bytes between server and clients, counted by hand: what travels, to whom, in which type."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim import ConfigError, EvaluationOptions, Execution, Simulation
from fedsim.data.datasets import Dataset, Pricing
from fedsim.data.partition import Natural
from fedsim.local import SGD, ProFL
from fedsim.models import Mean
from fedsim.models.selectors import ByName, Everything, Head, Normalisation, Selector
from fedsim.run.tracking import Tracking
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.shift import Demand
from fedsim.strategies import (
    AREA,
    F3AST,
    MIFA,
    AmplifiedScaffold,
    FedAU,
    FedAvg,
    FedAvgAll,
    FedAvgKnown,
    FedAWE,
    FedOpt,
    FedPBC,
    FedProx,
    FedVARP,
    Focus,
    LocalOnly,
    PFedAvg,
    Scaffold,
    Strategy,
)
from fedsim.strategies.strategy import KeepsClientModels

COUNTS = np.array([[[1, 1, 0], [0, 0, 1]], [[0, 0, 0], [1, 1, 1]], [[1, 0, 1], [0, 0, 0]], [[0, 3, 1], [0, 0, 2]]])
LINKS = np.array([[2, 1], [0, 3], [2, 0], [2, 1]])  # [T, R]: who takes part, a client that counts thrice once
QUIET = Tracking(progress="none", tensorboard=False)


def build() -> nn.Module:
    """24 weights, 12 and 13 (of them one a counter) of normalisation, 21 of the head."""
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3))


SELECTORS: dict[str, tuple[Selector, int, int]] = {  # the parameters that travel, and the statistics
    "all": (Everything(), 24 + 12 + 21, 13),
    "fedper": (Head(), 24 + 12, 13),
    "lg_fedavg": (Head(travels=True), 21, 0),
    "fedbn": (Normalisation(), 24 + 21, 0),
    "by_name": (ByName(travels=["^2.bias"]), 3, 0),
}
STRATEGIES: dict[str, tuple[Strategy[Any], int, int]] = {  # vectors to a client that takes part, and from it
    "fedavg": (FedAvg(), 1, 1),
    "fedavg_all": (FedAvgAll(), 1, 1),
    "fedavg_known": (FedAvgKnown(), 1, 1),
    "fedprox": (FedProx(), 1, 1),
    "fedopt": (FedOpt(), 1, 1),
    "fedau": (FedAU(), 1, 1),
    "f3ast": (F3AST(), 1, 1),
    "p_fedavg": (PFedAvg(), 1, 1),
    "mifa": (MIFA(), 1, 1),
    "fedvarp": (FedVARP(memory_dtype="float16"), 1, 1),
    "fedpbc": (FedPBC("all"), 1, 1),
    "fedpbc, the linked compute": (FedPBC("active"), 1, 1),
    "fedawe": (FedAWE(), 1, 1),
    "scaffold": (Scaffold(), 2, 2),
    "amplified_scaffold": (AmplifiedScaffold(2), 2, 2),
    "focus": (Focus(0.3), 1, 1),
    "area": (AREA(), 1, 1),
    "local_only": (LocalOnly(), 0, 0),
}


def simulation_of(Scripted: Any, **given: Any) -> Simulation:
    draw = np.random.default_rng(0)
    x, y = torch.as_tensor(draw.standard_normal((12, 4))), torch.as_tensor(draw.integers(0, 3, 12))
    options = {
        "clients": 3,
        "partition": Natural(),
        "availability": Scripted(COUNTS, 0.5),
        "local": SGD(steps=1, batch_size=2),
        "seeds": (0, 1),
        "rounds": len(COUNTS),
        "evaluation": EvaluationOptions(every=1),
    }
    data = Dataset("toy", x, y, classes=3, owners=torch.arange(12) % 3)
    return Simulation(data, build, **options | given)


def expected(down: int, up: int) -> list[dict[str, int]]:
    """The four columns of every row, from bytes per client that takes part."""
    rows = []
    for t in range(len(COUNTS) + 1):
        for r in range(2):
            last, ever = (int(LINKS[t - 1, r]) if t else 0), int(LINKS[:t, r].sum())
            rows.append(
                {"bytes_down": last * down, "bytes_up": last * up}
                | {"total_bytes_down": ever * down, "total_bytes_up": ever * up}
            )
    return rows


def told(rows: list[dict[str, Any]]) -> list[dict[str, int]]:
    return [{name: value for name, value in row.items() if "bytes" in name} for row in rows]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "columns"),
    [*((name, "fedper") for name in STRATEGIES), *((name, of) for of in SELECTORS for name in ("fedpbc", "scaffold"))],
)
def test_bytes_are_those_of_what_travels(name: str, columns: str, Scripted: Any) -> None:
    (strategy, down, up), (selector, trained, averaged) = STRATEGIES[name], SELECTORS[columns]
    if averaged and isinstance(strategy, KeepsClientModels):
        selector, averaged = ByName(stays=["running", "num", *(["^2"] if columns == "fedper" else [])]), 0
    result = simulation_of(Scripted, strategy=strategy, columns=selector).run()
    assert told(result.history) == expected(4 * (down * trained + averaged), 4 * (up * trained + averaged))


def test_numbers_of_double_precision_have_eight_bytes(Scripted: Any) -> None:
    result = simulation_of(Scripted, execution=Execution(dtype="float64")).run()
    assert told(result.history) == expected(8 * 70, 8 * 70)


def test_who_was_available_but_not_chosen_sends_nothing(Scripted: Any) -> None:
    result = simulation_of(Scripted, strategy=F3AST(k=1), columns=Normalisation()).run()
    assert [row["bytes_up"] for row in result.history[2:]] == [4 * 45 * (n > 0) for n in LINKS.ravel()]


def test_a_resumed_run_goes_on_counting_and_the_summary_has_the_sums(Scripted: Any, tmp_path: Any) -> None:
    every = EvaluationOptions(every=3)
    simulation_of(Scripted, strategy=Scaffold(), rounds=2, evaluation=every).run(tmp_path, tracking=QUIET)
    simulation_of(Scripted, strategy=Scaffold(), evaluation=every).run(tmp_path, resume=True, tracking=QUIET)
    per_client = 4 * (2 * 57 + 13)
    rows = expected(per_client, per_client)
    assert told(read_metrics(tmp_path / "metrics.csv")[-4:]) == rows[6:10]
    assert all(type(value) is int for row in told(read_metrics(tmp_path / "metrics.csv")) for value in row.values())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["total_bytes_down"] == summary["total_bytes_up"] == int(LINKS.sum()) * per_client


@pytest.mark.parametrize(("method", "up"), [("mean", 2 + 2 * 2), ("regression", 2 + 3 * (2 + 2))])
def test_what_a_rule_estimates_together_travels_too(method: str, up: int, Scripted: Any) -> None:
    """d = p = 2: df/dθ has four numbers; for the regression, the models and estimates of three steps go up."""
    local = ProFL(steps=1, batch_size=50, history=3, server_derivative=True, server_method=method, box=[0, 5])
    simulation = Simulation(
        Pricing(clients=3, dimension=2),
        Mean,
        clients=3,
        shift=Demand(),
        availability=Scripted(COUNTS > 0),
        local=local,
        seeds=(0, 1),
        rounds=len(COUNTS),
        evaluation=EvaluationOptions(every=1),
    )
    assert told(simulation.run().history) == expected(4 * (2 + 2 * 2), 4 * up)


def test_a_strategy_of_ones_own_says_what_it_sends(Scripted: Any) -> None:
    class Twice(FedAvg):
        vectors_up = 2

    class Half(FedAvg):
        vectors_down = 0.5  # type: ignore[assignment]

    result = simulation_of(Scripted, strategy=Twice(), columns=Normalisation()).run()
    assert told(result.history) == expected(4 * 45, 4 * 90)
    with pytest.raises(ConfigError, match=r"strategy=Half: vectors_down=0\.5 must be a whole number"):
        simulation_of(Scripted, strategy=Half())
