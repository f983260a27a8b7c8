"""A chunk that the device has no room for runs again in halves: the same numbers, said once, nothing half applied."""

from __future__ import annotations

import copy
import dataclasses
import sys

import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.app.cli import main
from fedsim.core import RunError
from fedsim.data.datasets import GaussianMean
from fedsim.evaluation import Evaluator
from fedsim.local import APFL, SGD, PoFL
from fedsim.models import Mean
from fedsim.shift import Location
from fedsim.strategies import FedAvg, FedAWE
from fedsim.trainer.device_memory import is_out_of_memory


def small_device(simulation: Simulation, room: int) -> list[int]:
    """Let the device hold so many rows: a larger chunk works, and fails when its work is done. The sizes it saw."""
    run, seen = simulation.trainer.executor.run, []

    def limited(chunk, carry, rates, deployed):
        seen.append(len(chunk.steps))
        done = run(chunk, carry, rates, deployed)
        if len(chunk.steps) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return done

    simulation.trainer.executor.run = limited
    return seen


def simulation_of(regression_of, Regression, **options) -> Simulation:
    sizes = (5, 9, 4, 12, 7, 6, 8)
    defaults = {"execution": Execution("loop", chunk=6), "seeds": (1, 2), "rounds": 4}
    defaults |= {"evaluation": EvaluationOptions(every=1)}
    return Simulation(regression_of(sizes), Regression, clients=len(sizes), **defaults | options)


RULES = {
    "sgd": lambda: SGD(lr=0.05, epochs=1, batch_size=3),  # rows of unequal length: sorted by their steps
    "apfl": lambda: APFL(lr=0.05, steps=3, batch_size=3, adaptive=True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_halved_chunks_give_the_numbers_of_large_ones(regression_of, Regression, rule, executor, caplog, tmp_path):
    """Bit for bit row by row; vmapped, to rounding, as for every other chunk size."""

    def run(room: int | None):
        options = {"strategy": FedAWE(), "local": RULES[rule]()}
        execution = Execution(executor, chunk=6, dtype="float64")
        simulation = simulation_of(regression_of, Regression, execution=execution, **options)
        seen = [] if room is None else small_device(simulation, room)
        state, memory = simulation.initial_state(), None
        memory = simulation.trainer.initial_memory(state.model)
        reports = []
        for t in range(simulation.rounds):
            cohort = simulation.strategy.cohort(state, simulation.availability.sample(t))
            start = simulation.strategy.start(state, cohort)
            report = simulation.trainer.run(start, cohort, t, state.model, memory)
            state = simulation.strategy.aggregate(state, report, t)
            reports.append(copy.deepcopy(report.loss))
        return state, memory, reports, simulation, seen

    plenty, halved = run(None), run(2)
    rounding = {"rtol": 0, "atol": 0 if executor == "loop" else 1e-12}
    for field in dataclasses.fields(plenty[0]):
        torch.testing.assert_close(getattr(halved[0], field.name), getattr(plenty[0], field.name), **rounding)
    for name, value in plenty[1].named_tensors().items():
        torch.testing.assert_close(halved[1].named_tensors()[name], value, **rounding)
    torch.testing.assert_close(halved[2], plenty[2], **rounding)
    simulation, seen = halved[3:]
    assert seen[:3] == [5, 2, 2]  # 14 rows in three chunks of at most six; then in halves
    assert max(seen[1:]) == 2
    assert simulation.trainer.executor_choice.chunk == 2
    told = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert len(told) == 1
    assert "chunks of 5 rows become 2" in told[0]
    assert "trainer.chunk=2" in told[0]


@pytest.mark.slow
def test_what_the_server_remembers_is_written_once(caplog):
    """A shift with inertia moves its running mean at the start of a round, whose work is then done twice."""

    def run(room: int | None):
        simulation = Simulation(
            GaussianMean(clients=5),
            Mean,
            clients=5,
            shift=Location(deploy="round", inertia=0.5),
            local=PoFL(lr=0.05, steps=3, history=3),
            strategy=FedAvg(),
            rounds=6,
            execution=Execution(executor="loop"),
            evaluation=EvaluationOptions(every=3),
        )
        if room:
            small_device(simulation, room)
        return simulation.run()

    plenty, halved = run(None), run(1)
    assert torch.equal(halved.state.model, plenty.state.model)
    times = {"seconds"}
    assert [{k: v for k, v in row.items() if k not in times} for row in halved.history] == [
        {k: v for k, v in row.items() if k not in times} for row in plenty.history
    ]


def test_a_device_without_room_for_a_single_row_ends_the_run_by_name(regression_of, Regression):
    simulation = simulation_of(regression_of, Regression)
    small_device(simulation, 0)
    with pytest.raises(RunError, match=r"out of memory on cpu: .*single client.*batch_size"):
        simulation.run()


def test_another_error_is_no_lack_of_memory(regression_of, Regression):
    simulation = simulation_of(regression_of, Regression)

    def broken(*_):
        raise RuntimeError("shapes do not fit")

    simulation.trainer.executor.run = broken
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        simulation.run()
    assert simulation.trainer.executor_choice.chunk == 6


def test_what_the_cpu_says_is_recognised():
    """An allocation that no machine can make, for real."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


def test_what_does_not_run_in_chunks_ends_the_command_with_two_lines(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Evaluator, "__call__", full)
    monkeypatch.setattr(sys, "argv", ["fedsim", "rounds=1", "clients=4", "out=here", "tracking.progress=none"])
    with pytest.raises(SystemExit) as left:
        main()
    first, second = str(left.value.code).splitlines()
    assert "out of memory on device=auto outside local training; lower clients" in first
    assert second == "fedsim: run the same command again"  # it has left no checkpoint
