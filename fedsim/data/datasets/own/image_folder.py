"""A folder of images with one subfolder per class: torchvision's ImageFolder layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedsim.core.errors import ConfigError, MissingDataError
from fedsim.core.torchvision_import import import_torchvision
from fedsim.data.datasets.own.data import UserDataset
from fedsim.data.datasets.own.pictures import check_picture_options, image_pixels, stack_images
from fedsim.data.datasets.own.samples import RawSamples


class ImageFolder(UserDataset):
    """Images FOLDER/train/CLASS/* and FOLDER/test/CLASS/*, stored as uint8; or FOLDER/CLASS/*, of which a share is held
    out for testing.

    Args:
        path: the folder.
        size: [height, width] to which images are resized (bilinear); None: all images must have the same size.
        colours: 'rgb' or 'grey'; None: one channel if all images are grey, else three.
        client: a regular expression that is searched for in a file's path below FOLDER (or below train and test); its
            first group is the name of the file's client: `([^/_]+)_` matches the part before the first underscore.
            None: the partition decides.
        **options: of `UserDataset`.
    """

    def __init__(
        self,
        path: str,
        size: Sequence[int] | None = None,
        colours: str | None = None,
        client: str | None = None,
        standardise: bool = True,
        **options: Any,
    ) -> None:
        check_picture_options(size, colours)
        pattern = _compiled_pattern(client)
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise MissingDataError(
                f"{{path}}={folder} is not a folder (looked for {folder.resolve()})", mentions=("path",)
            )
        split_folders = [folder / split for split in ("train", "test") if (folder / split).is_dir()] or [folder]
        if split_folders[0].name == "test" and len(split_folders) == 1:
            raise MissingDataError(f"{{path}}={folder} has a folder test but no folder train", mentions=("path",))
        splits = [read(split, size, colours, pattern) for split in split_folders]
        name, test = folder.resolve().name, splits[1] if splits[1:] else None
        super().__init__(name, splits[0], test, standardise=standardise, **options)


def _compiled_pattern(client: str | None) -> re.Pattern[str] | None:
    """The expression, compiled."""
    if client is None:
        return None
    try:
        pattern = re.compile(client)
    except re.error as error:
        raise ConfigError(f"{{client}}={client} is not a regular expression ({error})", mentions=("client",)) from error
    if not pattern.groups:
        raise ConfigError(
            f"{{client}}={client} has no group; put the part that names the client in parentheses", mentions=("client",)
        )
    return pattern


def read(folder: Path, size: Sequence[int] | None, colours: str | None, client: re.Pattern[str] | None) -> RawSamples:
    """All images below a folder."""
    try:
        image_folder = import_torchvision().datasets.ImageFolder(str(folder))
    except (FileNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        raise MissingDataError(
            f"{{path}}: {folder} has no subfolders of images, one per class ({reason})", mentions=("path",)
        ) from error
    names = [Path(path).relative_to(folder).as_posix() for path, _ in image_folder.samples]

    def read_image(name: str) -> tuple[np.ndarray, bool]:
        try:
            with Image.open(folder / name) as image:
                return image_pixels(image, size)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = " ".join(str(error).split())
            raise MissingDataError(
                f"{{path}}: {folder / name} is not a readable image ({reason})", mentions=("path",)
            ) from error

    with ThreadPoolExecutor() as thread_pool:
        x = stack_images(str(folder), zip(names, thread_pool.map(read_image, names), strict=True), colours)
    y = np.array([image_folder.classes[label] for _, label in image_folder.samples])
    clients = None if client is None else clients_of_files(folder, names, client)
    return RawSamples(str(folder), x, y, clients, names.__getitem__, "last")


def clients_of_files(folder: Path, names: list[str], client: re.Pattern[str]) -> list[str]:
    """[N] client of each file."""
    name_matches = [client.search(name) for name in names]
    for name, match in zip(names, name_matches, strict=True):
        if match is None or not match[1]:
            raise ConfigError(
                f"{folder}: {{client}}={client.pattern} matches no client in {name}; correct one of them",
                mentions=("client",),
            )
    return [match[1] for match in name_matches if match is not None]
