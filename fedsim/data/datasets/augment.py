"""Random crop and horizontal flip, batched on the device and keyed like every other draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import CountOrZero, OneOf, Validated
from fedsim.core.effects import EffectiveIf


@dataclass
class CropFlip(Validated):
    """Crop at a random offset after padding, then flip left–right with probability one half.

    Attributes:
        padding: pixels of padding on every side; 0 turns cropping off.
        flip: whether to flip.
        per: 'image' draws for every image; 'batch' draws once per client and local step (what FedAWE's authors do).
        border: what the padding holds: 'black' pads the images themselves with zeros; 'mean' pads them once they are
            normalised, so that the border is the data set's mean colour (likewise theirs).
    """

    effective_if = (
        EffectiveIf(
            "per", lambda component, run: component.padding or component.flip, "dataset/augment=crop or crop_flip"
        ),
        EffectiveIf("border", lambda component, run: component.padding > 0, "dataset/augment=crop or crop_flip"),
        EffectiveIf(
            "border",
            lambda component, run: run.dataset.mean is not None,
            "images with a mean colour, such as dataset.standardise=true",
        ),
    )

    padding: CountOrZero = 4
    flip: bool = False
    per: Annotated[str, OneOf("image", "batch")] = "image"
    border: Annotated[str, OneOf("black", "mean")] = "black"

    @property
    def active(self) -> bool:
        """Whether this changes images at all."""
        return self.padding > 0 or self.flip

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """Augment a batch of every client.

        Args:
            images: [c, B, C, H, W], any dtype.
            keys: [c] int64, one per client and step.

        Returns:
            A tensor like `images`.
        """
        c, size, _, height, width = images.shape
        slots = torch.arange(size if self.per == "image" else 1, device=images.device)
        num_offsets = 2 * self.padding + 1

        def crop_offsets(counter: int) -> Tensor:
            draws = rng.integers(keys[:, None], slots * 3 + counter, num_offsets).expand(c, size)
            return draws.reshape(-1, 1) - self.padding

        rows = torch.arange(height, device=images.device) + crop_offsets(0)
        columns = torch.arange(width, device=images.device) + crop_offsets(1)
        if self.flip:
            mirrored = rng.integers(keys[:, None], slots * 3 + 2, 2).expand(c, size).reshape(-1, 1).bool()
            columns = torch.where(mirrored, columns.flip(1), columns)
        flat = images.flatten(0, 1)
        image = torch.arange(c * size, device=images.device)[:, None, None]
        inside_mask = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
        channels_last = flat.movedim(1, -1)[
            image, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]
        ]
        return (channels_last * inside_mask[..., None]).movedim(-1, 1).reshape_as(images).contiguous()
