"""The quickest executor is found by a trial that leaves nothing behind, and a resumed run goes on with it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.data.datasets import Digits
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.trainer import trial
from fedsim.trainer.trial import MAX_TIMED_ROWS, MIN_STEP_SECONDS, TimingRows, fastest_contender, make_timed_step

CPU = torch.device("cpu")


class Clock:
    """Time passes by what contenders say they take, and others beside them."""

    others = 0.0

    def __init__(self, monkeypatch, **seconds) -> None:
        self.now, self.own = 0.0, 0.0
        self.rows, self.seconds = {name: [] for name in seconds}, seconds
        monkeypatch.setattr(trial.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(trial.time, "thread_time", lambda: self.own)

    def contenders(self):
        return {name: lambda rows, name=name: self.works(name, rows) for name in self.seconds}

    def works(self, name: str, rows: int) -> None:
        self.rows[name].append(rows)
        taken = self.seconds[name](rows)
        if taken == math.inf:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        self.now, self.own = self.now + taken + self.others, self.own + taken


def per_row(seconds: float, once: float = 0.0):
    return lambda rows: once + seconds * rows


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        ({"fused": per_row(0.02), "vmap": per_row(0.01), "loop": per_row(0.03)}, "vmap"),
        ({"fused": per_row(0.02), "vmap": per_row(0.025), "loop": per_row(0.01)}, "loop"),
        ({"fused": per_row(0.01), "vmap": per_row(0.0097), "loop": per_row(0.03)}, "fused"),  # not worth a change
        ({"fused": per_row(0.02), "vmap": per_row(math.inf), "loop": per_row(0.01)}, "loop"),  # has no room
        ({"fused": per_row(math.inf), "vmap": per_row(math.inf)}, "fused"),
        ({"vmap": per_row(0.0001, 0.005), "loop": per_row(0.001)}, "vmap"),  # the overhead is shared by many rows
        ({"loop": per_row(0.02), "vmap": per_row(0.01, 0.012)}, "vmap"),  # also where one row takes long
    ],
)
def test_the_quickest_wins(monkeypatch, seconds, winner):
    clock = Clock(monkeypatch, **seconds)
    assert fastest_contender(clock.contenders(), 100, CPU) == winner


def test_what_takes_no_time_is_left_to_the_rule(monkeypatch):
    clock = Clock(monkeypatch, vmap=per_row(MIN_STEP_SECONDS / MAX_TIMED_ROWS / 2), loop=per_row(0.0))
    assert fastest_contender(clock.contenders(), 1000, CPU) == "vmap"
    assert max(clock.rows["vmap"]) == MAX_TIMED_ROWS
    assert not clock.rows["loop"]


def test_the_hopeless_are_not_timed_again(monkeypatch):
    clock = Clock(monkeypatch, vmap=per_row(0.1), loop=per_row(1.0), fused=per_row(0.11))
    assert fastest_contender(clock.contenders(), 4, CPU, min_count=2) == "vmap"
    assert [len(clock.rows[name]) for name in ("vmap", "loop", "fused")] == [7, 2, 7]
    assert {rows for seen in clock.rows.values() for rows in seen} == {2}


def test_who_needs_longer_for_few_rows_than_others_for_all_is_not_given_all(monkeypatch):
    """Gradients sample by sample, row by row: a look at 64 rows takes half a minute."""
    clock = Clock(monkeypatch, vmap=per_row(0.0005), loop=per_row(0.4))
    assert fastest_contender(clock.contenders(), 64, CPU) == "vmap"
    assert clock.rows["loop"] == [1, 1]
    clock = Clock(monkeypatch, vmap=per_row(0.0005), loop=per_row(0.09))  # below three times 64 rows of vmap
    assert fastest_contender(clock.contenders(), 64, CPU) == "vmap"
    assert max(clock.rows["loop"]) == MAX_TIMED_ROWS


def test_a_moment_of_noise_does_not_decide(monkeypatch):
    """The stated one's first looks took four times as long: cold memory, somebody else's work."""
    hiccups = iter([0.1, 0.4, 0.4, 0.4, *[0.1] * 9])
    clock = Clock(monkeypatch, vmap=lambda rows: next(hiccups), loop=lambda rows: 0.15)
    assert fastest_contender(clock.contenders(), 1, CPU) == "vmap"


def test_who_works_alone_is_not_charged_for_others(monkeypatch):
    """Rows in one thread: somebody else's second beside every look leaves the order as it is."""
    clock = Clock(monkeypatch, vmap=per_row(0.02), loop=per_row(0.01))
    clock.others = 1.0
    assert fastest_contender(clock.contenders(), 1, CPU, per_thread=True) == "loop"
    assert fastest_contender(clock.contenders(), 1, CPU) == "vmap"


