"""Conversion of images to bytes of one shape: different sizes raise an error, unless a size is set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from fedsim.core import checks
from fedsim.core.errors import ConfigError

COLOUR_MODES = ("rgb", "grey")
GREY_PILLOW_MODES = ("1", "L", "LA")
MULTIBYTE_MODES = ("I", "F", "I;16", "I;16B", "I;16L")  # more than a byte a pixel


def check_picture_options(size: Sequence[int] | None, colours: str | None) -> None:
    """Check the size and colours of images."""
    if size is not None:
        if len(size) != 2:
            raise ConfigError(f"{{size}}={list(size)} must be two numbers, height and width", mentions=("size",))
        for number in size:
            checks.check_whole_number("size", number)
    if colours is not None:
        checks.check_choice("colours", colours, COLOUR_MODES)


def image_pixels(image: Image.Image, size: Sequence[int] | None) -> tuple[np.ndarray, bool]:
    """[H, W, 3] uint8 of one image, resized (bilinear) if a size is set; and whether it is grey.

    Raises:
        ValueError: its pixels are not bytes.
    """
    if image.mode in MULTIBYTE_MODES:
        raise ValueError(f"its pixels are not bytes (mode {image.mode})")
    grey = image.mode in GREY_PILLOW_MODES
    image = image.convert("RGB")
    if size is not None and image.size != (size[1], size[0]):
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(image), grey


def stack_images(
    source: str, images_by_name: Iterable[tuple[str, tuple[np.ndarray, bool]]], colours: str | None
) -> np.ndarray:
    """[N, H, W, C] uint8 of all images, given with their names; one channel if all are or become grey.

    Raises:
        ConfigError: they differ in size.
    """
    images: list[np.ndarray] = []
    first_name, all_grey = "", True
    for name, (image, without_colour) in images_by_name:
        if images and image.shape != images[0].shape:
            (height, width), (other_height, other_width) = images[0].shape[:2], image.shape[:2]
            raise ConfigError(
                f"{source}: images differ in size: {first_name} is {width}×{height}, {name} "
                f"{other_width}×{other_height}; "
                f"{{size}}=[{height},{width}] resizes them",
                mentions=("size",),
            )
        first_name, all_grey = first_name or name, all_grey and without_colour
        images.append(image)
    if not images:
        raise ConfigError(f"{source}: there are no images")
    stack = np.stack(images)
    if colours == "rgb" or (colours is None and not all_grey):
        return stack
    return stack[..., :1].copy() if all_grey else np.stack([_to_grey(image) for image in stack])


def _to_grey(image: np.ndarray) -> np.ndarray:
    """[H, W, 1] from [H, W, 3], with Pillow's weights of colours."""
    return np.asarray(Image.fromarray(image).convert("L"))[..., None]


def is_picture(value: Any) -> bool:
    """Whether it is a Pillow image."""
    return isinstance(value, Image.Image)
