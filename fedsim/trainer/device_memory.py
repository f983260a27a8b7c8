"""Memory of the device: glibc's thresholds for freed memory, and errors of a full device."""

from __future__ import annotations

import ctypes
import sys

import torch

from fedsim.core.errors import RunError

# Messages of the CPU's allocator and of libraries that allocate GPU memory themselves; all are RuntimeErrors.
OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "error: out of memory",
)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error is due to a lack of memory on the device."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        message_part in str(error) for message_part in OUT_OF_MEMORY_MESSAGES
    )


def single_client_memory_error(device: torch.device) -> RunError:
    """Return the error for a chunk of a single row that does not fit."""
    return RunError(
        f"out of memory on {device}: there is no room for a single client's local steps; lower batch_size or the "
        "model's size, put per-client memory elsewhere with trainer.memory=host, or choose another device"
    )


def device_memory_error_text(device: str) -> str:
    """Return the error for work that does not run in chunks and does not fit."""
    return (
        f"out of memory on device={device} outside local training; lower clients, len(seeds) or the model's size, put "
        "per-client memory elsewhere with trainer.memory=host, or choose another device"
    )


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def raise_malloc_thresholds(device: torch.device) -> bool:
    """Raise glibc's thresholds to 1 GiB, for this process, if models are on the CPU.

    Returns:
        Whether they were raised: False for another device, and where the C library has no `mallopt`.
    """
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, 1 << 30))
