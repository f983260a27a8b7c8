"""Where per-client tensors lie between rounds: on the device, in host memory, or in a memory-mapped file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

PLACES = ("device", "host", "disk")


def placed(shape: tuple[int, ...], like: Tensor, place: str) -> Tensor:
    """An uninitialised tensor of this shape, with the dtype of `like` (and, on the 'device', its device).

    On 'disk' it is a map of a file in the folder for temporary files (variable TMPDIR), which has no name any more: it
    is gone with the process. The operating system keeps in memory as much of it as fits.
    """
    if place == "disk":
        with tempfile.TemporaryDirectory(prefix="fedsim-") as folder:
            file = str(Path(folder) / "rows")
            size = int(torch.Size(shape).numel())
            return torch.from_file(file, shared=True, size=size, dtype=like.dtype).reshape(shape)
    return torch.empty(shape, dtype=like.dtype, device="cpu" if place == "host" else like.device)
