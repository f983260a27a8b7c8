"""Data sets hold what they say, and read files in their published formats."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.core import ConfigError, MissingDataError
from fedsim.core.torchvision_import import import_torchvision
from fedsim.data.datasets import (
    CIFAR10,
    MNIST,
    Digits,
    FashionMNIST,
)
from fedsim.data.datasets.data_files import data_root


def idx(array: np.ndarray) -> bytes:
    """An array of bytes in LeCun's IDX format: 0, 0, type 8, rank, big-endian sizes, data."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path, train: int = 7, test: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    """The four files of MNIST, with few images."""
    folder.mkdir(parents=True)
    draw, arrays = np.random.default_rng(seed), {}
    for name, n in (("train", train), ("t10k", test)):
        arrays[f"{name}-images-idx3-ubyte"] = draw.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        arrays[f"{name}-labels-idx1-ubyte"] = draw.integers(0, 10, n, dtype=np.uint8)
    for name, array in arrays.items():
        (folder / name).write_bytes(idx(array))
    return arrays


def cifar_arrays(train: int = 8, test: int = 4) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "x_train": draw.integers(0, 256, (train, 32, 32, 3), dtype=np.uint8),
        "y_train": draw.integers(0, 10, train),
        "x_test": draw.integers(0, 256, (test, 32, 32, 3), dtype=np.uint8),
        "y_test": draw.integers(0, 10, test),
    }


@pytest.fixture(scope="module")
def real() -> Path:
    """The folder of real files; what needs it skips without it."""
    if not os.environ.get("FEDSIM_DATA"):
        pytest.skip("FEDSIM_DATA is unset: no real data")
    return Path(os.environ["FEDSIM_DATA"])


def test_digits_are_scikit_learns() -> None:
    """1,797 images, 359 of them held out, every one used once, pixels of 0…16 scaled to [0, 1]."""
    from sklearn.datasets import load_digits

    digits, (images, labels) = Digits(), load_digits(return_X_y=True)
    assert digits.test_x is not None
    assert digits.train_y is not None
    assert digits.test_y is not None
    assert digits.train_x.shape == (1438, 1, 8, 8)
    assert digits.test_x.shape == (359, 1, 8, 8)
    assert (digits.train_y.shape, digits.test_y.shape) == ((1438,), (359,))
    assert digits.shape == (1, 8, 8)
    assert digits.classes == 10
    both = torch.cat([digits.train_x, digits.test_x]).flatten(1)
    assert both.min() == 0
    assert both.max() == 1
    found = torch.cat([both * 16, torch.cat([digits.train_y, digits.test_y])[:, None]], 1).numpy()
    expected = np.concatenate([images, labels[:, None]], 1)
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))


def test_digits_have_every_class_on_both_sides() -> None:
    digits = Digits()
    assert digits.train_y is not None
    assert digits.test_y is not None
    assert torch.bincount(digits.train_y, minlength=10).min() > 100
    assert torch.bincount(digits.test_y, minlength=10).min() > 20


@pytest.mark.parametrize(("dataset", "name"), [(MNIST, "MNIST"), (FashionMNIST, "FashionMNIST")])
def test_idx_files_are_read_as_they_are(dataset: type[MNIST], name: str, tmp_path: Path) -> None:
    arrays = write_mnist(tmp_path / name / "raw")
    data = dataset(root=str(tmp_path))
    for x, y, split in ((data.train_x, data.train_y, "train"), (data.test_x, data.test_y, "t10k")):
        assert x is not None
        assert y is not None
        assert x.dtype == torch.uint8
        assert y.dtype == torch.int64
        assert np.array_equal(x[:, 0].numpy(), arrays[f"{split}-images-idx3-ubyte"])
        assert np.array_equal(y.numpy(), arrays[f"{split}-labels-idx1-ubyte"])
    assert data.shape == (1, 28, 28)
    assert data.classes == 10


def test_cifar_is_read_from_an_npz(tmp_path: Path) -> None:
    """[N, 32, 32, 3] becomes [N, 3, 32, 32], bytes stay bytes; labels may come as a column."""
    arrays = cifar_arrays()
    np.savez(tmp_path / "cifar10.npz", **arrays | {"y_train": arrays["y_train"][:, None]})
    data = CIFAR10(root=str(tmp_path))
    assert data.test_x is not None
    assert data.train_y is not None
    assert data.test_y is not None
    for x, split in ((data.train_x, "train"), (data.test_x, "test")):
        assert x.dtype == torch.uint8
        assert np.array_equal(x.permute(0, 2, 3, 1).numpy(), arrays[f"x_{split}"])
    assert data.train_y.tolist() == arrays["y_train"].tolist()
    assert data.test_y.tolist() == arrays["y_test"].tolist()
    assert data.train_y.dtype == torch.int64
    assert data.shape == (3, 32, 32)


