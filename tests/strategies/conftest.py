"""The small regression that strategies with memory train on."""

from __future__ import annotations

import dataclasses

import library
import numpy as np
import pytest
import torch
from naive_strategies import (
    CLIENTS,
    LRS,
    ROUNDS,
    SCHEDULES,
    SEEDS,
    SIZES,
    STEPS,
    script,
)

from fedsim import Execution, Simulation
from fedsim.local import SGD


@pytest.fixture(name="regression")
def regression_fixture(Regression, regression_of, Scripted):
    """Builds a simulation on the small regression."""

    def build(strategy, availability=None, schedule="constant", dataset=None, **options) -> Simulation:
        made = script() if availability is None else availability
        rule = {"lr": list(LRS), "steps": STEPS, "batch_size": None} | options.pop("rule", {})
        return Simulation(
            regression_of(SIZES) if dataset is None else dataset,
            Regression,
            clients=CLIENTS,
            availability=Scripted(made) if isinstance(made, np.ndarray) else made,
            strategy=strategy,
            local=SGD(schedule=SCHEDULES[schedule][0], **rule),
            rounds=ROUNDS,
            **{"seeds": SEEDS, "execution": Execution(dtype="float64", chunk=3)} | options,
        )

    return build


@pytest.fixture(name="federated", scope="session")
def federated_fixture(regression_of, Scripted):
    """Builds five rounds of a strategy on the small regression; `rule` replaces plain full-batch SGD.

    A federation is built once and lent to one strategy after another: building is most of such a run.
    """
    built, alive = {}, []  # a key names objects by their addresses, which are theirs as long as they live

    def build(strategy, counts=None, rule=SGD, schedule="constant", seeds=SEEDS, work=None, **options) -> Simulation:
        rates = {"lr": [LRS[SEEDS.index(seed)] for seed in seeds], "steps": STEPS, "batch_size": None}
        counts = library.script() if counts is None else counts
        options = {"execution": Execution(dtype="float64", chunk=3)} | options
        options |= {"work": options.pop("clients_work")} if "clients_work" in options else {}
        key = repr(
            (
                strategy.needs_full_gradients,
                counts.tolist(),
                rule,
                schedule,
                seeds,
                work,
                sorted(options.items(), key=str),
            )
        )
        alive.append(options)
        if key not in built or "dataset" in options:
            built[key] = Simulation(
                options.pop("dataset", None) or regression_of(SIZES),
                library.Line,
                clients=CLIENTS,
                availability=Scripted(counts[:, [SEEDS.index(s) for s in seeds]], np.array(library.PROBABILITIES)),
                strategy=strategy,
                local=rule(schedule=SCHEDULES[schedule][0], **rates | (work or {})),
                rounds=len(counts),
                seeds=seeds,
                **options,
            )
        built[key].server = dataclasses.replace(built[key].server, strategy=strategy)
        return built[key]

    return build


@pytest.fixture(name="follows")
def follows_fixture(federated, play):
    """Compares a strategy with its naive version, round by round."""

    def run(strategy, naive, **options):
        return library.compare(federated(strategy, **options), naive, play)

    return run


@pytest.fixture(name="models")
def models_fixture(federated, play):
    """[T, R, d] the models after each round of a strategy."""

    def run(strategy, **options) -> torch.Tensor:
        return torch.stack([played.after.model for played in play(federated(strategy, **options))])

    return run
