"""The stated rule by which `executor: auto` and `chunk: auto` decide.

- Plain descents (local=sgd, and local=apfl whose α rests during a round; without clipping, on data that do not answer
  the model): `fused` for models of linear layers and, in a line with them, convolutions; for any convolutions on a CPU.
- Convolutions on a CPU: `loop` (batched convolutions become grouped ones, which are 2–3 times slower there).
- Everything else: `vmap`.
- On a CPU, rows that run one by one (`loop`, and `fused` with convolutions) are shared by one worker thread per core;
  rows that run together leave the cores to their batched kernels.
- As many rows go through a module together as stay near the cache with parameters and one batch of each:
  `CPU_CHUNK_BYTES` under `vmap`, `CPU_STACK_BYTES` under `fused`; on a GPU a share of the free memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedsim.core.errors import ConfigError
from fedsim.local import LocalRule
from fedsim.models import RowModel
from fedsim.shift import Shift
from fedsim.trainer.execution import Execution
from fedsim.trainer.fused_executor import descents, models_in_use, stacks

CPU_CHUNK_BYTES = 64 * 2**20
CPU_STACK_BYTES = 32 * 2**20
GPU_MEMORY_SHARE = 0.25
GPU_COPIES = 8  # parameters, gradients, activations and their temporaries, in units of parameters plus batch
DRAWN_TOGETHER = {"loop": 64, "fused": 1024}  # rows of a chunk, of which only the sample numbers are made at once


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    executor: str
    chunk: int  # rows handed to the executor together
    workers: int
    reason: str
    stack: int = 1  # of which so many go through one module under `fused`
    compile: str = "never"

    def describe(self) -> str:
        """One line for the log."""
        together = self.chunk if self.executor == "vmap" else self.stack
        how = f"up to {together} rows at once" if together > 1 else f"row by row in {self.workers} threads"
        reason = self.reason if self.compile == "never" else "compiled, which takes a while in the first round"
        return f"{self.executor} executor, {how} ({reason})"


def choose(
    asked: Execution,
    model: RowModel,
    rule: LocalRule,
    shift: Shift,
    batch_size: int,
    sample_size: int,
) -> Choice:
    """Resolve 'auto' settings.

    Args:
        asked: of which these are looked at.
            executor: 'auto', 'fused', 'vmap' or 'loop'.
            chunk: rows per chunk, or 'auto'.
            workers: threads that share rows which run one by one on a CPU, or 'auto'.
            compile: 'never', or the mode in which `torch.compile` makes one program of a vmapped step: 'default',
            'reduce-overhead' (CUDA graphs, for steps too short to keep a GPU busy) or 'max-autotune'.
        model, rule, shift: what runs.
        batch_size: largest batch of a row.
        sample_size: numbers in one input.

    Raises:
        ConfigError: executor=fused where the rule's step is more than plain descents, compile where nothing is vmapped.
    """
    executor, chunk, workers, compile = asked.executor, asked.chunk, asked.workers, asked.compile
    cpu = model.device.type == "cpu"
    compiled = compile != "never"
    if compiled and executor == "auto":
        executor = "vmap"
    if compiled and executor != "vmap":
        raise ConfigError(f"trainer.compile={compile} is for trainer.executor=vmap, not {executor}")
    steps, together = descents(rule, shift, model), stacks(model)
    reason = "as configured"
    alone = model.traits.unvmapped
    if executor == "vmap" and alone is not None:
        raise ConfigError(
            f"trainer.executor=vmap cannot run {type(model.training_module).__name__} ({alone}); use "
            "trainer.executor=auto, or loop"
        )
    if executor == "auto":
        executor, reason = _best(bool(steps), together, cpu and model.convolutional)
        if executor == "vmap" and alone is not None:
            executor, reason = (
                ("fused", "plain descents") if steps else ("loop", "what the model does cannot be vmapped")
            )
    elif executor == "fused" and not steps:
        raise ConfigError(
            "trainer.executor=fused takes plain descents only: local=sgd, or local=apfl with local.alpha_every=round "
            "and without a ridge on mixed parameters; no local.clip, shift=none, and not trainer.precision=bf16; use "
            "trainer.executor=auto"
        )
    threads = torch.get_num_threads() if workers == "auto" else int(workers)
    models = models_in_use(steps) if executor == "fused" else 1
    row_bytes = torch.finfo(model.dtype).bits // 8 * (models * model.dimension + batch_size * max(sample_size, 1))
    if cpu:
        budget: float = CPU_STACK_BYTES if executor == "fused" else CPU_CHUNK_BYTES
    else:
        budget = torch.cuda.mem_get_info(model.device)[0] * GPU_MEMORY_SHARE / GPU_COPIES
    rows = max(1, math.floor(budget / row_bytes))
    if executor == "vmap":
        return Choice("vmap", rows if chunk == "auto" else int(chunk), 1, reason, compile=compile)
    if chunk == "auto":
        chunk = DRAWN_TOGETHER[executor] if cpu else rows
    stack = min(rows, int(chunk)) if executor == "fused" and together else 1
    return Choice(executor, int(chunk), threads if cpu and stack == 1 else 1, reason, stack)


def _best(plain: bool, together: bool, convolutions: bool) -> tuple[str, str]:
    """An executor, and why. `convolutions`: on a CPU."""
    if plain and (together or convolutions):
        return "fused", "plain descents"
    if convolutions:
        return "loop", "convolutions on a CPU"
    return "vmap", "batched kernels"
