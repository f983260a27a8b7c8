"""SVHN's .mat files and CINIC-10's folders, on tiny files in the true format."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from fedsim.core import MissingDataError
from fedsim.core.torchvision_import import import_torchvision
from fedsim.data.datasets import CIFAR100, CINIC10, SVHN
from fedsim.data.datasets.vision import average_pool

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def write_svhn(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """As published: X [32, 32, 3, N] uint8, y [N, 1] with 10 for the digit 0."""
    draw, written = np.random.default_rng(0), {}
    for split, n in (("train", 13), ("test", 4)):
        x, y = draw.integers(0, 256, (32, 32, 3, n), dtype=np.uint8), np.arange(1, n + 1)[:, None] % 10
        y[y == 0] = 10
        savemat(folder / f"{split}_32x32.mat", {"X": x, "y": y.astype(np.uint8)})
        written[split] = x, y
    return written


def write_cinic10(folder: Path) -> dict[str, np.ndarray]:
    """A PNG per class in train and test, two in train; one grey, one with a palette."""
    draw, written = np.random.default_rng(1), {}
    for split, each in (("train", 2), ("test", 1), ("valid", 1)):
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True)
            for number in range(each):
                pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                path = f"{split}/{name}/cifar10-{split}-{number}.png"
                Image.fromarray(pixels).save(folder / path)
                written[path] = pixels
    grey = draw.integers(0, 256, (32, 32), dtype=np.uint8)
    Image.fromarray(grey, mode="L").save(folder / "train/bird/cifar10-train-0.png")
    written["train/bird/cifar10-train-0.png"] = np.repeat(grey[..., None], 3, axis=2)
    return written


def test_svhn_is_read_from_its_mat_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_svhn(tmp_path)
    monkeypatch.setattr(
        import_torchvision().datasets.SVHN, "_check_integrity", lambda self: True
    )  # checksums of the real
    data = SVHN(str(tmp_path))
    for split, x, y in (("train", data.train_x, data.train_y), ("test", data.test_x, data.test_y)):
        pixels, labels = written[split]
        assert x is not None
        assert y is not None
        assert x.dtype == torch.uint8
        assert np.array_equal(x.numpy(), pixels.transpose(3, 2, 0, 1))
        assert np.array_equal(y.numpy(), labels[:, 0] % 10)


def test_files_that_are_not_svhn_are_refused(tmp_path: Path) -> None:
    write_svhn(tmp_path)  # not the published checksums
    with pytest.raises(MissingDataError, match=r"dataset=svhn.*train_32x32\.mat.*dataset\.download=true"):
        SVHN(str(tmp_path))


def test_cinic10_is_read_from_folders_and_packed(tmp_path: Path) -> None:
    written = write_cinic10(tmp_path / "CINIC-10")
    first = CINIC10(str(tmp_path))
    assert first.train_x.shape == (20, 3, 32, 32)
    assert first.train_y is not None
    assert first.train_y.tolist() == [label for label in range(10) for _ in range(2)]
    assert first.test_x is not None
    assert first.test_x.shape == (10, 3, 32, 32)
    for label, name in enumerate(CLASSES):
        for number in range(2):
            expected = written[f"train/{name}/cifar10-train-{number}.png"]
            assert np.array_equal(first.train_x[2 * label + number].permute(1, 2, 0).numpy(), expected)
    for path in (tmp_path / "CINIC-10").rglob("*.png"):
        path.unlink()
    again = CINIC10(str(tmp_path))
    assert torch.equal(again.train_x, first.train_x)
    assert again.test_y is not None
    assert again.test_y.tolist() == list(range(10))


def test_an_absent_or_foreign_cinic10_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"dataset=cinic10.*CINIC-10\.tar\.gz"):
        CINIC10(str(tmp_path))
    write_cinic10(tmp_path / "CINIC-10")
    Image.new("RGB", (16, 32)).save(tmp_path / "CINIC-10/train/dog/cifar10-train-1.png")
    with pytest.raises(MissingDataError, match="16×32 pixels, expected 32×32"):
        CINIC10(str(tmp_path))


def test_pooling_takes_block_means() -> None:
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    blocks = images.double().reshape(5, 3, 4, 2, 4, 2).mean((3, 5))
    assert (average_pool(images, 2).double() - blocks).abs().max() <= 0.5
    assert average_pool(images, 1) is images


def test_cifar100_is_what_torchvision_reads_in_a_hundred_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = import_torchvision().datasets.CIFAR100
    folder = tmp_path / reader.base_folder
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3072), dtype=np.uint8)
    labels, sums = [99, 0, 41, 7, 7, 12], {}
    for name, content in (
        ("train", {"data": pixels, "fine_labels": labels}),
        ("test", {"data": pixels[:2], "fine_labels": labels[:2]}),
        ("meta", {"fine_label_names": [str(label) for label in range(100)]}),
    ):
        raw = pickle.dumps(content)
        (folder / name).write_bytes(raw)
        sums[name] = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    with pytest.raises(MissingDataError, match="dataset=cifar100: no usable files"):  # not the published ones
        CIFAR100(root=str(tmp_path))
    monkeypatch.setattr(reader, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(reader, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": sums["meta"]})
    data = CIFAR100(root=str(tmp_path))
    assert (data.classes, data.shape, data.train_y.tolist()) == (100, (3, 32, 32), labels)
    assert torch.equal(data.train_x, torch.tensor(pixels.reshape(6, 3, 32, 32)))
    assert len(data.test_x) == 2
