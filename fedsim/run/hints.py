"""What PyTorch tells its own developers while a simulation runs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

VMAP_WARNING_TEXT = "There is a performance drop because we have not yet implemented the batching rule"


@contextlib.contextmanager
def suppress_vmap_warning() -> Iterator[None]:
    """Within the block nobody is asked to file an issue with PyTorch about an operation that has no batched kernel: the
    numbers are the same, and a trial chooses the executor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=VMAP_WARNING_TEXT)
        yield
