"""EMNIST by writer, digits or all characters, from the federated HDF5 files (Caldas et al. 2018; apfl App. B)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsim.core import checks, rng
from fedsim.core.errors import ConfigError, MissingDataError
from fedsim.data.datasets.data_files import Files, data_root
from fedsim.data.datasets.dataset import Dataset

DIGITS_FILE = "emnist/fed_emnist_digitsonly_{}.h5"
ALL_CHARACTERS_FILE = "emnist/fed_emnist_{}.h5"


def _train_test_files(file: str, archive: str) -> Files:
    """Two files, for training and testing, from an archive of TensorFlow Federated."""
    return Files(
        ((file.format("train"), file.format("test")),),
        "TensorFlow Federated",
        f"https://storage.googleapis.com/tff-datasets-public/{archive}",
        folder="emnist",
        module="h5py",
        extra="emnist",
    )


class EMNIST(Dataset):
    """Grey images [1, 28, 28] of handwritten digits, ten classes; every writer is a client (partition=natural).

    Read from ROOT/emnist/fed_emnist_digitsonly_train.h5 and …_test.h5 (3,383 writers, 341,873 + 40,832 images), whose
    groups examples/WRITER hold `pixels` [n, 28, 28] in [0, 1] (white is 1) and `label` [n]. Kept as uint8, so pixels
    are rounded to 1/255. The test set contains the test images of the chosen writers. Needs h5py: the extra `emnist`.

    Args:
        writers: number of writers, drawn at random among those with training images; None or 'all': all.
        root: see `data_root`.
        seed: of that draw; all replicates have the same writers.
    """

    files = _train_test_files(DIGITS_FILE, "fed_emnist_digitsonly.tar.bz2")
    title, file, kinds = "emnist", DIGITS_FILE, 10

    def __init__(self, writers: int | str | None = None, root: str | None = None, seed: int = 0) -> None:
        train, test = (self._read(data_root(root) / self.file.format(split)) for split in ("train", "test"))
        names = sorted(name for name, (_, labels) in train.items() if len(labels))
        if writers not in (None, "all"):
            count = checks.check_whole_number("writers", writers)
            if count > len(names):
                raise ConfigError(
                    f"{{writers}}={writers} exceeds the {len(names)} writers of the files; lower clients",
                    mentions=("writers",),
                )
            chosen_writers = rng.generator(seed, rng.Purpose.DATA).choice(len(names), count, replace=False)
            names = [names[i] for i in sorted(chosen_writers)]
        (train_x, train_y), (test_x, test_y) = (
            _concatenate_writer_samples(train[n] for n in names),
            _concatenate_writer_samples(test[n] for n in names if n in test),
        )
        owners, test_owners = (
            torch.as_tensor(np.repeat(np.arange(len(names)), [len(split[n][1]) if n in split else 0 for n in names]))
            for split in (train, test)
        )
        super().__init__(
            self.title,
            train_x,
            train_y,
            test_x if len(test_x) else None,
            test_y if len(test_x) else None,
            classes=type(self).kinds,
            owners=owners,
            test_owners=test_owners if len(test_x) else None,
            client_names=tuple(names),
        )

    @classmethod
    def _read(cls, path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Writer → images [n, 28, 28] uint8 and labels [n] int64."""
        h5py, writers = _h5py(), {}
        try:
            with h5py.File(path, "r") as file:
                for name, group in file["examples"].items():
                    writers[name] = cls._checked_images_and_labels(path, name, group["pixels"][()], group["label"][()])
        except MissingDataError:
            raise
        except Exception as error:  # h5py may raise anything on a damaged file
            raise MissingDataError(
                f"dataset={cls.title}: no usable {path.resolve()} ({{root}}, or the variable FEDSIM_DATA), with "
                f"groups examples/WRITER of pixels and label; {cls.files.remedy(cls.title)} ({error})",
                mentions=("root",),
            ) from error
        return writers

    @classmethod
    def _checked_images_and_labels(
        cls, path: Path, writer: str, pixels: np.ndarray, labels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One writer's images as uint8 and labels as int64; raises an error if they have another format."""
        has_shape = labels.ndim == 1 and pixels.shape == (len(labels), 28, 28)
        if not has_shape or not all(low <= v <= high for a, low, high in ((pixels, 0, 1), (labels, 0, cls.kinds - 1))
                               for v in (a.min(initial=0), a.max(initial=0))):  # fmt: skip
            raise MissingDataError(
                f"dataset={cls.title}: {path} has pixels {list(pixels.shape)} and label {list(labels.shape)} for "
                f"writer {writer}; expected [n, 28, 28] in [0, 1] and [n] labels 0 to {cls.kinds - 1}; download the "
                "files again"
            )
        return np.rint(pixels * 255).astype(np.uint8), labels.astype(np.int64)


class FEMNIST(EMNIST):
    """Grey images [1, 28, 28] of handwritten digits and letters, 62 classes; every writer is a client.

    Read as `EMNIST`, from ROOT/emnist/fed_emnist_train.h5 and …_test.h5 (3,400 writers): classes 0 to 9 are digits,
    10 to 35 capital letters, 36 to 61 small ones.

    Args:
        writers, root, seed: of `EMNIST`.
    """

    files = _train_test_files(ALL_CHARACTERS_FILE, "fed_emnist.tar.bz2")
    title, file, kinds = "femnist", ALL_CHARACTERS_FILE, 62


def _h5py() -> Any:
    """The module, or an error that says how to get it."""
    try:
        import h5py
    except ImportError as error:
        raise MissingDataError(
            "dataset=emnist is read by h5py, which is not installed; pip install 'fedsim-torch[emnist]'"
        ) from error
    return h5py


def _concatenate_writer_samples(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
    """All writers' images [N, 1, 28, 28] uint8 and labels [N]."""
    images, labels = [np.zeros((0, 28, 28), np.uint8)], [np.zeros(0, np.int64)]
    for x, y in pairs:
        images.append(x)
        labels.append(y)
    return torch.as_tensor(np.concatenate(images)[:, None]), torch.as_tensor(np.concatenate(labels))
