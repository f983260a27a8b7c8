"""Handwritten digits bundled with scikit-learn: 1,797 images of 8×8 pixels, no download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from fedsim.data.datasets.augment import CropFlip
from fedsim.data.datasets.dataset import Dataset


class Digits(Dataset):
    """The embedded default: 10 classes, inputs [1, 8, 8] in [0, 1], every fifth sample held out for testing.

    Args:
        augment: random crop and flip of training images.
    """

    def __init__(self, augment: CropFlip | None = None) -> None:
        images, labels = _bundled_digits()
        x = torch.as_tensor(images.astype(np.float32) / 16.0).reshape(-1, 1, 8, 8)
        y = torch.as_tensor(labels.astype(np.int64))
        held_out = torch.arange(len(y)) % 5 == 4
        super().__init__("digits", x[~held_out], y[~held_out], x[held_out], y[held_out], classes=10, augment=augment)


def _bundled_digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels [1797, 64] in 0…16 and labels, from the file that scikit-learn reads; importing it takes seconds."""
    package = importlib.util.find_spec("sklearn")
    folders = [] if package is None else [Path(folder) for folder in package.submodule_search_locations or ()]
    for file in (folder / "datasets" / "data" / "digits.csv.gz" for folder in folders):
        if file.exists():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images, labels
