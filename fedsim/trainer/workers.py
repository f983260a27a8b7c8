"""Worker threads that share a round's rows on a CPU, each with one intra-op thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")


def map_threads(function: Callable[[Item], None], items: Sequence[Item], workers: int) -> None:
    """Call `function` with every item, in `workers` threads; the number of intra-op threads is restored afterwards.

    One thread a core, each with its own model, beats one model with all threads: small operators spend much of their
    time on meeting at barriers.
    """
    if workers == 1 or len(items) < 2:
        for item in items:
            function(item)
        return
    intra_op = torch.get_num_threads()
    torch.set_num_threads(1)  # the math library's count is the process's, so it is set here too
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as thread_pool:
            for _ in thread_pool.map(function, items):
                pass
    finally:
        torch.set_num_threads(intra_op)