def test_cifars_scale_can_be_given(tmp_path: Path) -> None:
    """(x/255 − mean) / std with the std that was asked for; by default that of all pixels."""
    arrays = cifar_arrays()
    np.savez(tmp_path / "cifar10.npz", **arrays)
    scaled = arrays["x_test"].transpose(0, 3, 1, 2) / 255 - np.reshape((0.4914, 0.4822, 0.4465), (3, 1, 1))
    for given, std in ((None, (0.2470, 0.2435, 0.2616)), ([0.2023, 0.1994, 0.2010], (0.2023, 0.1994, 0.2010))):
        data = CIFAR10(root=str(tmp_path), std=given)
        assert data.test_x is not None
        found = data.prepare(data.test_x, torch.float64)
        np.testing.assert_allclose(found, scaled / np.reshape(std, (3, 1, 1)), rtol=1e-9)
    for wrong, message in (([0.2, 0.2], "3 numbers"), (0.2, "must be a list"), ([0.2, 0.0, 0.2], "must be positive")):
        with pytest.raises(ConfigError, match=message):
            CIFAR10(root=str(tmp_path), std=wrong)


def test_cifar_as_published_equals_the_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickled batches store a plane of red, then green, then blue; both files give the same tensors."""
    arrays = cifar_arrays()
    packed, published = tmp_path / "packed", tmp_path / "published"
    packed.mkdir()
    np.savez(packed / "cifar10.npz", **arrays)
    folder = published / "cifar-10-batches-py"
    folder.mkdir(parents=True)

    def write(name: str, content: dict[str, object]) -> str:
        raw = pickle.dumps(content)
        (folder / name).write_bytes(raw)
        return hashlib.md5(raw, usedforsecurity=False).hexdigest()

    def batch(name: str, split: str, pick: slice) -> list[str]:
        rows = arrays[f"x_{split}"][pick].transpose(0, 3, 1, 2).reshape(-1, 3072)
        return [name, write(name, {"data": rows, "labels": arrays[f"y_{split}"][pick].tolist()})]

    reader = import_torchvision().datasets.CIFAR10
    train_list = [batch("data_batch_1", "train", slice(0, 5)), batch("data_batch_2", "train", slice(5, 8))]
    monkeypatch.setattr(reader, "train_list", train_list)
    monkeypatch.setattr(reader, "test_list", [batch("test_batch", "test", slice(None))])
    names = {"label_names": [str(c) for c in range(10)]}
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": write("batches.meta", names)})
    a, b = CIFAR10(root=str(packed)), CIFAR10(root=str(published))
    for name in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("dataset", [MNIST, FashionMNIST, CIFAR10])
def test_missing_files_are_an_error_with_place_and_remedy(dataset: type[MNIST], tmp_path: Path) -> None:
    with pytest.raises(MissingDataError) as caught:
        dataset(root=str(tmp_path))
    for word in (f"dataset={dataset.label}", str(tmp_path), "root", "FEDSIM_DATA", "dataset.download=true"):
        assert word in str(caught.value)


def test_one_missing_file_of_four_is_an_error(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    (tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(MissingDataError, match=r"dataset=mnist.*root"):
        MNIST(root=str(tmp_path))


@pytest.mark.parametrize("missing", ["x_train", "y_train", "x_test", "y_test"])
def test_an_npz_without_an_array_says_which(missing: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", **{k: v for k, v in cifar_arrays().items() if k != missing})
    with pytest.raises(MissingDataError, match=f"cifar10.npz lacks.*{missing}"):
        CIFAR10(root=str(tmp_path))


@pytest.mark.parametrize(
    "broken",
    [
        {"x_train": np.zeros((8, 3, 32, 32), np.uint8)},
        {"x_train": np.zeros((8, 32, 32, 3), np.float32)},
        {"x_train": np.zeros((8, 3072), np.uint8)},
        {"y_train": np.zeros(7, np.int64)},
        {"x_test": np.zeros((4, 28, 28, 3), np.uint8)},
    ],
    ids=["channels_first", "floats", "flat", "too_few_labels", "small_test_images"],
)
def test_an_npz_of_another_layout_says_what_was_expected(broken: dict[str, np.ndarray], tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", **cifar_arrays() | broken)
    with pytest.raises(MissingDataError, match=r"dataset=cifar10.*cifar10\.npz.*expected uint8 \[N, 32, 32, 3\]"):
        CIFAR10(root=str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"no archive at all", b"PK\x03\x04 cut off"], ids=["empty", "text", "cut"])
def test_a_damaged_npz_is_named(content: bytes, tmp_path: Path) -> None:
    """A download that broke off must not end in the zip library's traceback."""
    (tmp_path / "cifar10.npz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"cifar10\.npz"):
        CIFAR10(root=str(tmp_path))


def test_the_root_is_the_setting_then_the_variable_then_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_DATA", "/from/variable")
    assert data_root("/from/setting") == Path("/from/setting")
    assert data_root(None) == Path("/from/variable")
    monkeypatch.setenv("FEDSIM_DATA", "~/data")
    assert data_root(None) == Path.home() / "data"
    for unset in (lambda: monkeypatch.setenv("FEDSIM_DATA", ""), lambda: monkeypatch.delenv("FEDSIM_DATA")):
        unset()
        assert data_root(None) == Path("data")


def test_the_loaders_follow_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies of different size tell which one was read."""
    write_mnist(tmp_path / "setting" / "MNIST" / "raw", train=5)
    write_mnist(tmp_path / "variable" / "MNIST" / "raw", train=6)
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path / "variable"))
    assert len(MNIST(root=str(tmp_path / "setting")).train_x) == 5
    assert len(MNIST().train_x) == 6


@pytest.mark.parametrize(("dataset", "folder"), [(MNIST, "MNIST"), (FashionMNIST, "FashionMNIST")])
def test_the_real_grey_images(dataset: type[MNIST], folder: str, real: Path) -> None:
    """60,000 + 10,000; the published mean and deviation are the data's to four digits."""
    if not (real / folder / "raw").exists():
        pytest.skip(f"FEDSIM_DATA holds no {folder}")
    data = dataset()
    assert data.train_y is not None
    assert data.test_x is not None
    assert data.test_y is not None
    assert data.train_x.shape == (60_000, 1, 28, 28)
    assert data.test_x.shape == (10_000, 1, 28, 28)
    assert (len(data.train_y), len(data.test_y)) == (60_000, 10_000)
    assert torch.bincount(data.train_y).tolist() == (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949] if folder == "MNIST" else [6000] * 10
    )
    counts = torch.bincount(data.train_x.flatten().int(), minlength=256).double()
    value = torch.arange(256) / 255
    mean = (counts * value).sum() / counts.sum()
    std = ((counts * (value - mean).square()).sum() / counts.sum()).sqrt()
    assert (float(mean), float(std)) == pytest.approx((dataset.mean[0], dataset.std[0]), abs=1e-4)


