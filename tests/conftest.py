"""What many tests share: scripted availability, a small regression with unequal clients, a run seen round by round."""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from absl import logging as absl_logging
from torch import nn

from fedsim import Simulation
from fedsim.availability import Availability
from fedsim.core import Report
from fedsim.data.datasets import Dataset
from fedsim.strategies import State


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(n)` n cases stay quick, spread evenly over its table; the others are slow tests."""
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tables.values():
        kept = cases[0].get_closest_marker("sampled").args[0]
        quick = {k * len(cases) // kept for k in range(kept)}
        for k, case in enumerate(cases):
            if k not in quick:
                case.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _settings_are_logged_again() -> Iterator[None]:
    """The command line gives each warning about settings once in a process: no test is silenced by an earlier one."""
    yield
    logging.getLogger("fedsim.run.settings").filters.clear()


class Scripted(Availability):
    """Who takes part is written down: counts [T, R, m], probabilities [T, R, m] (or a number for all).

    The last round goes on, for runs that end early.
    """

    def __init__(self, counts: Any, probabilities: Any = 1.0) -> None:
        self.script = np.asarray(counts)
        self.truth = np.broadcast_to(np.asarray(probabilities, dtype=float), self.script.shape)

    def probabilities(self, t: int) -> np.ndarray:
        return self.truth[min(t, len(self.truth) - 1)]

    def counts(self, t: int) -> np.ndarray:
        return self.script[min(t, len(self.script) - 1)]


class Regression(nn.Module):
    """Linear regression that starts at random, so that replicates differ from the first round."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@dataclass
class Played:
    """One round: the state before, what the server was told, the state after."""

    t: int
    before: State
    report: Report
    after: State


def play(simulation: Simulation, rounds: int | None = None) -> Iterator[Played]:
    """The rounds of a simulation, one by one; states are copies, since client memory may be updated in place."""
    strategy, state = simulation.strategy, simulation.initial_state()
    memory = simulation.trainer.initial_memory(state.model)
    simulation.round_clock.start_round()
    simulation.uplink.add_stage_memory(memory, simulation.federation, state.model)
    for t in range(simulation.rounds if rounds is None else rounds):
        before = copy.deepcopy(state)
        active = simulation.delayed_updates.idle_clients(simulation.availability.sample(t), memory)
        cohort = simulation.round_clock(strategy.cohort(state, active), t)
        report = simulation.trainer.run(strategy.start(state, cohort), cohort, t, state.model, memory)
        report = simulation.uplink(simulation.delayed_updates(report, memory), memory)
        state = strategy.aggregate(state, report, t)
        yield Played(t, before, report, copy.deepcopy(state))


def regression_of(sizes: tuple[int, ...], features: int = 3, seed: int = 0) -> Dataset:
    """Client i holds sizes[i] samples of its own linear law."""
    draw = np.random.default_rng(seed)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    x = draw.standard_normal((len(owners), features))
    y = np.einsum("nf,nf->n", x, draw.standard_normal((len(sizes), features))[owners]) + owners
    return Dataset("regression", torch.as_tensor(x), torch.as_tensor(y), loss="squared", owners=torch.as_tensor(owners))


@pytest.fixture(scope="session", autouse=True)
def keep_captured_output_open() -> None:
    """absl, which tensorboard imports, logs to the standard error that it finds at its import. Hydra shuts all log
    handlers down, and absl's then closes that stream: within pytest it would be the file that pytest captures into."""
    absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors are tiny here, and threads that wait for one another on a busy machine cost more than they bring."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_trial(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors by the stated rule: a trial looks at the clock, by which equal runs may get unlike ones."""
    if "trial" not in request.module.__name__:
        monkeypatch.setattr("fedsim.trainer.trial.MIN_STEP_SECONDS", math.inf)


@pytest.fixture(scope="session", name="Scripted")
def scripted_fixture() -> type[Scripted]:
    return Scripted


@pytest.fixture(scope="session", name="Regression")
def regression_model_fixture() -> type[Regression]:
    return Regression


@pytest.fixture(scope="session", name="play")
def play_fixture() -> Any:
    return play


@pytest.fixture(scope="session", name="regression_of")
def regression_of_fixture() -> Any:
    return regression_of


@pytest.fixture
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra composes all a first time to learn hydra.mode, which only our sweeps set; that is most of a short test."""
    from hydra._internal.hydra import Hydra

    genuine = Hydra.get_mode

    def mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        set_by = [word for word in overrides if word.lstrip("+").startswith(("sweep", "hydra", "experiment"))]
        return genuine(hydra, config_name, overrides) if set_by else None

    monkeypatch.setattr(Hydra, "get_mode", mode)
