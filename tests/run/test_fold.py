"""Runs folded into one federation: each has the numbers, files and end that it has alone."""

from __future__ import annotations

import functools
import inspect
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedsim import DivergenceError, EvaluationOptions, Execution, Simulation, Tracking
from fedsim.availability import Bernoulli, Uniform
from fedsim.core.errors import CheckpointError, OutputError
from fedsim.data.datasets import Digits
from fedsim.data.partition import Dirichlet
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.run.checkpoint import Checkpointer
from fedsim.run.fold import FoldedJobs, FoldJob, FoldMember, foldable_run_steps
from fedsim.run.rules import Stop
from fedsim.run.stopping import Stopped
from fedsim.run.together import LockstepRunner
from fedsim.run.tracking import Observer
from fedsim.strategies import FedAvg, FedAWE
from fedsim.trainer import Trainer, run_to_completion

LOOP = Execution(executor="loop", trial=False)
QUIET = Tracking(progress="none", tensorboard=False)
SEEDS = ((0, 1), (5,), (0, 1))
RATES = (0.1, 0.3, 0.5)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits()


def one(digits: Digits, lr: Any, seeds: Sequence[int], **settings: Any) -> Simulation:
    defaults = {"clients": 5, "rounds": 4, "evaluation": EvaluationOptions(every=2), "execution": LOOP}
    local = SGD(lr=lr, steps=2, batch_size=8)
    return Simulation(digits, Linear, seeds=seeds, local=local, **(defaults | settings))


def makers(digits: Digits, rates: Sequence[Any] = RATES, **settings: Any) -> list[Callable[[], Simulation]]:
    return [functools.partial(one, digits, lr, seeds, **settings) for lr, seeds in zip(rates, SEEDS, strict=True)]


def joint(digits: Digits, rates: Sequence[Any] = RATES, **settings: Any) -> Simulation:
    """The federation of all of `makers`."""
    pairs = [
        (number, seed)
        for lr, seeds in zip(rates, SEEDS, strict=True)
        for number, seed in zip(lr if isinstance(lr, list) else [lr] * len(seeds), seeds, strict=True)
    ]
    return one(digits, [number for number, _ in pairs], [seed for _, seed in pairs], **settings)


def folded(
    makes: Sequence[Callable[[], Simulation]],
    federation: Callable[[], Simulation],
    out: Path | None = None,
    tracking: Tracking = QUIET,
    resume: bool = True,
) -> list[Any]:
    """What comes of each run; those that the federation leaves to themselves continue alone."""
    jobs = [
        FoldJob(foldable_run_steps(make(), None if out is None else out / str(number), resume, tracking))
        for number, make in enumerate(makes)
    ]
    for job in jobs:
        job.start()
    for _, outcome in LockstepRunner[None]()([FoldedJobs(jobs, federation).generate_round_tasks]):
        assert outcome is None
    for job in jobs:
        if not job.has_ended:
            job.record_outcome(run_to_completion(job.steps))
    return [job.outcome for job in jobs]


def numbers(result: Any) -> np.ndarray:
    """All that was measured, but how long it took."""
    return np.array([[value for name, value in row.items() if name != "seconds"] for row in result.history])


ASKED = {"availability": Bernoulli(Uniform(0.5)), "partition": Dirichlet(0.5, validation=0.2)}


def test_a_folded_run_is_asked_what_a_run_is_asked():
    """The same arguments with the same defaults, after the run itself."""

    def arguments(of: Any) -> dict[str, Any]:
        parameters = {name: parameter.default for name, parameter in inspect.signature(of).parameters.items()}
        return {name: default for name, default in parameters.items() if name not in ("self", "run", "simulation")}

    assert arguments(foldable_run_steps) == arguments(Simulation.run_as_generator)
    assert arguments(FoldMember) == arguments(Simulation.run_as_generator)


