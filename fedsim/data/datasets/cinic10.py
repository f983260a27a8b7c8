"""CINIC-10: CIFAR-10's classes extended by images of ImageNet, a folder of PNG files per class."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedsim.core.errors import MissingDataError, OutputError
from fedsim.core.files import replacement_file
from fedsim.core.torchvision_import import import_torchvision
from fedsim.data.datasets.data_files import Files
from fedsim.data.datasets.vision import Images, error_text

PACKED_FILE_PATTERN = "fedsim-{split}.npz"  # the decoded images, so that 90,000 files are read only once


class CINIC10(Images):
    """90,000 + 90,000 colour images [3, 32, 32] (Darlow et al. 2018), from ROOT/CINIC-10/{train,test}/CLASS/*.png.

    The validation third is not used, as in fedawe. When first read, each half is stored as one file in the same folder,
    if it is writable.
    """

    source, label = "CINIC-10", "cinic10"
    files = Files(
        (("CINIC-10/fedsim-train.npz", "CINIC-10/fedsim-test.npz"), ("CINIC-10/train", "CINIC-10/test")),
        "datashare.ed.ac.uk/handle/10283/3192",
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
        folder="CINIC-10",
    )
    mean, std = (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)

    def _load(self, folder: Path, train: bool, download: bool) -> tuple[Tensor, Tensor]:
        split = "train" if train else "test"
        packed_path = folder / self.source / PACKED_FILE_PATTERN.format(split=split)
        if packed_path.exists():
            try:
                with np.load(packed_path, allow_pickle=False) as arrays:
                    return torch.as_tensor(arrays["x"]), torch.as_tensor(arrays["y"])
            except Exception as error:  # a damaged archive may raise any error
                raise MissingDataError(
                    f"dataset=cinic10: {packed_path} is damaged ({error_text(error)}); delete it, "
                    "and the images are read "
                    "again"
                ) from error
        try:
            image_folder = import_torchvision().datasets.ImageFolder(
                str(folder / self.source / split), allow_empty=False
            )
            with ThreadPoolExecutor() as thread_pool:
                images = list(thread_pool.map(_pixels, [path for path, _ in image_folder.samples]))
        except (OSError, UnidentifiedImageError, ValueError) as error:
            raise MissingDataError(
                f"dataset=cinic10: no usable images in {(folder / self.source / split).resolve()}; "
                f"{self.remedy} ({error})"
            ) from error
        x = np.stack(images).transpose(0, 3, 1, 2)
        y = np.array([label for _, label in image_folder.samples], dtype=np.int64)
        _save_decoded_images(packed_path, x, y)
        return torch.as_tensor(np.ascontiguousarray(x)), torch.as_tensor(y)


def _pixels(path: str) -> np.ndarray:
    """[32, 32, 3] uint8; some files are greyscale or have a palette."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    if pixels.shape != (32, 32, 3):
        raise ValueError(f"{path} is {pixels.shape[1]}×{pixels.shape[0]} pixels, expected 32×32")
    return pixels


def _save_decoded_images(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    """Store the decoded images; if the folder is not writable, they are decoded again next time."""
    with contextlib.suppress(OutputError), replacement_file(path, "wb") as file:
        np.savez(file, x=x, y=y)
