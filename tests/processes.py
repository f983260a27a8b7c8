"""Processes that are started afresh and awaited together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def exit_codes(count: int, target: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Of N spawned processes that do target(number, N, *arguments); one that takes 300 s is killed."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=(rank, count, *arguments)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in processes]
