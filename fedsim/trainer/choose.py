"""The stated rule by which `executor: auto` and `chunk: auto` decide.

- Convolutions on a CPU: `loop`, one worker thread per core (batched convolutions become grouped ones, which are 2–3
  times slower there). Everything else: `vmap`.
- A vmapped chunk holds so many rows that parameters and one batch of each stay near the cache: `CPU_CHUNK_BYTES` on a
  CPU; on a GPU a share of the free memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedsim import checks
from fedsim.models import RowModel

EXECUTORS = ("auto", "vmap", "loop")
CPU_CHUNK_BYTES = 64 * 2**20
GPU_MEMORY_SHARE = 0.25
GPU_COPIES = 8  # parameters, gradients, activations and their temporaries, in units of parameters plus batch
LOOP_CHUNK = 64  # rows whose sample numbers are drawn together


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    executor: str
    chunk: int
    workers: int
    reason: str

    def describe(self) -> str:
        """One line for the log."""
        how = f"{self.workers} threads" if self.executor == "loop" else f"up to {self.chunk} rows at once"
        return f"{self.executor} executor, {how} ({self.reason})"


def choose(
    executor: str, chunk: int | str, workers: int | str, model: RowModel, batch_size: int, sample_size: int
) -> Choice:
    """Resolve 'auto' settings.

    Args:
        executor: 'auto', 'vmap' or 'loop'.
        chunk: rows per chunk, or 'auto'.
        workers: threads of the loop executor on a CPU, or 'auto'.
        model: the model to run.
        batch_size: largest batch of a row.
        sample_size: numbers in one input.
    """
    executor = checks.choice("trainer.executor", executor, EXECUTORS)
    chunk = checks.auto_or_whole("trainer.chunk", chunk)
    workers = checks.auto_or_whole("trainer.workers", workers)
    cpu = model.device.type == "cpu"
    reason = "as configured"
    if executor == "auto":
        executor = "loop" if cpu and model.convolutional else "vmap"
        reason = "convolutions on a CPU" if executor == "loop" else "batched kernels"
    if executor == "loop":
        threads = torch.get_num_threads() if workers == "auto" else int(workers)
        return Choice("loop", LOOP_CHUNK if chunk == "auto" else int(chunk), threads if cpu else 1, reason)
    if chunk == "auto":
        row_bytes = torch.finfo(model.dtype).bits // 8 * (model.dimension + batch_size * max(sample_size, 1))
        budget: float = CPU_CHUNK_BYTES
        if not cpu:
            free, _ = torch.cuda.mem_get_info(model.device)
            budget = free * GPU_MEMORY_SHARE / GPU_COPIES
        chunk = max(1, math.floor(budget / row_bytes))
    return Choice("vmap", int(chunk), 1, reason)
