"""Image sets in their published files, read by torchvision: MNIST, FashionMNIST, CIFAR-10, SVHN."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedsim.core.constraints import Count, Positive
from fedsim.core.errors import ConfigError, MissingDataError
from fedsim.core.torchvision_import import import_torchvision
from fedsim.data.datasets.augment import CropFlip
from fedsim.data.datasets.data_files import Files, data_root
from fedsim.data.datasets.dataset import Dataset


def idx_file_names(folder: str) -> tuple[str, ...]:
    """The four files of MNIST, and of data sets in its format."""
    kinds = ("images-idx3", "labels-idx1")
    return tuple(f"{folder}/raw/{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in kinds)


class Images(Dataset):
    """Images and labels, kept as uint8 [N, C, H, W].

    Args:
        root: folder of the files, see `data_root`.
        download: whether to download missing files, if the source allows it.
        augment: random crop and flip of training images.
        pool: average blocks of pool × pool pixels into one: a smaller problem for a small machine.
        std: divisor of centred pixels, a number above 0 per channel; None: `std` of the data set.
    """

    source: str
    label: str
    kinds = 10  # of labels
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __init__(
        self,
        root: str | None = None,
        download: bool = False,
        augment: CropFlip | None = None,
        pool: Count = 1,
        std: Sequence[Positive] | None = None,
    ) -> None:
        folder = data_root(root)
        splits = [self._load(folder, train, download) for train in (True, False)]
        for (x, y), split_name in zip(splits, ("training", "test"), strict=True):
            is_consistent = len(x) and len(x) == len(y) and x.dtype == torch.uint8
            if not is_consistent or not 0 <= int(y.min()) <= int(y.max()) < self.kinds:
                raise MissingDataError(
                    f"dataset={self.label}: the {split_name} files under {folder.resolve()} hold "
                    f"{len(x)} images, {len(y)} "
                    f"labels; expected as many uint8 images as labels 0 to {self.kinds - 1}; download them again"
                )
        (train_x, train_y), (test_x, test_y) = splits
        super().__init__(
            self.label,
            average_pool(train_x, pool),
            train_y,
            average_pool(test_x, pool),
            test_y,
            classes=type(self).kinds,
            mean=type(self).mean,
            std=type(self).std if std is None else self._check_std(std),
            augment=augment,
        )

    def _check_std(self, std: Sequence[float]) -> tuple[float, ...]:
        """Check a user's std."""
        if not isinstance(std, Sequence) or isinstance(std, str) or len(std) != len(self.std):
            raise ConfigError(f"{{std}}={std} must hold {len(self.std)} numbers, one per channel", mentions=("std",))
        return tuple(std)

    @property
    def remedy(self) -> str:
        """What to do if files are missing or unusable."""
        return "download them again" if self.files is None else self.files.remedy(self.label)

    def _load(self, folder: Path, train: bool, download: bool) -> tuple[Tensor, Tensor]:
        """uint8 images [N, C, H, W] and labels [N] of one half."""
        reader = getattr(import_torchvision().datasets, self.source)
        try:
            dataset = reader(str(folder), train=train, download=download)
        except Exception as error:  # a reader may raise anything on a damaged file
            raise MissingDataError(
                f"dataset={self.label}: no usable files under {folder.resolve()} ({{root}}, or the variable "
                f"FEDSIM_DATA); {self.remedy} ({error_text(error)})",
                mentions=("root",),
            ) from error
        return _channels_first(np.asarray(dataset.data)), torch.as_tensor(
            np.asarray(dataset.targets), dtype=torch.int64
        )


