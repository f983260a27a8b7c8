"""Placement of per-client tensors between rounds: on the device, in host memory, or in a memory-mapped file.

`python scripts/client_memory.py` measures what that saves. A checkpoint passes through host memory as a whole, wherever
the rows lie.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

STORAGE_PLACES = ("device", "host", "disk")

_DEVICE_COPIES = WeakTensorKeyDictionary()  # tensor → its version, and a weak reference to its copy by device


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device: itself if it is there, else a copy. It is the same copy for as long as somebody
    holds it and the tensor is not written to."""
    if tensor.device == device or tensor.is_inference():
        return tensor.to(device)
    version, copies = _DEVICE_COPIES.get(tensor, (tensor._version, {}))
    moved = copies[device]() if device in copies and version == tensor._version else None
    if moved is None:
        moved = tensor.to(device)
        _DEVICE_COPIES[tensor] = (tensor._version, {device: weakref.ref(moved)})
    return moved


def zeros_at(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, storage: str) -> Tensor:
    """Return zeros on the device or another place.

    On 'disk' it is a map of a file in the folder for temporary files (variable TMPDIR), which has no name any more: it
    is gone with the process. The operating system keeps in memory as much of it as fits.
    """
    if storage == "disk":
        with tempfile.TemporaryDirectory(prefix="fedsim-") as folder:
            file = str(Path(folder) / "rows")
            size = int(torch.Size(shape).numel())
            return torch.from_file(file, shared=True, size=size, dtype=dtype).reshape(shape)
    return torch.zeros(shape, dtype=dtype, device="cpu" if storage == "host" else device)


def capacity_bytes(device: torch.device, storage: str) -> float:
    """Return the total bytes of a place, used or not; infinity if unknown."""
    if storage == "disk":
        return float(shutil.disk_usage(tempfile.gettempdir()).total)
    if storage == "device" and device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):  # on systems other than Linux and macOS
        return float("inf")


def is_memory_mapped(tensor: Tensor) -> bool:
    """Whether the tensor is stored in a memory-mapped file."""
    return tensor.untyped_storage().filename is not None
