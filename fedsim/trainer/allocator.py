"""Let glibc keep freed memory, so that the large temporaries of every step are not mapped and zeroed anew.

By default glibc serves blocks above a threshold by mmap and returns them to the kernel when freed; each step then
pays a page fault per 4 KiB. Keeping them made an MLP round on a CPU up to 3 times faster.
"""

from __future__ import annotations

import ctypes
import sys

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def configure_allocator(device: torch.device) -> bool:
    """Raise glibc's thresholds to 1 GiB, for this process, if models are on the CPU.

    Returns:
        Whether they were raised: False for another device, and where the C library has no `mallopt`.
    """
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, 1 << 30))
