"""The precision in which models are trained: `trainer.precision`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import torch

from fedsim.core.errors import ConfigError

PRECISIONS = ("full", "tf32", "bf16")
BF16_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16", "svebf16")  # of x86 and ARM, in Linux's words


def check_precision(precision: str, device: torch.device, dtype: torch.dtype) -> str:
    """'full': that of trainer.dtype; 'tf32': matrix products and convolutions of float32 on tensor cores, with 10 bits
    of mantissa; 'bf16': PyTorch's autocast to bfloat16, with 8, in forward passes. Rows, losses, sums stay in float32.

    Raises:
        ConfigError: where device or dtype has no such thing.
    """
    if precision != "full" and dtype != torch.float32:
        raise ConfigError(f"trainer.precision={precision} is for trainer.dtype=float32; use trainer.precision=full")
    if precision == "tf32" and device.type != "cuda":
        raise ConfigError(f"trainer.precision=tf32 needs a GPU, and the device is {device}; use full or bf16")
    return precision


@contextlib.contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Within the block a GPU may round the factors of float32 products to TF32, or it may not; PyTorch's default allows
    it in convolutions."""
    previous_flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = previous_flags


@functools.cache
def bfloat16_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...] | None:
    """Return the processor's units for products in bfloat16; None if the system does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    entries = (line.partition(":") for line in lines)
    cpu_flags = {
        flag_name for name, _, value in entries if name.strip() in ("flags", "Features") for flag_name in value.split()
    }
    return tuple(unit for unit in BF16_CPU_FLAGS if unit in cpu_flags)


def bfloat16_units_text() -> str:
    """Describe the processor's bfloat16 units in words."""
    units = bfloat16_cpu_flags()
    return "unknown" if units is None else ", ".join(units) or f"none of {', '.join(BF16_CPU_FLAGS)}"