def test_the_real_cifar10(real: Path) -> None:
    """50,000 + 10,000, balanced."""
    if not ((real / "cifar10.npz").exists() or (real / "cifar-10-batches-py").exists()):
        pytest.skip("FEDSIM_DATA holds no CIFAR-10")
    data = CIFAR10()
    assert data.train_y is not None
    assert data.test_x is not None
    assert data.test_y is not None
    assert data.train_x.shape == (50_000, 3, 32, 32)
    assert data.test_x.shape == (10_000, 3, 32, 32)
    assert torch.bincount(data.train_y).tolist() == [5000] * 10
    assert torch.bincount(data.test_y).tolist() == [1000] * 10


def test_torchvision_imports_here() -> None:
    """Also where its compiled operators do not load; twice, as several data sets ask."""
    datasets = import_torchvision().datasets
    assert import_torchvision().datasets is datasets
    assert {"MNIST", "FashionMNIST", "CIFAR10"} <= set(dir(datasets))


def test_grey_images_are_normalised_by_the_published_numbers(tmp_path: Path) -> None:
    """(x/255 − mean) / std, as everybody who trains on MNIST and Fashion-MNIST does it."""
    for dataset, mean, std in ((MNIST, 0.1307, 0.3081), (FashionMNIST, 0.2860, 0.3530)):
        write_mnist(tmp_path / dataset.__name__ / "raw")
        data = dataset(root=str(tmp_path))
        batch = data.test_inputs(torch.float64)
        torch.testing.assert_close(batch, (data.test_x.double() / 255 - mean) / std, rtol=1e-6, atol=1e-6)
