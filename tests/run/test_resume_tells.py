"""A run that goes on with something else than it began with is refused, or says so."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resumable import QUIET, classes, simulation_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedsim import EvaluationOptions, Simulation
from fedsim.availability import Trace, TraceLog
from fedsim.core import CheckpointError, checksums
from fedsim.data.datasets import Dataset, Quadratics
from fedsim.data.partition import Natural, Partition, partition
from fedsim.data.partition.partition import Table
from fedsim.models import Mean
from fedsim.run import content
from fedsim.run.checkpoint import NAME
from fedsim.run.folder import RunFolder
from fedsim.run.tracking import Tracking, tensorboard


def small(data: Dataset, rounds: int, **options: Any) -> Simulation:
    """A run of moments."""
    return Simulation(data, torch.nn.Linear(4, 3), clients=3, rounds=rounds, **options)


class Shares(Partition):
    """As it is written down."""

    name = "shares"

    def __init__(self, parts: list[list[int]]) -> None:
        super().__init__()
        self.parts = parts

    def split(self, samples: Any, clients: int, draw: np.random.Generator) -> list[np.ndarray]:
        return [np.array(part) for part in self.parts]


def changed(name: str, by: float) -> Dataset:
    data = classes()
    values = getattr(data, name).clone()
    values[7 % len(values)] += by
    setattr(data, name, values)
    return data


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (lambda: changed("train_x", 0.01), "train_x of the data changed"),
        (lambda: changed("train_y", -1 if classes().train_y[7] else 1), "train_y of the data changed"),
        (lambda: changed("test_x", 0.01), "test_x of the data changed"),
        (lambda: changed("test_y", -1 if classes().test_y[7] else 1), "test_y of the data changed"),
        (lambda: changed("train_x", float("nan")), "train_x of the data changed"),
    ],
)
def test_data_that_changed_are_refused_by_name(tmp_path: Path, data: Any, what: str) -> None:
    small(classes(), 1).run(tmp_path, tracking=QUIET)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(tmp_path / NAME))} was written with .*: {what} since"):
        small(data(), 2).run(tmp_path, resume=True, tracking=QUIET)
    assert (tmp_path / NAME).read_bytes() == before
    assert small(classes(), 2).run(tmp_path, resume=True, tracking=QUIET).history[-1]["round"] == 2


def test_shares_that_changed_are_refused(tmp_path: Path) -> None:
    parts = [list(range(20)), list(range(20, 40)), list(range(40, 60))]
    small(classes(), 1, partition=Shares(parts)).run(tmp_path, tracking=QUIET)
    parts[0][0], parts[1][0] = parts[1][0], parts[0][0]
    with pytest.raises(CheckpointError, match="the partition of replicate 0 changed since"):
        small(classes(), 2, partition=Shares(parts)).run(tmp_path, resume=True, tracking=QUIET)


def test_owners_that_changed_are_refused(tmp_path: Path) -> None:
    data = classes()
    data.owners = torch.arange(60) % 3
    small(data, 1, partition=Natural()).run(tmp_path, tracking=QUIET)
    data.owners = torch.arange(60) // 20
    with pytest.raises(CheckpointError, match="owners of the data changed since"):
        small(data, 2, partition=Natural()).run(tmp_path, resume=True, tracking=QUIET)


@pytest.mark.parametrize("kind", [Trace, TraceLog])
def test_a_record_of_availability_that_changed_is_refused(tmp_path: Path, kind: type) -> None:
    path, options = tmp_path / "t.csv", {}
    first, second = "1,0,1\n0,1,1\n", "1,0,1\n1,1,0\n"
    if kind is TraceLog:
        first, second = (f"client,start,end\n0,0,2\n1,0,{end}\n2,0,4\n" for end in (3, 4))
        options = {"round": 1, "client": "client", "start": "start", "end": "end"}
    path.write_text(first)
    small(classes(), 1, availability=kind(path, **options)).run(tmp_path / "run", tracking=QUIET)
    path.write_text(second)
    with pytest.raises(CheckpointError, match=r"the record of availability \(\w+\) changed since"):
        small(classes(), 2, availability=kind(path, **options)).run(tmp_path / "run", resume=True, tracking=QUIET)


def test_a_frozen_part_that_changed_is_refused(tmp_path: Path) -> None:
    def frozen(value: float) -> torch.nn.Module:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
        module[0].weight.requires_grad_(False)[0, 0] = value
        return module

    Simulation(classes(), frozen(0.1), clients=3, rounds=1).run(tmp_path, tracking=QUIET)
    with pytest.raises(CheckpointError, match=r"0\.weight, a frozen part of the model, changed since"):
        Simulation(classes(), frozen(0.2), clients=3, rounds=2).run(tmp_path, resume=True, tracking=QUIET)


@pytest.mark.parametrize("size", [5, content.NUMBERS_PER_BLOCK + 3, 2 * content.NUMBERS_PER_BLOCK])
def test_last_bits_are_no_change_and_one_entry_is(size: int) -> None:
    """Another processor rounds sums differently; of a million entries one that is another is seen."""
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    nudged = np.nextafter(x, np.where(np.random.default_rng(99).random(size) < 0.5, -9, 9).astype(np.float32))
    was = json.loads(json.dumps(content.fingerprint(x)))
    assert content.fingerprints_match(was, content.fingerprint(nudged))
    for entry in (0, size // 2, size - 1):
        other = x.copy()
        other[entry] += 0.01
        assert not content.fingerprints_match(was, content.fingerprint(other))
    assert not content.fingerprints_match(was, content.fingerprint(x[::-1].copy()))
    assert not content.fingerprints_match(was, content.fingerprint(x[:, None]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool])
def test_numbers_of_every_type_are_looked_at_as_they_are(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1, 0]).to(dtype)
    array = content._host_subsample(values)
    assert array.tolist() == values.tolist()
    assert array.dtype == (np.float32 if dtype == torch.bfloat16 else values.numpy().dtype)


def test_of_very_much_every_kth_row_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(content.MAX_FINGERPRINTED_NUMBERS, False, 100)
    x = torch.arange(1000.0).view(100, 10)
    assert torch.equal(torch.as_tensor(content._host_subsample(x)), x[::10])


def test_another_version_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small(classes(), 1).run(tmp_path, tracking=QUIET)
    folder = tmp_path / "older"
    shutil.copytree(tmp_path, folder)
    with safe_open(tmp_path / NAME, framework="pt") as file:
        header = file.metadata()
    small(classes(), 2).run(tmp_path, resume=True, tracking=QUIET)
    assert "begun with" not in caplog.text
    header |= {"versions": json.dumps(json.loads(header["versions"]) | {"torch": "1.13"})}
    tensors = load_file(folder / NAME)
    save_file(tensors, folder / NAME, checksums.add_checksums(header, tensors))
    small(classes(), 2).run(folder, resume=True, tracking=QUIET)
    assert caplog.text.count(f"started with torch 1.13, not {torch.__version__}: further results may differ") == 1


def test_a_checkpoint_from_before_there_were_sums_is_read(tmp_path: Path) -> None:
    small(classes(), 1).run(tmp_path, tracking=QUIET)
    with safe_open(tmp_path / NAME, framework="pt") as file:
        header = {k: v for k, v in file.metadata().items() if k not in ("sums", "versions", "content")}
    progress = json.loads(header["progress"])
    del progress["rows"]
    save_file(load_file(tmp_path / NAME), tmp_path / NAME, header | {"progress": json.dumps(progress)})
    assert small(classes(), 2).run(tmp_path, resume=True, tracking=QUIET).history[-1]["round"] == 2


@pytest.mark.parametrize("lost", ["all", "last", "middle"])
def test_rows_that_are_missing_are_not_passed_over(tmp_path: Path, lost: str) -> None:
    simulation_of(rounds=3).run(tmp_path, tracking=QUIET)
    path = tmp_path / "metrics.csv"
    lines = path.read_text().splitlines(keepends=True)
    if lost == "all":
        path.unlink()
    else:
        del lines[-1 if lost == "last" else -4]
        path.write_text("".join(lines))
    with pytest.raises(CheckpointError, match=r"metrics\.csv (is gone, with|has 7 of) the 8 rows .* by round 3"):
        simulation_of().run(tmp_path, resume=True, tracking=QUIET)
    assert simulation_of().run(tmp_path, tracking=QUIET).history[-1]["round"] == 6


def points(folder: Path) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder)).Reload().Scalars("loss/train_loss")
    return [(event.step, event.value) for event in found]


def test_a_clock_that_was_set_back_hides_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three parts of a run, each begun a day before the one that went before it."""
    tracking, now = Tracking(progress="none"), [3_000_000_000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setattr(RunFolder, "pictures", lambda self: iter(()))  # they take seconds

    each = EvaluationOptions(every=1)

    def quadratics(rounds: int, folder: str) -> None:
        data = Quadratics(clients=2, dimension=3)
        Simulation(data, Mean, clients=2, rounds=rounds, evaluation=each).run(tmp_path / folder, True, tracking)

    quadratics(3, "straight")
    monkeypatch.setattr(tensorboard.time, "sleep", lambda _: now.__setitem__(0, now[0] + 1))
    for rounds in (1, 2, 3):
        quadratics(rounds, "parts")
        now[0] -= 86_400
    assert points(tmp_path / "parts" / "seed_0") == points(tmp_path / "straight" / "seed_0")
    assert caplog.text.count("the system clock is behind this run's earlier event files") == 2
    names = sorted(os.listdir(tmp_path / "parts" / "seed_0"))
    assert len(names) == 3


def test_digests_do_not_depend_on_blocks_or_memory_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 255, (300, 5, 4)).astype(np.uint8)
    arrays = [pixels, pixels[::2], pixels.transpose(1, 0, 2), np.array(7), np.array(["ab", "c"]), np.zeros((0, 3), int)]
    expected = [hashlib.blake2b(np.ascontiguousarray(a).tobytes(), digest_size=12).hexdigest() for a in arrays]
    for block in (1, 64, 2**20):
        monkeypatch.setattr(content, "NUMBERS_PER_BLOCK", block)
        assert [content.fingerprint(array)[1] for array in arrays] == expected


def test_labels_are_counted_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    labels, sizes = draw.integers(0, 4, 60), draw.integers(1, 9, 7)
    table = Table(draw.permutation(60)[: sizes.sum()], np.concatenate([[0], np.cumsum(sizes)]))
    shares = np.split(labels[table.order], table.offsets[1:-1])
    expected = np.array([[(share == c).mean() for c in range(4)] for share in shares])
    for block in (1, 3, 100):
        monkeypatch.setattr(partition, "CLIENTS_PER_BLOCK", block)
        np.testing.assert_array_equal(table.class_fractions(labels, 4), expected)
