"""What a run is composed of is built without side effects: files, other objects and the process are as before."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim import Simulation
from fedsim.availability.clock import AllWork, NoClock, NoDelay
from fedsim.core.errors import ConfigError
from fedsim.core.ranks import ProcessRanks
from fedsim.data.datasets import Dataset, Digits
from fedsim.data.partition import IID
from fedsim.evaluation import EvaluationOptions
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.run.checkpoint import Checkpointer
from fedsim.run.delayed_updates import DelayedUpdates
from fedsim.run.divergence import DivergenceGuard
from fedsim.run.folder import RunFolder
from fedsim.run.parts import Parts
from fedsim.run.population import Population
from fedsim.run.progress import Progress
from fedsim.run.round_clock import RoundClock
from fedsim.run.setup import Setup
from fedsim.run.tracker import Tracker
from fedsim.run.tracking import Tracking
from fedsim.run.tracking.metrics_csv import MetricsCSV
from fedsim.run.wiring import ComputeSettings
from fedsim.shift import NoShift
from fedsim.strategies import FedAvg
from fedsim.trainer import Execution, Trainer, TrainerFactory

COLUMNS = {"round": "when", "seed": "who", "test_loss": "how"}


def built() -> Simulation:
    return Simulation(Digits(), Linear, clients=4, rounds=1, seeds=(0, 1), execution=Execution(device="cpu"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_run_folder_is_as_it_was_until_it_is_prepared(tmp_path: Path) -> None:
    for name in ("summary.json", "checkpoint.safetensors", "metrics.csv"):
        (tmp_path / name).write_text("of an older run\n")
    before = contents(tmp_path)
    folder = RunFolder(tmp_path, COLUMNS, Progress.at_start(2), is_complete=False)
    assert contents(tmp_path) == before
    folder.prepare(None, {}, torch.device("cpu"), 1, {}, tmp_path / "checkpoint.safetensors")
    folder.close(ignore_errors=False)
    assert sorted(contents(tmp_path)) == ["environment.json", "metrics.csv"]


def test_metrics_are_written_only_by_open(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    with open(tmp_path / "other", "a") as file:
        MetricsCSV(path, COLUMNS, file, [])
    assert not path.exists()
    MetricsCSV.open(path, COLUMNS).close()
    assert path.read_text().endswith("round,seed,test_loss\n")


def test_a_tracker_changes_neither_progress_nor_clock() -> None:
    run = built()
    run.round_clock.seconds[:] = 7.0
    progress = Progress(rounds=0, samples=[3, 3])
    before = dataclasses.asdict(progress)
    memory = run.trainer.initial_memory(run.initial_state().model)
    checkpoints, guard = Checkpointer(None, 1, {}, memory), DivergenceGuard(run.federation, "FedAvg")
    Tracker(run, None, Tracking(progress="none"), checkpoints, guard, progress)
    assert dataclasses.asdict(progress) == before
    assert run.round_clock.seconds.tolist() == [7.0, 7.0]


def test_a_trainer_leaves_the_allocator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Library:
        @staticmethod
        def mallopt(option: int, value: int) -> int:
            calls.append(option)
            return 1

    genuine = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *a, **k: Library() if name is None else genuine(name, *a, **k))
    monkeypatch.setattr("sys.platform", "linux")
    run = built()
    Trainer(run.trainer.local_rule, run.model, run.shift, run.trainer.batches, run.execution)
    assert calls == []
    run.run(tracking=Tracking(progress="none"))
    assert calls, "the run itself configures the allocator"


def test_clock_work_delay_and_shift_are_set_up_by_who_composes() -> None:
    run, calls = built(), []

    class Spy:
        def setup(self, *arguments: object) -> None:
            calls.append(type(self).__name__)

    class SpyClock(Spy, NoClock): ...

    class SpyWork(Spy, AllWork): ...

    class SpyDelay(Spy, NoDelay): ...

    class SpyShift(Spy, NoShift): ...

    pace = RoundClock(SpyClock(), SpyWork(), run.trainer, run.traffic)
    delivery = DelayedUpdates(SpyDelay(), pace, run.strategy, run.trainer)
    contamination = run.training.contamination
    trainers = TrainerFactory(run.data, SpyShift(), run.model, contamination, run.execution)
    assert calls == []
    pace.setup()
    delivery.setup()
    trainers.setup_shift()
    assert calls == ["SpyClock", "SpyWork", "SpyDelay", "SpyShift"]


def test_a_population_needs_no_model() -> None:
    """The first step of a setup stands alone, and leaves the parts as they are."""
    x = torch.arange(12.0)[:, None]
    dataset = Dataset("counts", x, x[:, 0], loss="squared")
    parts = Parts.copy_of(dataset, partition=IID())
    before = {field.name: getattr(parts, field.name) for field in dataclasses.fields(parts)}
    compute = ComputeSettings(torch.device("cpu"), torch.float32, ProcessRanks(), "device")
    population = Population.build(parts, 3, (0, 1), compute)
    assert population.federation.num_replicates == 2
    assert population.data_with_newcomers is population.data
    for table in population.tables:
        assert np.sort(table.order).tolist() == list(range(12))
        assert table.sizes.tolist() == [4, 4, 4]
    assert all(getattr(parts, name) is part for name, part in before.items())


def test_a_population_refuses_numbers_for_other_seeds() -> None:
    """Before any sample is dealt out: the partition is not asked."""

    class Untouched(IID):
        def split(self, *arguments: Any) -> Any:
            raise AssertionError("the samples were dealt out")

    x = torch.arange(12.0)[:, None]
    parts = Parts.copy_of(
        Dataset("counts", x, x[:, 0], loss="squared"), partition=Untouched(), strategy=FedAvg(server_lr=[0.5, 1.0])
    )
    compute = ComputeSettings(torch.device("cpu"), torch.float32, ProcessRanks(), "device")
    with pytest.raises(ConfigError, match=r"strategy\.server_lr has 2 entries, but there are 3 seeds"):
        Population.build(parts, 3, (0, 1, 2), compute)


def test_a_simulation_describes_its_arguments() -> None:
    described = inspect.cleandoc(Setup.__doc__ or "").split("Args:")[1]
    names = {name for line in re.findall(r"^    ([\w, ]+):", described, re.M) for name in line.split(", ")}
    assert names == inspect.signature(Simulation).parameters.keys()


def test_steps_of_a_setup_cannot_be_written_into() -> None:
    run = built()
    for step, name in (
        (run.components, "strategy"),
        (run.population, "data"),
        (run.server, "model"),
        (run.training, "trainer"),
        (run.measurement, "evaluator"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(step, name, None)
        assert getattr(run, name, None) is getattr(step, name)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "batch_size",
            r"argument 'batch_size'; give it to the local rule: local=SGD\(batch_size=32\)$",
        ),
        ("stratgy", r"argument 'stratgy'; did you mean 'strategy'\?$"),
    ],
)
def test_an_unknown_argument_of_a_simulation_says_where_it_belongs(argument: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Simulation(Digits(), Linear, **{argument: 8})


def test_each_remedy_for_an_unknown_argument_works() -> None:
    names = {"SGD": SGD, "EvaluationOptions": EvaluationOptions, "Execution": Execution}
    for key, remedy in Setup.config_key_by_argument.items():
        assert key not in inspect.signature(Simulation.__init__).parameters
        code = remedy.split(": ", 1)[1]
        if key != "out":  # an argument of run, not of a constructor
            eval(f"dict({code})", names)
    assert "out" in inspect.signature(Simulation.run).parameters
