"""Bad data files: one sentence each, no traceback, and no round starts.

`DATA` is the table: what is wrong, and what the answer says.
"""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from bad_input import Trap, answer, text


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


@pytest.mark.sampled(5)
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


def test_the_table_is_as_long_as_it_was_promised() -> None:
    assert len(DATA) >= 31