class RoundCounter(Observer):
    """Writes down the rounds that it hears of."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def round_completed(self, completed_rounds: int) -> None:
        self.heard.append(completed_rounds)


def test_observers_hear_of_each_round(digits):
    counter = RoundCounter()
    tracking = Tracking(progress="none", tensorboard=False, observers=[counter])
    folded(makers(digits), lambda: joint(digits), tracking=tracking)
    assert counter.heard == [round_number for round_number in (1, 2, 3, 4) for _ in RATES]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", [FedAWE, FedAvg], ids=lambda strategy: strategy.__name__)
def test_each_has_the_numbers_and_files_that_it_has_alone(digits, tmp_path: Path, strategy):
    evaluation = EvaluationOptions(
        every=2, of=["global", "client_mean"], diagnostics=["staleness", "absent", "fairness"]
    )
    settings = ASKED | {"strategy": strategy(), "evaluation": evaluation}
    makes = makers(digits, **settings)
    together = folded(makes, lambda: joint(digits, **settings), tmp_path / "folded")
    replicates = joint(digits, **settings).run()
    rows = torch.cat([result.state.model for result in together])
    assert torch.equal(rows, replicates.state.model)  # of the same federation, bit for bit
    for number, (make, result) in enumerate(zip(makes, together, strict=True)):
        folders = [tmp_path / kind / str(number) for kind in ("folded", "alone")]
        alone = make().run(folders[1], True, QUIET)
        assert np.allclose(numbers(alone), numbers(result), rtol=1e-5, atol=1e-6, equal_nan=True)
        assert torch.allclose(alone.state.model, result.state.model, rtol=1e-5, atol=1e-6)
        assert {path.name for path in folders[0].iterdir()} == {path.name for path in folders[1].iterdir()}
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
        assert summaries[0].keys() == summaries[1].keys()
        for name in ("seeds", "total_bytes_up", "total_bytes_down", "samples", "rounds", "executor", "staleness"):
            assert summaries[0][name] == summaries[1][name], name
        for stored in ("checkpoint", "best"):
            first, second = (load_file(folder / f"{stored}.safetensors") for folder in folders)
            assert first.keys() == second.keys()
            assert all(torch.allclose(first[k].double(), second[k].double(), rtol=1e-5, atol=1e-6) for k in first)


def test_the_local_work_of_a_round_is_one_call(digits, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    genuine = Trainer.run_local_steps
    monkeypatch.setattr(Trainer, "run_local_steps", lambda self, work: calls.append(len(work)) or genuine(self, work))
    folded(makers(digits), lambda: joint(digits))
    assert calls == [5 * 5] * 4


def test_a_run_that_reaches_its_target_leaves_and_the_others_go_on(digits, tmp_path: Path):
    settings = {"rounds": 8, "stop": Stop(target={"test_accuracy": 0.5})}
    rates = (1e-4, 0.5, 1.0)
    makes = makers(digits, rates, **settings)
    together = folded(makes, lambda: joint(digits, rates, **settings), tmp_path)
    alone = [make().run() for make in makes]
    ends = [result.history[-1]["round"] for result in together]
    assert ends == [result.history[-1]["round"] for result in alone]
    assert ends[0] == 8 > max(ends[1:])
    assert [result.stopped for result in together] == [result.stopped for result in alone]
    for number, (own, result) in enumerate(zip(alone, together, strict=True)):
        assert np.allclose(numbers(own), numbers(result), rtol=1e-5, atol=1e-6)
        assert torch.equal(load_file(tmp_path / str(number) / "checkpoint.safetensors")["model"], result.state.model)


def test_a_run_that_diverges_fails_and_the_others_go_on(digits):
    rates = (0.1, 3e38, 0.5)
    first, second, third = folded(makers(digits, rates), lambda: joint(digits, rates))
    assert isinstance(second, DivergenceError)
    with pytest.raises(DivergenceError) as alone:
        makers(digits, rates)[1]().run()
    assert str(second) == str(alone.value)
    for result, number in ((first, 0), (third, 2)):
        assert np.allclose(numbers(result), numbers(makers(digits, rates)[number]().run()), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_all_diverge(digits):
    rates = (3e38, 3e38, 3e38)
    ended = folded(makers(digits, rates), lambda: joint(digits, rates))
    assert [type(error) for error in ended] == [DivergenceError] * 3


@pytest.mark.slow
def test_a_dropped_replicate_is_its_runs_own(digits):
    rates, settings = ([0.1, 3e38], 0.3, [3e38, 0.1]), {"on_nonfinite": "drop_replicate"}
    together = folded(makers(digits, rates, **settings), lambda: joint(digits, rates, **settings))
    for result, make in zip(together, makers(digits, rates, **settings), strict=True):
        assert np.allclose(numbers(result), numbers(make().run()), rtol=1e-5, atol=1e-6, equal_nan=True)
    assert np.isnan(numbers(together[0])).any()
    assert not np.isnan(numbers(together[1])).any()


def test_a_run_that_cannot_write_ends_alone(digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    genuine = Checkpointer.write

    def write(self: Checkpointer, *arguments: Any) -> None:
        if self.path is not None and self.path.parent.name == "1":
            raise OutputError("no space left")
        genuine(self, *arguments)

    monkeypatch.setattr(Checkpointer, "write", write)
    first, second, third = folded(makers(digits), lambda: joint(digits), tmp_path)
    assert isinstance(second, OutputError)
    assert {path.parent.name for path in tmp_path.glob("*/summary.json")} == {"0", "2"}
    assert len(first.history) == len(third.history) == 6


def test_stopped_by_a_signal_they_go_on_together_bit_for_bit(digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = ASKED | {"strategy": FedAWE(), "rounds": 5}
    makes, federation = makers(digits, **settings), lambda: joint(digits, **settings)
    genuine = Trainer.run_local_steps

    def perform(self: Trainer, work: Any) -> Any:
        if work.batch_plan.t == 2:
            signal.raise_signal(signal.SIGINT)
        return genuine(self, work)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "run_local_steps", perform)
        stopped = folded(makes, federation, tmp_path / "stopped")
    assert [str(stop) for stop in stopped] == ["stopped by SIGINT after round 3 of 5"] * 3
    assert all(isinstance(stop, Stopped) for stop in stopped)
    resumed = folded(makes, federation, tmp_path / "stopped")
    uninterrupted = folded(makes, federation, tmp_path / "whole")
    for number, (first, second) in enumerate(zip(resumed, uninterrupted, strict=True)):
        assert np.array_equal(numbers(first), numbers(second))
        stored = [load_file(tmp_path / kind / str(number) / "checkpoint.safetensors") for kind in ("stopped", "whole")]
        assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[1])
    fresh = folded(makes, federation, tmp_path / "stopped", resume=False)
    assert [len(result.history) for result in fresh] == [len(result.history) for result in uninterrupted]


@pytest.mark.slow
def test_one_whose_checkpoint_is_damaged_fails_alone(digits, tmp_path: Path):
    folded(makers(digits), lambda: joint(digits), tmp_path)
    (tmp_path / "1" / "checkpoint.safetensors").write_bytes(b"damaged")
    first, second, third = folded(makers(digits, rounds=4), lambda: joint(digits, rounds=4), tmp_path)
    assert isinstance(second, CheckpointError)
    assert len(first.history) == len(third.history) == 6


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fails", ["round", "federation"])
def test_where_the_federation_fails_each_continues_alone(digits, tmp_path: Path, monkeypatch, caplog, fails: str):
    genuine = Trainer.run_local_steps

    def perform(self: Trainer, work: Any) -> Any:
        if work.batch_plan.t == 2 and len(work) > 10:
            raise RuntimeError("too many rows")
        return genuine(self, work)

    def federation() -> Simulation:
        if fails == "federation":
            raise RuntimeError("too many rows")
        return joint(digits)

    monkeypatch.setattr(Trainer, "run_local_steps", perform)
    tracking = Tracking(progress="none", tensorboard=False, checkpoint_every=1)
    with caplog.at_level("INFO", "fedsim"):
        together = folded(makers(digits), federation, tmp_path, tracking)
    assert "3 jobs cannot be one federation (RuntimeError: too many rows); each continues alone" in caplog.messages
    for result, make in zip(together, makers(digits), strict=True):
        assert np.allclose(numbers(result), numbers(make().run()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "obstacle"),
    [
        ({}, None),
        ({"on_nonfinite": "drop_client"}, "on_nonfinite=drop_client"),
        ({"stop": Stop(seconds=5.0)}, "stop.seconds"),
        ({"start": "erm"}, "start=erm"),
    ],
    ids=str,
)
def test_what_cannot_be_folded(digits, settings, obstacle):
    assert FoldMember(one(digits, 0.1, (0,), **settings)).unfoldable_reason() == obstacle