def error_text(error: BaseException) -> str:
    """An error's message in one line; its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def average_pool(images: Tensor, pool: int) -> Tensor:
    """[N, C, H, W] uint8 → [N, C, H // pool, W // pool] uint8, block means rounded."""
    if pool == 1:
        return images
    pooled_batches = [functional.avg_pool2d(batch.float(), pool) for batch in images.split(10_000)]
    return torch.cat([batch.round_().to(torch.uint8) for batch in pooled_batches])


def _channels_first(images: np.ndarray) -> Tensor:
    """[N, H, W] or [N, H, W, C] uint8 → [N, C, H, W] uint8."""
    if images.ndim == 3:
        images = images[..., None]
    return torch.as_tensor(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


class MNIST(Images):
    """60,000 + 10,000 grey images [1, 28, 28] of digits (LeCun et al.), read from ROOT/MNIST/raw."""

    source, label = "MNIST", "mnist"
    files = Files((idx_file_names("MNIST"),), "yann.lecun.com/exdb/mnist", torchvision=True)
    mean, std = (0.1307,), (0.3081,)


class FashionMNIST(Images):
    """60,000 + 10,000 grey images [1, 28, 28] of clothes (Xiao et al.), read from ROOT/FashionMNIST/raw."""

    source, label = "FashionMNIST", "fashion_mnist"
    files = Files((idx_file_names("FashionMNIST"),), "github.com/zalandoresearch/fashion-mnist", torchvision=True)
    mean, std = (0.2860,), (0.3530,)


class CIFAR10(Images):
    """50,000 + 10,000 colour images [3, 32, 32] (Krizhevsky).

    Read from ROOT/cifar-10-batches-py as published: these are pickles, which torchvision opens only if their MD5 sums
    are the published ones. Or from ROOT/cifar10.npz holding `x_train` [50000, 32, 32, 3] uint8, `y_train` [50000],
    `x_test`, `y_test`.

    `std` is that of all its pixels, channel by channel. Programs often use (.2023, .1994, .2010) instead, the mean over
    images of each image's (sample) standard deviation, as FedAWE's authors do.
    """

    source, label = "CIFAR10", "cifar10"
    files = Files((("cifar10.npz",), ("cifar-10-batches-py",)), "www.cs.toronto.edu/~kriz/cifar.html", torchvision=True)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def _load(self, folder: Path, train: bool, download: bool) -> tuple[Tensor, Tensor]:
        archive = folder / "cifar10.npz"
        if not archive.exists():
            return super()._load(folder, train, download)
        split = "train" if train else "test"
        try:
            with np.load(archive, allow_pickle=False) as arrays:
                x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        except KeyError as error:
            raise MissingDataError(
                f"dataset=cifar10: {archive} lacks {error}; it must hold x_train, y_train, x_test, y_test"
            ) from error
        except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise MissingDataError(f"dataset=cifar10: {archive} is damaged ({error}); write it again") from error
        if x.ndim != 4 or x.shape[1:] != (32, 32, 3) or x.dtype != np.uint8 or y.reshape(-1).shape[0] != len(x):
            raise MissingDataError(
                f"dataset=cifar10: x_{split} in {archive} is {x.dtype} {x.shape} with {y.size} labels; "
                "expected uint8 [N, 32, 32, 3] and N labels"
            )
        return _channels_first(x), torch.as_tensor(y.reshape(-1).astype(np.int64))


class CIFAR100(Images):
    """50,000 + 10,000 colour images [3, 32, 32] in 100 classes (Krizhevsky), read from ROOT/cifar-100-python.

    These are pickles, which torchvision opens only if their MD5 sums are the published ones.
    """

    source, label, kinds = "CIFAR100", "cifar100", 100
    files = Files((("cifar-100-python",),), "www.cs.toronto.edu/~kriz/cifar.html", torchvision=True)
    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


class SVHN(Images):
    """73,257 + 26,032 colour images [3, 32, 32] of house numbers (Netzer et al.), from ROOT/{train,test}_32x32.mat."""

    source, label = "SVHN", "svhn"
    files = Files((("train_32x32.mat", "test_32x32.mat"),), "ufldl.stanford.edu/housenumbers", torchvision=True)
    mean, std = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)

    def _load(self, folder: Path, train: bool, download: bool) -> tuple[Tensor, Tensor]:
        split = "train" if train else "test"
        try:
            dataset = import_torchvision().datasets.SVHN(str(folder), split=split, download=download)
        except Exception as error:
            raise MissingDataError(
                f"dataset=svhn: no usable {split}_32x32.mat under {folder.resolve()} ({{root}}, or the variable "
                f"FEDSIM_DATA); {self.remedy} ({error_text(error)})",
                mentions=("root",),
            ) from error
        return torch.as_tensor(dataset.data), torch.as_tensor(dataset.labels, dtype=torch.int64)
