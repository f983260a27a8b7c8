"""Bad data files and run folders: one sentence each, no traceback, and no round starts.

`DATA` and `RUNS` are the tables: what is wrong, and what the answer says.
"""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from bad_input import QUIET, Trap, answer, text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fedsim import Simulation
from fedsim.app.cli import main
from fedsim.core import CheckpointError
from fedsim.datasets import Quadratics
from fedsim.models import Mean
from fedsim.run.checkpoint import NAME, read
from fedsim.tracking import Tracking


def idx(path: Path, content: bytes) -> None:
    """All four of MNIST's files with this content."""
    folder = path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for half in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (folder / f"{half}-{kind}-ubyte").write_bytes(content)


def npz(path: Path, **arrays: np.ndarray) -> None:
    x, y = np.zeros((4, 32, 32, 3), np.uint8), np.zeros(4, np.int64)
    np.savez(path, **({"x_train": x, "y_train": y, "x_test": x, "y_test": y} | arrays))


def pickles(path: Path) -> None:
    """Pickles under the names of CIFAR-10's."""
    (path / "cifar-10-batches-py").mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"):
        (path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(Trap()))


def packed(path: Path, content: bytes) -> None:
    (path / "CINIC-10").mkdir()
    (path / "CINIC-10" / "fedsim-train.npz").write_bytes(content)


def emnist(path: Path, **group: object) -> None:
    (path / "emnist").mkdir()
    for half in ("train", "test"):
        with h5py.File(path / "emnist" / f"fed_emnist_digitsonly_{half}.h5", "w") as file:
            for name, value in group.items():
                file[f"examples/f0/{name}"] = value


def trace(name: str) -> list[str]:
    return ["availability=trace", f"availability.path={name}", "dataset=digits"]


DATA: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "mnist, empty files": (lambda p: idx(p, b""), ["dataset=mnist"], "dataset=mnist: no usable files"),
    "mnist, noise": (lambda p: idx(p, bytes(range(256))), ["dataset=mnist"], "dataset=mnist: no usable files"),
    "mnist, web page": (lambda p: idx(p, b"<html>404</html>"), ["dataset=mnist"], "dataset=mnist: no usable files"),
    "mnist, gzip": (lambda p: idx(p, gzip.compress(b"0" * 99)), ["dataset=mnist"], "dataset=mnist: no usable files"),
    "cifar, pickles": (pickles, ["dataset=cifar10"], "dataset=cifar10: no usable files"),
    "cifar, objects": (
        lambda p: npz(p / "cifar10.npz", x_train=np.array([Trap()], dtype=object)),
        ["dataset=cifar10"],
        "cifar10.npz is damaged",
    ),
    "cifar, floats": (
        lambda p: npz(p / "cifar10.npz", x_train=np.zeros((4, 32, 32, 3))),
        ["dataset=cifar10"],
        "expected uint8 [N, 32, 32, 3]",
    ),
    "cifar, 100 classes": (
        lambda p: npz(p / "cifar10.npz", y_train=np.full(4, 99)),
        ["dataset=cifar10"],
        "labels 0 to 9",
    ),
    "cifar, no archive": (text("cifar10.npz", "PK no"), ["dataset=cifar10"], "cifar10.npz is damaged"),
    "svhn, noise": (
        text("train_32x32.mat", b"MATLAB 5.0"),
        ["dataset=svhn"],
        "dataset=svhn: no usable train_32x32.mat",
    ),
    "cinic, nothing": (lambda p: None, ["dataset=cinic10"], "dataset=cinic10: no usable images"),
    "cinic, damaged pack": (lambda p: packed(p, b"PK"), ["dataset=cinic10"], "fedsim-train.npz is damaged"),
    "cinic, pickle": (lambda p: packed(p, pickle.dumps(Trap())), ["dataset=cinic10"], "fedsim-train.npz is damaged"),
    "cinic, text as picture": (
        text("CINIC-10/train/cat/a.png", "no picture"),
        ["dataset=cinic10"],
        "dataset=cinic10: no usable images",
    ),
    "credit, absent": (lambda p: None, ["dataset=give_me_some_credit"], "get cs-training.csv"),
    "credit, words": (
        text("give_me_some_credit/cs-training.csv", "a,b\nx,y\n"),
        ["dataset=give_me_some_credit"],
        "is damaged",
    ),
    "credit, bytes": (
        text("give_me_some_credit/cs-training.csv", b"\xff\xfe\x00"),
        ["dataset=give_me_some_credit"],
        "no usable",
    ),
    "adult, short": (text("adult/adult.data", "39, State-gov\n"), ["dataset=adult"], "has 0 rows and 0 positives"),
    "emnist, text": (
        text("emnist/fed_emnist_digitsonly_train.h5", "no"),
        ["dataset=emnist", "partition=natural"],
        "dataset=emnist: no usable",
    ),
    "emnist, no pixels": (
        lambda p: emnist(p, label=np.zeros(2)),
        ["dataset=emnist", "partition=natural"],
        "dataset=emnist: no usable",
    ),
    "emnist, words": (
        lambda p: emnist(p, pixels=["a", "b"], label=["c", "d"]),
        ["dataset=emnist", "partition=natural"],
        "dataset=emnist",
    ),
    "trace, empty": (text("t.csv", ""), trace("t.csv"), "expected [rounds, clients]"),
    "trace, words": (text("t.csv", "0,1\n0,x\n"), trace("t.csv"), "line 2, column 2: 'x' is not a number"),
    "trace, ragged": (text("t.csv", "0,1\n0\n"), trace("t.csv"), "line 2: 1 columns, expected 2"),
    "trace, NaN": (text("t.csv", "0,nan\n"), trace("t.csv"), "line 1, column 2: nan is not between 0 and 1"),
    "trace, too likely": (text("t.csv", "0,2\n"), trace("t.csv"), "2 is not between 0 and 1"),
    "trace, other clients": (text("t.csv", "0,1\n"), trace("t.csv"), "has 2 clients, but clients=12"),
    "trace, bytes": (text("t.csv", b"\xff\x00\xfe"), trace("t.csv"), "cannot be read as CSV"),
    "trace, folder": (lambda p: (p / "t.csv").mkdir(), trace("t.csv"), "cannot be read as CSV"),
    "trace, objects": (
        lambda p: np.save(p / "t.npy", np.array([[Trap()]]), allow_pickle=True),
        trace("t.npy"),
        "is not a numeric .npy array",
    ),
    "trace, no array": (text("t.npy", "no"), trace("t.npy"), "is not a numeric .npy array"),
}


