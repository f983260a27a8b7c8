"""Worker threads that share a round's rows on a CPU, each with one intra-op thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")


@contextlib.contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Within the block PyTorch uses `count` intra-op threads: their number changes how sums round."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)


def map_threads(function: Callable[[Item], None], items: Sequence[Item], workers: int) -> None:
    """Call `function` with every item, in `workers` threads; the number of intra-op threads is restored afterwards.

    One thread a core, each with its own model, beats one model with all threads: small operators spend much of their
    time on meeting at barriers.
    """
    if workers == 1 or len(items) < 2:
        for item in items:
            function(item)
        return
    # Also set here, since the math library has one count per process.
    with (
        intra_op_threads(1),
        ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as thread_pool,
    ):
        for _ in thread_pool.map(function, items):
            pass
