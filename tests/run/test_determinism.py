"""`deterministic: true`: the same bits in another process, and row by row in chunks of another size."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedsim import Execution, Simulation
from fedsim.core import RunError
from fedsim.data.datasets import Digits
from fedsim.data.partition import Dirichlet
from fedsim.evaluation.evaluator import Evaluator
from fedsim.local import APFL
from fedsim.models import MLP, Linear
from fedsim.run.server import Server
from fedsim.run.tracking.metrics_csv import read_metrics
from fedsim.strategies import FedAWE
from fedsim.trainer import Trainer


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("options", [["model=mlp", "strategy=fedawe"], ["model=svhn_cnn", "local=apfl"]], ids=" ".join)
def test_two_processes_leave_the_same_bits(device: str, options: list[str], tmp_path: Path) -> None:
    """Their hashes, and thus the order of their sets, differ."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    common = ["rounds=3", "clients=8", "seeds=[0,1]", "local_steps=3", "eval_every=1", "availability=sine"]
    left = []
    for number in ("1", "2"):
        out = tmp_path / number
        command = [sys.executable, "-m", "fedsim", *common, *options, f"out={out}", f"device={device}"]
        subprocess.run(
            [*command, "deterministic=true", "tracking.tensorboard=false", "tracking.progress=none"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONHASHSEED": number},
            check=True,
            capture_output=True,
            timeout=300,
        )
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(out / "metrics.csv")]
        left.append((rows, bits(load_file(out / "checkpoint.safetensors"))))
    assert left[0] == left[1]


def simulation_of(model=MLP, executor: str = "loop", chunk: int = 7, **way) -> Simulation:
    rule = APFL(lr=0.1, steps=3, batch_size=8, adaptive=True)
    return Simulation(
        Digits(),
        model,
        clients=7,
        partition=Dirichlet(0.5),
        strategy=FedAWE(),
        local=rule,
        rounds=3,
        seeds=[0, 1],
        execution=Execution(executor, chunk, **{"deterministic": True} | way),
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("chunk", [1, 3, 14])
def test_row_by_row_the_bits_do_not_depend_on_the_chunk_or_the_workers(chunk: int, workers: int) -> None:
    state = simulation_of().run().state
    other = simulation_of(chunk=chunk, workers=workers).run().state
    for field in dataclasses.fields(state):
        assert torch.equal(getattr(other, field.name), getattr(state, field.name)), field.name


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_run_again_the_bits_are_the_same(executor: str) -> None:
    states = [simulation_of(executor=executor, chunk=5).run().state for _ in range(2)]
    for field in dataclasses.fields(states[0]):
        assert torch.equal(*(getattr(state, field.name) for state in states)), field.name


def test_pytorch_is_set_for_the_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, steps = [], Trainer.run_local_steps

    def watched(*arguments, **named):
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark))
        return steps(*arguments, **named)

    monkeypatch.setattr(Trainer, "run_local_steps", watched)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    simulation_of(deterministic=False).run()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    simulation_of().run()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert set(seen[:3]) == {(False, True)}
    assert set(seen[3:]) == {(True, False)}
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize("precision", ["full", "bf16", "tf32"])
def test_tf32_is_used_in_local_steps_where_it_is_asked_for(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's defaults are that matrix products do not use it, and that convolutions do."""
    local_steps, evaluations, setups = [], [], []

    def recorder(flags: list[tuple[bool, bool]], function: Any) -> Any:
        def recorded(*arguments: Any, **named: Any) -> Any:
            flags.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
            return function(*arguments, **named)

        return recorded

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(Trainer, "_local_steps", recorder(local_steps, Trainer._local_steps))
    monkeypatch.setattr(Evaluator, "__call__", recorder(evaluations, Evaluator.__call__))
    monkeypatch.setattr(Server, "build", recorder(setups, Server.build))
    simulation = simulation_of(deterministic=False)
    simulation.model.precision = precision
    simulation.run()
    assert set(setups) == set(evaluations) == {(False, False)}
    assert set(local_steps) == {(precision == "tf32",) * 2}
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32


def test_an_operation_that_is_not_deterministic_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's message where a GPU adds floats up in no fixed order."""

    def alert(*_, **__):
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation, but you set …")

    monkeypatch.setattr(Trainer, "run_local_steps", alert)
    with pytest.raises(RunError, match=r"deterministic=true, but cumsum_cuda_kernel does not have .* device=cpu"):
        simulation_of(Linear).run()
    assert not torch.are_deterministic_algorithms_enabled()