@pytest.mark.parametrize("case", DATA)
def test_a_bad_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Nothing in a file is executed, either."""
    damage, arguments, message = DATA[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    damage(tmp_path)
    said = answer(monkeypatch, *arguments)
    assert said is not None
    assert message in said
    assert not Path("trapped").exists()
    assert not Path("out/metrics.csv").exists()


SMALL = ["dataset=quadratics", "partition=natural", "model=mean", "clients=3", "dataset.dimension=4"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of the command line, two rounds long."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "argv", ["fedsim", *QUIET, *SMALL])
        main()
    return folder / "out"


def headed(**changes: str | None) -> Callable[[Path], None]:
    """The checkpoint with another header."""

    def damage(folder: Path) -> None:
        content = (folder / NAME).read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])["__metadata__"]
        for name, value in changes.items():
            header.pop(name) if value is None else header.update({name: value})
        save_file(load_file(folder / NAME), folder / NAME, header)

    return damage


def cut(folder: Path) -> None:
    content = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(content[:-3])


def directory(folder: Path) -> None:
    (folder / NAME).unlink()
    (folder / NAME).mkdir()


RUNS: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "truncated": (cut, [], NAME),
    "empty": (text(NAME, ""), [], NAME),
    "a pickle": (lambda f: torch.save(Trap(), f / NAME), [], NAME),
    "a folder": (directory, [], NAME),
    "of another program": (lambda f: save_file({"x": torch.zeros(2)}, f / NAME), [], "not written by this version"),
    "without identity": (headed(identity=None), [], "has a damaged header"),
    "with broken identity": (headed(identity="{"), [], "has a damaged header"),
    "identity is a list": (headed(identity="[1]"), [], "has a damaged header"),
    "without progress": (headed(progress=None), [], "has a damaged header"),
    "progress of another kind": (headed(progress='{"epochs": 3}'), [], "has a damaged header"),
    "negative progress": (headed(progress='{"rounds": -3}'), [], "has a damaged header"),
    "progress of nobody": (headed(progress='{"rounds": 2}'), [], "has a damaged header"),
    "of another lr": (lambda f: None, ["lr=0.7"], "lr was 0.1, now 0.7"),
    "of another strategy": (lambda f: None, ["strategy=fedpbc"], "belongs to another run"),
    "of more rounds": (lambda f: None, ["rounds=1"], "has completed 2; raise rounds"),
    "metrics of bytes": (text("metrics.csv", b"\xff\n\xfe\n"), [], "metrics.csv is no metrics file"),
    "metrics of words": (text("metrics.csv", "round,seed\na,b\n"), [], "metrics.csv is no metrics file"),
    "metrics of another program": (text("metrics.csv", "x,y\n1,2\n"), [], "metrics.csv is no metrics file"),
    "metrics of another run": (text("metrics.csv", "round,seed\n0,0\n"), [], "has other columns"),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_bad_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path, case: str) -> None:
    """It is refused, and stays as it is."""
    damage, arguments, message = RUNS[case]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "out")
    damage(tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    said = answer(monkeypatch, *SMALL, "rounds=5", "resume=auto", *arguments)
    assert said is not None
    assert message in said
    assert not Path("trapped").exists()
    after = {path: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert {p: c for p, c in after.items() if p.suffix != ".json"} == {
        p: c for p, c in before.items() if p.suffix != ".json"
    }


def test_the_tables_are_as_long_as_they_were_promised() -> None:
    assert len(DATA) + len(RUNS) >= 45


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_checkpoint_with_any_bytes_changed_is_read_or_refused_by_name(tmp_path: Path, data: st.DataObject) -> None:
    simulation = Simulation(Quadratics(clients=3, dimension=4), Mean, clients=3, rounds=1)
    path = tmp_path / NAME
    if not path.with_suffix(".good").exists():
        simulation.run(tmp_path, tracking=Tracking(progress="none", tensorboard=False))
        path.rename(path.with_suffix(".good"))
    content = bytearray(path.with_suffix(".good").read_bytes())
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    for _ in range(data.draw(st.integers(0, 3)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    like, identity = simulation.initial_state(), {"seeds": [0], "strategy": "FedAvg"}
    refusal = None
    try:
        state, progress = read(path, like, identity)
    except CheckpointError as error:
        refusal = str(error)
    if refusal is None:
        assert state.model.shape == like.model.shape
        assert progress.rounds >= 1
    else:
        assert str(path) in refusal
