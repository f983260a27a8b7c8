"""Warnings of PyTorch that are for its own developers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

VMAP_WARNING_TEXT = "There is a performance drop because we have not yet implemented the batching rule"


def ignore_vmap_warning() -> None:
    """Ignore the warning that asks to file an issue about an operation without a batched kernel: results are the same,
    and a trial chooses the executor."""
    warnings.filterwarnings("ignore", message=VMAP_WARNING_TEXT)


@contextlib.contextmanager
def suppress_vmap_warning() -> Iterator[None]:
    """Within the block, ignore this warning."""
    with warnings.catch_warnings():
        ignore_vmap_warning()
        yield
