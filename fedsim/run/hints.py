"""Warnings of PyTorch that are for its own developers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

VMAP_WARNING_TEXT = "There is a performance drop because we have not yet implemented the batching rule"


@contextlib.contextmanager
def suppress_vmap_warning() -> Iterator[None]:
    """Within the block, suppress the warning that asks to file an issue about an operation without a batched kernel:
    results are the same, and a trial chooses the executor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=VMAP_WARNING_TEXT)
        yield
