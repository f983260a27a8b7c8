"""Settings of PyTorch during a run: float32 products without TF32, and deterministic algorithms if they are asked for.

`deterministic: true` gives bitwise equal results of every run on the same device. Every draw is a function of seed,
round and client anyway; what may differ from run to run is the order in which a GPU's threads add numbers up, and which
of several kernels a library picks.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

from fedsim.core.errors import RunError
from fedsim.models.precision import tf32_products

CUBLAS_WORKSPACE = ":4096:8"  # the size of cuBLAS' workspace with which it is deterministic
NONDETERMINISTIC_MESSAGE = "does not have a deterministic implementation"

P = ParamSpec("P")
T = TypeVar("T")


def prepare_cublas(enabled: bool) -> bool:
    """`enabled`; cuBLAS reads its setting once, at the first matrix product, so it is made now. "
    "The user's own stands."""
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    return enabled


def with_numerical_settings(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method of an object whose attribute `deterministic` says whether to run it deterministically."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with numerical_settings(args[0].deterministic):  # type: ignore[attr-defined]
            return method(*args, **kwargs)

    return run


@contextlib.contextmanager
def numerical_settings(deterministic: bool) -> Iterator[None]:
    """Within the block a GPU does not round float32 products to TF32, apart from the local steps of
    trainer.precision=tf32, and PyTorch uses only deterministic algorithms if they are asked for."""
    with tf32_products(False), deterministic_algorithms(deterministic):
        yield


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Within the block PyTorch uses only deterministic algorithms; the previous setting is restored afterwards.

    Raises:
        RunError: for an operation that has none on this device; the message names it.
    """
    if not enabled:
        yield
        return
    was_deterministic, was_warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    cudnn_benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # which picks the kernel that was the quickest today
    try:
        yield
    except RuntimeError as error:
        if NONDETERMINISTIC_MESSAGE not in str(error):
            raise
        operation = str(error).split(NONDETERMINISTIC_MESSAGE)[0].strip()
        raise RunError(
            f"deterministic=true, but {operation} {NONDETERMINISTIC_MESSAGE} on this device; "
            "use deterministic=false, or device=cpu"
        ) from error
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warn_only)
        torch.backends.cudnn.benchmark = cudnn_benchmark
