"""Executors, chunks and worker threads decide how local training runs, never what comes out."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from ways_of_running import (
    BATCH,
    RULES,
    SIZES,
    WAYS,
    batches_of,
    double,
    everyone,
    labelled,
    ragged,
    same,
    simulation_of,
    train,
)

from fedsim import Execution, Simulation
from fedsim.core import Report
from fedsim.data.datasets import CropFlip, Dataset
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.trainer.choose import CPU_CHUNK_BYTES, ExecutorChoice, _choice_with_chunk


def naive(simulation: Simulation, build, loss, start: torch.Tensor, cohort, t: int, lr, **options):
    """Plain PyTorch: a module and an optimiser per row. Returns end rows, mean losses and samples."""
    ends, losses, samples = [], [], 0
    for row, x in enumerate(start):
        module = build().to(simulation.model.dtype).train()
        vector_to_parameters(x.clone(), module.parameters())
        optimiser = torch.optim.SGD(module.parameters(), lr=lr, **options)
        values = []
        for batch in batches_of(simulation, cohort, t, row):
            optimiser.zero_grad()
            value = loss(module(batch["x"]), batch)
            value.backward()
            optimiser.step()
            values.append(value.item())
            samples += len(batch["x"])
        ends.append(parameters_to_vector(module.parameters()).detach())
        losses.append(np.mean(values))
    return torch.stack(ends), torch.tensor(losses, dtype=start.dtype), samples


def cross_entropy(output, batch):
    return nn.functional.cross_entropy(output, batch["y"])


class TinyCNN(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(shape[0], 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * (shape[1] // 2) * (shape[2] // 2), classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def images(per: str = "image") -> Dataset:
    draw = np.random.default_rng(1)
    total = sum(SIZES)
    return Dataset(
        "images",
        torch.as_tensor(draw.integers(0, 256, (total, 3, 8, 8), dtype=np.uint8)),
        torch.as_tensor(draw.integers(0, 4, total)),
        classes=4,
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.3, 0.25),
        owners=torch.as_tensor(np.repeat(np.arange(len(SIZES)), SIZES)),
        augment=CropFlip(padding=2, flip=True, per=per),
    )


@functools.cache
def ragged_reference(kind: str) -> Report:
    return train(ragged(kind, double("loop", workers=1)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", RULES)
def test_every_way_of_running_ragged_clients_is_plain_pytorch(rule):
    """Padding, sorting, finished rows and threads leave no trace."""
    local = SGD(lr=0.2, weight_decay=0.01, **RULES[rule])
    dataset = labelled()
    reports = {name: train(simulation_of(dataset, Linear, local, execution=way)) for name, way in WAYS.items()}
    simulation = simulation_of(dataset, Linear, local)
    cohort, start = everyone(simulation), reports["vmap"].start
    build = functools.partial(Linear, (6,), 3)
    end, loss, samples = naive(simulation, build, cross_entropy, start, cohort, 2, 0.2, weight_decay=0.01)
    for report in reports.values():
        torch.testing.assert_close(report.end, end, rtol=0, atol=1e-10)
        torch.testing.assert_close(report.loss, loss, rtol=0, atol=1e-10)
        torch.testing.assert_close(report.innovation, start - end, rtol=0, atol=1e-10)
        assert report.samples.sum() == samples
    held = np.tile(SIZES, 2)
    size = held if local.work.batch_size is None else np.minimum(held, local.work.batch_size)
    per_pass = held // size if local.work.drop_last else -(-held // size)
    steps = np.broadcast_to(5 if local.work.steps else 2 * per_pass, held.shape)
    np.testing.assert_allclose(reports["vmap"].lr_sum, 0.2 * steps)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("per", ["image", "batch"])
def test_a_convolutional_network_with_augmentation_is_plain_pytorch_too(per):
    dataset, local = images(per), SGD(lr=0.05, epochs=2, batch_size=BATCH, drop_last=False)
    reports = [train(simulation_of(dataset, TinyCNN, local, execution=way)) for way in WAYS.values()]
    simulation = simulation_of(dataset, TinyCNN, local)
    build = functools.partial(TinyCNN, (3, 8, 8), 4)
    end, loss, samples = naive(simulation, build, cross_entropy, reports[0].start, everyone(simulation), 2, 0.05)
    for report in reports:
        torch.testing.assert_close(report.end, end, rtol=0, atol=1e-9)
        torch.testing.assert_close(report.loss, loss, rtol=0, atol=1e-9)
        assert report.samples.sum() == samples


@pytest.mark.parametrize("border", ["black", "mean"])
def test_augmentation_moves_whole_pixels_of_the_sample_itself(border):
    """Every augmented image is the prepared original, shifted by at most the padding and perhaps mirrored; what comes
    in from outside is black, or the mean colour, which normalising makes zero."""
    dataset = images()
    simulation = simulation_of(dataset, TinyCNN, SGD(steps=1, batch_size=None))
    dataset, cohort = simulation.dataset, everyone(simulation)
    dataset.augment = None
    plain = [batches_of(simulation, cohort, 2, row)[0]["x"] for row in range(len(SIZES))]
    dataset.augment = CropFlip(padding=2, flip=True, border=border)
    moved = [batches_of(simulation, cohort, 2, row)[0]["x"] for row in range(len(SIZES))]
    black = dataset.prepare(torch.zeros(1, 3, 1, 1, dtype=torch.uint8), torch.float64)
    changed = 0
    for originals, augmented in zip(plain, moved, strict=True):
        for original, image in zip(originals, augmented, strict=True):
            padded = (black[0] if border == "black" else torch.zeros(3, 1, 1)).expand(3, 12, 12).clone().double()
            padded[:, 2:10, 2:10] = original
            windows = [padded[:, a : a + 8, b : b + 8] for a in range(5) for b in range(5)]
            assert any(torch.equal(image, w) or torch.equal(image, w.flip(2)) for w in windows)
            changed += not torch.equal(image, original)
    assert changed > sum(SIZES) / 2


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    chunk=st.integers(1, 2 * len(SIZES) + 3),
    executor=st.sampled_from(["vmap", "loop", "fused"]),
    workers=st.integers(1, 3),
    kind=st.sampled_from(["mlp", "dropout", "stream"]),
)
def test_no_chunk_size_changes_the_result(chunk, executor, workers, kind):
    hypothesis.assume((executor, kind) != ("fused", "stream"))  # its data answer the model
    same(train(ragged(kind, double(executor, chunk, workers))), ragged_reference(kind))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", ["dropout", "shared dropout"])
@pytest.mark.parametrize("way", WAYS)
def test_dropout_does_not_depend_on_who_runs_it_or_on_global_randomness(kind, way):
    torch.manual_seed(len(way))
    same(train(ragged(kind, WAYS[way])), ragged_reference(kind))


def test_dropout_masks_belong_to_a_client_a_step_and_a_round():
    """With dropout in front of a linear layer, the first step's gradient shows which inputs were kept, doubled."""
    clients, width = 60, 50
    dataset = Dataset("ones", torch.ones(clients, width), torch.ones(clients, 1), owners=torch.arange(clients))
    dataset.loss = "squared"

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Dropout(0.5), nn.Linear(width, 1, bias=False))
            nn.init.zeros_(self.layers[1].weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    simulation = simulation_of(dataset, Masked, SGD(lr=1.0, steps=1), clients=clients, seeds=(0, 1))
    cohort = everyone(simulation)
    zero = torch.zeros(len(cohort), width, dtype=torch.float64)
    kept = [simulation.trainer.run(zero, cohort, t, zero[:2]).end for t in (0, 1)]
    for ends in kept:
        assert set(ends.unique().tolist()) == {0.0, 2.0}
        assert len(ends.unique(dim=0)) == len(cohort)
        share = (ends > 0).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / ends.numel() ** 0.5
    assert not (kept[0] == kept[1]).all(1).any()


def test_vmap_takes_as_many_rows_at_once_as_fit_into_its_budget() -> None:
    for dimension in (1_000_000, 7_850, 10**9):
        model: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, dimension=dimension)
        unused: Any = None
        rows = _choice_with_chunk("vmap", "", Execution(), model, unused, unused, batch=640).chunk
        row_bytes = 4 * (dimension + 640)
        assert rows == 1 or rows * row_bytes <= CPU_CHUNK_BYTES
        assert (rows + 1) * row_bytes > CPU_CHUNK_BYTES


def test_rows_with_all_their_samples_at_once_are_as_large_as_that_of_the_largest_client() -> None:
    def rows_at_once(*sizes: int) -> int:
        owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        data = Dataset("zeros", torch.zeros(sum(sizes), 4), owners * 0, classes=2, owners=owners)
        local, execution = SGD(steps=1, batch_size=None), Execution("vmap")
        simulation = Simulation(data, Linear, clients=len(sizes), local=local, execution=execution)
        return simulation.trainer.executor_choice.chunk

    assert rows_at_once(1, 4000) == rows_at_once(4000, 4000) < rows_at_once(1, 1)


def test_a_choice_of_grouped_rows_names_its_threads() -> None:
    choice = ExecutorChoice("grouped", 64, 3, "by trial", rows_per_stack=16)
    assert choice.describe() == "grouped executor, up to 16 rows at once in each of 3 threads (by trial)"


@pytest.mark.parametrize(("rows", "mode"), [(1, "row by row in 3 threads"), (2, "up to 2 rows at once")])
def test_a_choice_is_described_as_it_runs(rows: int, mode: str) -> None:
    assert ExecutorChoice("vmap", rows, 3, "asked for").describe() == f"vmap executor, {mode} (asked for)"