class Normalised(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 10))


def simulation_of(model=Normalised, **options) -> Simulation:
    local = SGD(lr=0.1, epochs=1, batch_size=40, drop_last=False)
    return Simulation(Digits(), model, clients=9, local=local, rounds=3, **options)


@pytest.fixture
def told(monkeypatch):
    """What the trial answers, and how often it was asked."""
    answers = []

    def answer(contenders, rows, device, least, alone):
        for contender in contenders.values():
            contender(rows)
        answers.append(list(contenders))
        return told.winner

    def told(winner: str) -> list[list[str]]:
        told.winner = winner
        return answers

    monkeypatch.setattr(trial, "FASTEST_EXECUTOR_NAMES", {})
    monkeypatch.setattr(trial, "fastest_contender", answer)
    return told


@pytest.mark.sampled(1)
@pytest.mark.parametrize("winner", ["fused", "vmap", "loop"])
def test_a_trial_leaves_nothing_behind(told, winner):
    asked = told(winner)
    found, named = simulation_of(), simulation_of(execution=Execution(winner))
    assert torch.equal(found.run().state.model, named.run().state.model)
    assert found.trainer.executor_choice.executor == found.trainer.executor_choice.executor == winner
    assert asked == [["vmap", "fused", "loop"]]


def test_what_is_timed_is_one_step_of_the_first_rows() -> None:
    """Of clients that have several; rows, parameters and rates are those of the same clients."""
    simulation = simulation_of()
    everyone = np.ones((1, 9))
    plan = simulation.trainer.batches.plan(simulation.federation.make_cohort(everyone, everyone), 0)
    assert plan.load.steps.min() > 1
    seen: list[tuple[list[int], list[float], list[float]]] = []

    class Watching:
        def run(self, chunk: Any, carry: dict[str, torch.Tensor], rates: torch.Tensor, deployed: None) -> None:
            seen.append((chunk.steps.tolist(), carry["params"][:, 0].tolist(), rates[0].tolist()))

    numbers = torch.arange(9.0)
    rows = TimingRows({"params": numbers[:, None]}, 0.1 * numbers.expand(int(plan.load.steps.max()), -1), None)
    make_timed_step(Watching(), plan, rows)(4)  # type: ignore[arg-type]
    ((steps, taken, rates),) = seen
    assert steps == [1] * 4
    assert len(set(taken)) == 4
    assert rates == pytest.approx([0.1 * number for number in taken])


def test_it_is_held_once_for_what_is_alike(told):
    asked = told("loop")
    for seed in (0, 1):
        assert simulation_of(seeds=[seed]).run().final
    assert len(asked) == 1
    simulation_of(execution=Execution(dtype="float64")).run()
    assert len(asked) == 2


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_what_was_found(told, tmp_path):
    told("loop")
    whole = simulation_of().run()
    half = simulation_of()
    half.rounds = 1
    half.run(tmp_path)
    trial.FASTEST_EXECUTOR_NAMES.clear()
    asked = told("vmap")
    before = len(asked)
    resumed = simulation_of()
    assert torch.equal(resumed.run(tmp_path, resume=True).state.model, whole.state.model)
    assert resumed.trainer.executor_choice.executor == "loop"
    assert len(asked) == before
    assert simulation_of(execution=Execution("vmap")).run(tmp_path, resume=True)  # who names one gets it


ALONE = {
    "asked for": (Normalised, {"execution": Execution("loop")}, "loop"),
    "no trial": (Normalised, {"execution": Execution(trial=False)}, "vmap"),
    "deterministic": (Normalised, {"execution": Execution(deterministic=True)}, "vmap"),
    "linear layers": (lambda: Linear((8, 8), 10), {}, "fused"),
}


@pytest.mark.parametrize("case", ALONE)
def test_where_there_is_nothing_to_try(told, monkeypatch, case):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, options, executor = ALONE[case]
    asked = told("none")
    simulation = simulation_of(model, **options)
    simulation.run()
    assert simulation.trainer.executor_choice.executor == executor
    assert not asked


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_the_loop_evaluates_too(executor):
    simulation = simulation_of(execution=Execution(executor), evaluation=EvaluationOptions(every=1))
    assert simulation.evaluator.loop == (executor == "loop")
    assert simulation.run().final
