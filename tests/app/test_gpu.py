"""On a GPU every choice of every group gives the CPU's numbers, in double precision; needs a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_runs import company_of, configuration
from test_waits import GROUPS, NOT_HERE
from torch import nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.app.build import build
from fedsim.app.config import groups
from fedsim.core.errors import ConfigError
from fedsim.data.datasets import Dataset, Digits
from fedsim.data.partition import IID
from fedsim.local import SGD
from fedsim.models import MLP, SVHNCNN, CharLSTM, LeafCNN, Linear, Transformer, ViT

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU")

GROUPS_COMPARED = (*GROUPS, "partition", "contamination", "clock", "personal", "local/schedule")
CHOICES = sorted(
    {
        f"{group}={choice}"
        for group in GROUPS_COMPARED
        for choice in groups()[group]
        if choice != "custom" and f"{group}={choice}" not in {*NOT_HERE, "partition=flwr"}
    }
)
SMALL = ["clients=12", "rounds=3", "eval_every=1", "local_steps=2", "seeds=[0,1]", "trainer.dtype=float64"]
SILENT = ["tracking.tensorboard=false", "tracking.progress=none", "trainer.trial=false"]
IMAGES, WORDS = (1, 16, 16), (7,)
MODELS: dict[str, Any] = {
    "linear": (Linear, IMAGES),
    "mlp with dropout": (lambda shape, classes: MLP(shape, classes, hidden=(12,), dropout=0.3), IMAGES),
    "cnn": (lambda shape, classes: SVHNCNN(shape, classes), IMAGES),
    "leaf cnn": (lambda shape, classes: LeafCNN(shape, classes, hidden=16), IMAGES),
    "vit": (lambda shape, classes: ViT(shape, classes, patch=4, width=8, heads=2, layers=1, dropout=0.1), IMAGES),
    "transformer": (lambda shape, classes: Transformer(shape, classes, width=8, heads=2, dropout=0.1), WORDS),
    "lstm": (lambda shape, classes: CharLSTM(classes, hidden=6, every=True), WORDS),
    "own with dropout": (
        lambda shape, classes: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(784, classes)
        ),
        IMAGES,
    ),
    "own with batch normalisation": (
        lambda shape, classes: nn.Sequential(
            nn.Flatten(), nn.Linear(256, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes)
        ),
        IMAGES,
    ),
}


def history(simulation: Simulation) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in simulation.run().history]


def assert_close(left: list[dict[str, Any]], right: list[dict[str, Any]], rel: float = 1e-6) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.get("refused") == other.get("refused")
        assert "refused" in one or one == pytest.approx(other, rel=rel, abs=rel, nan_ok=True)


def assert_same_on_both_devices(simulation_on: Callable[[str], Simulation]) -> None:
    """Both run and give the same numbers, or both are refused in the same words."""
    found = []
    for device in ("cpu", "cuda"):
        try:
            found.append(history(simulation_on(device)))
        except ConfigError as error:
            found.append([{"refused": str(error)}])
    assert_close(found[1], found[0])


@needs_gpu
@pytest.mark.parametrize("choice", CHOICES)
def test_a_gpu_gives_the_numbers_of_the_cpu(choice: str) -> None:
    naturally_divided = ["dataset=synthetic"] if choice in ("partition=natural", "partition=grouped") else []
    overrides = [*SMALL, *SILENT, choice, *naturally_divided, *company_of(choice)]
    assert_same_on_both_devices(lambda device: build(configuration(*overrides, f"device={device}"))[0])


def toy(shape: tuple[int, ...]) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    words = len(shape) == 1
    x = torch.randint(0, 9, (64, *shape), generator=draw) if words else torch.randn(64, *shape, generator=draw)
    y = torch.randint(0, 9, (64, *shape) if words else (64,), generator=draw)
    return Dataset("toy", x[:48], y[:48], x[48:], y[48:], classes=9)


def simulation_of(name: str, device: str, executor: str = "auto", **execution: Any) -> Simulation:
    build_model, shape = MODELS[name]
    return Simulation(
        toy(shape), build_model, clients=5, partition=IID(), local=SGD(lr=0.1, steps=3, batch_size=4), seeds=(0, 1),
        rounds=2, evaluation=EvaluationOptions(every=1),
        execution=Execution(**{"device": device, "dtype": "float64", "executor": executor} | execution),
    )  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("executor", ["auto", "vmap", "fused", "loop"])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_trained_as_on_a_cpu(name: str, executor: str) -> None:
    assert_same_on_both_devices(lambda device: simulation_of(name, device, executor))


@needs_gpu
@pytest.mark.parametrize("name", MODELS)
def test_single_precision_is_not_rounded_to_tf32(name: str) -> None:
    """Where TF32 is used losses differ by about 1e-3 of their value."""
    single = history(simulation_of(name, "cuda", dtype="float32", trial=False))
    double = history(simulation_of(name, "cpu", trial=False))
    for one, other in zip(single, double, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=5e-6)


@needs_gpu
@pytest.mark.parametrize("mode", ["graph", "replay", "reduce-overhead"])
@pytest.mark.parametrize("name", ["linear", "mlp with dropout", "cnn"])
def test_compiled_steps_give_the_numbers_of_plain_ones(name: str, mode: str) -> None:
    """60 steps, since a step is captured after 40."""
    found = []
    for compiled in ("never", mode):
        simulation = simulation_of(name, "cuda", "vmap", compile=compiled)
        simulation.rounds = 20
        found.append(history(simulation))
    assert_close(found[1], found[0])


@needs_gpu
def test_deterministic_runs_and_resumed_ones_have_the_same_bits(tmp_path: Any) -> None:
    def run(out: Any, rounds: int, resume: bool = False) -> torch.Tensor:
        simulation = simulation_of("mlp with dropout", "cuda", dtype="float32", deterministic=True)
        simulation.rounds = rounds
        return simulation.run(out, resume=resume).state.model.cpu()

    whole = run(tmp_path / "whole", 6)
    assert torch.equal(run(tmp_path / "again", 6), whole)
    run(tmp_path / "halves", 3)
    assert torch.equal(run(tmp_path / "halves", 6, resume=True), whole)


@needs_gpu
def test_a_data_set_stays_where_it_is_and_its_copy_is_shared() -> None:
    data = Digits()
    options: dict[str, Any] = {"clients": 4, "partition": IID(), "execution": Execution(device="cuda")}
    one, other = (Simulation(data, Linear, **options) for _ in range(2))
    assert data.train_x.device.type == "cpu"
    assert one.data.dataset.train_x.data_ptr() == other.data.dataset.train_x.data_ptr()
    data.train_x.mul_(2)
    third = Simulation(data, Linear, **options)
    assert torch.equal(third.data.dataset.train_x.cpu(), data.train_x)


def test_a_copy_on_the_same_device_shares_its_tensors() -> None:
    """The data set itself is not changed by `to`, wherever it goes."""
    data = toy(IMAGES)
    before = copy.copy(vars(data))
    moved = data.to(torch.device("cpu"))
    assert moved is not data
    assert moved.train_x is data.train_x
    assert all(vars(data)[name] is value for name, value in before.items())
