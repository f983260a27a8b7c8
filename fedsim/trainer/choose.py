"""The stated rule by which `executor: auto` and `chunk: auto` decide, and what else may be tried.

- Plain descents (local=sgd, momentum, adam, and local=apfl whose α rests during a round; without clipping, on data that
  do not answer the model): `fused` for models of linear layers and, in a line with them, convolutions; for any
  convolutions on a CPU.
- Convolutions on a CPU: `loop` (batched convolutions become grouped ones, which are 2–3 times slower there).
- Everything else: `vmap`.
- On a CPU, rows that run one by one (`loop`, and `fused` with convolutions) are shared by one worker thread per core;
  rows that run together leave the cores to their batched kernels.
- As many rows go through a module together as stay near the cache with parameters and one batch of each:
  `CPU_CHUNK_BYTES` under `vmap`, `CPU_STACK_BYTES` under `fused`; on a GPU a share of the free memory.

Models of linear layers, which `fused` takes in stacks, need no more than this rule. For all others it names the first
of several candidates, which are timed in the first round (`fedsim.trainer.trial`) unless `trial` is false, the run is
`deterministic`, or several ranks share it: they follow the rule.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from dataclasses import dataclass

import torch

from fedsim.core.errors import ConfigError
from fedsim.local import LocalRule
from fedsim.models import RowModel
from fedsim.shift import Shift
from fedsim.trainer.agreement import Agreement
from fedsim.trainer.cuda_graph import check_graphs
from fedsim.trainer.execution import Execution
from fedsim.trainer.fused_executor import is_model_stackable, num_models_in_use, plain_descents

log = logging.getLogger(__name__)

MAX_WORKERS = 16  # threads for one processor, at most
CPU_CHUNK_BYTES = 64 * 2**20
CPU_STACK_BYTES = 32 * 2**20
GPU_MEMORY_SHARE = 0.25
UNCOMPILED_MODES = ("replay", "never")
GPU_COPIES = 8  # parameters, gradients, activations and their temporaries, in units of parameters plus batch
CHUNK_ROWS_BY_EXECUTOR = {
    "loop": 64,
    "fused": 1024,
}  # rows of a chunk, of which only the sample numbers are made at once


@dataclass(frozen=True)
class ExecutorChoice:
    """What was chosen, and why."""

    executor: str
    chunk: int  # rows handed to the executor together
    workers: int
    reason: str
    stack: int = 1  # of which so many go through one module under `fused`
    compile: str = "replay"

    def describe(self) -> str:
        """One line for the log."""
        row_count = self.chunk if self.executor == "vmap" else self.stack
        mode = f"up to {row_count} rows at once" if row_count > 1 else f"row by row in {self.workers} threads"
        reason = self.reason if self.compile in UNCOMPILED_MODES else "compiled, which takes a while in the first round"
        reason = "captured as CUDA graphs" if self.compile == "graph" else reason
        return f"{self.executor} executor, {mode} ({reason})"


def candidates(
    requested: Execution,
    model: RowModel,
    rule: LocalRule,
    shift: Shift,
    batch_size: int,
    sample_size: int,
    ranks: int = 1,
    agreement: Agreement | None = None,
) -> list[ExecutorChoice]:
    """Resolve 'auto' settings: what the stated rule chooses, and then what else may be tried.

    Args:
        requested: of which these are looked at.
            executor: 'auto', 'fused', 'vmap' or 'loop'.
            chunk: rows per chunk, or 'auto'.
            workers: threads that share rows which run one by one on a CPU, or 'auto'.
            compile: of vmapped steps: 'replay' has small ones recorded (`fedsim.trainer.replay`), 'never' does not,
            'graph' has a GPU capture what was recorded (`fedsim.trainer.captures`); or the mode in which
            `torch.compile` makes one program of a step: 'default', 'reduce-overhead' (CUDA graphs, for steps too short
            to keep a GPU busy) or 'max-autotune'.
            trial, deterministic: whether more than the rule's choice is a candidate.
        model, rule, shift: what runs.
        batch_size: largest batch of a row.
        sample_size: numbers in one input.
        ranks: processes that share the run.
        agreement: says which executors are right for a user's module and loss; what it finds the module to need
            (batches without padding, a fresh copy for each client) becomes one of its traits.

    Raises:
        ConfigError: executor=fused where the rule's step is more than plain descents, compile where nothing is vmapped.
    """
    if requested.compile == "graph":
        check_graphs(rule, model, shift)
    batch_numbers = batch_size * max(sample_size, 1)
    if model.traits.isolated is not None:
        loop = _isolated_rows_choice(requested, model, rule, shift, batch_numbers)
        return _agreeing_choices([loop], agreement, requested, model) or [loop]
    executor = _executor_to_compile(requested)
    plain, can_stack = bool(plain_descents(rule, shift, model)), is_model_stackable(model)
    is_executor_settled = executor in ("fused", "loop") or (executor == "auto" and plain and can_stack)
    unvmapped_reason = None if is_executor_settled else model.no_vmap_reason
    _check_possible(executor, model, plain, unvmapped_reason)
    reasons = {executor: "as configured"}
    if executor == "auto":
        slow_batched = model.convolutional and model.device.type == "cpu"
        reasons = _ordered_executors(plain, can_stack, slow_batched, unvmapped_reason is None)
        if not requested.trial or requested.deterministic or ranks > 1:
            first = next(iter(reasons))  # the stated rule's: a clock would not say the same twice, or on all ranks
            reasons = {first: reasons[first]}
    choices = [
        _choice_with_chunk(name, reason, requested, model, rule, shift, batch_numbers)
        for name, reason in reasons.items()
    ]
    agreeing = _agreeing_choices(choices, agreement, requested, model)
    if agreeing is None:  # the model has become one that needs another way
        return candidates(requested, model, rule, shift, batch_size, sample_size, ranks, agreement)
    return agreeing


def _isolated_rows_choice(
    requested: Execution, model: RowModel, rule: LocalRule, shift: Shift, batch_numbers: int
) -> ExecutorChoice:
    """Rows one by one, the only way for a model of which each client needs a fresh copy."""
    if requested.executor not in ("auto", "loop"):
        raise ConfigError(
            f"trainer.executor={requested.executor} cannot run this model, since {model.traits.isolated}; use "
            "trainer.executor=auto, or loop"
        )
    reason = f"a fresh copy of the module for each client, since {model.traits.isolated}"
    return _choice_with_chunk("loop", reason, requested, model, rule, shift, batch_numbers)


def _executor_to_compile(requested: Execution) -> str:
    """The executor that is requested for; `vmap` in place of 'auto' where steps are compiled, which no other can."""
    if requested.compile in UNCOMPILED_MODES:
        return requested.executor
    if requested.executor not in ("auto", "vmap"):
        raise ConfigError(f"trainer.compile={requested.compile} is for trainer.executor=vmap, not {requested.executor}")
    return "vmap"


def _check_possible(executor: str, model: RowModel, plain: bool, unvmapped_reason: str | None) -> None:
    if executor == "vmap" and unvmapped_reason is not None:
        raise ConfigError(
            f"trainer.executor=vmap cannot run {_model_name(model)} ({unvmapped_reason}); use trainer.executor=auto, "
            "or loop"
        )
    if executor == "fused" and not plain:
        raise ConfigError(
            "trainer.executor=fused takes plain descents only: local=sgd, momentum or adam, or local=apfl with "
            "local.alpha_every=round and without a ridge on mixed parameters; no local.clip, and shift=none; use "
            "trainer.executor=auto"
        )


def _agreeing_choices(
    choices: list[ExecutorChoice], agreement: Agreement | None, requested: Execution, model: RowModel
) -> list[ExecutorChoice] | None:
    """Those that give what plain PyTorch gives; None after a trait of the model has changed, so that others may.

    Raises:
        ConfigError: there are none.
    """
    if agreement is None:
        return choices
    traits = model.traits
    reasons = {choice.executor: agreement.disagreement_reason(choice.executor, traits) for choice in choices}
    agreeing_choices = [choice for choice in choices if reasons[choice.executor] is None]
    if not model.mixes_samples and len(agreeing_choices) < len(choices):
        unpadded = dataclasses.replace(traits, mixes_samples=True)
        if any(
            reason and agreement.disagreement_reason(name, unpadded) is None
            for name, reason in reasons.items()
            if name != "loop"
        ):
            log.info("trainer: batches of %s are not padded, since padding changes its results", _model_name(model))
            traits.mixes_samples = True
            return None
    if agreeing_choices:
        return agreeing_choices
    reason = next(iter(reasons.values()))
    if requested.executor in ("auto", "loop") and traits.isolated is None:
        isolated_traits = dataclasses.replace(traits, isolated="one client's pass changes the next one's")
        if agreement.disagreement_reason("loop", isolated_traits) is None:
            traits.isolated = isolated_traits.isolated
            return None
    remedy = (
        "trainer.executor=auto" if requested.executor != "auto" else "plain operations of PyTorch in its forward pass"
    )
    raise ConfigError(
        f"model: {_model_name(model)} cannot be trained as trainer.executor={requested.executor} does it ({reason}); "
        f"use {remedy}"
    )


def _model_name(model: RowModel) -> str:
    return type(model.training_module).__name__


def _ordered_executors(plain: bool, stackable: bool, convolutions: bool, vmapped: bool) -> dict[str, str]:
    """Executors, and why each: the rule's first. `convolutions`: on a CPU."""
    if plain and stackable:
        return {"fused": "plain descents"}
    is_possible = {"fused": plain, "vmap": vmapped, "loop": True}
    first, reason = "vmap", "batched kernels"
    if plain and (convolutions or not vmapped):
        first, reason = "fused", "plain descents"
    elif not vmapped:
        first, reason = "loop", "what the model does cannot be vmapped"
    elif convolutions:
        first, reason = "loop", "convolutions on a CPU"
    return {first: reason} | {name: "by trial" for name, possible in is_possible.items() if possible and name != first}


@functools.cache  # said once
def num_workers(requested: int) -> int:
    """As many threads as are requested for, each with a model of its own, as long as processors have a use for them."""
    limit = MAX_WORKERS * (os.cpu_count() or 1)
    if requested > limit:
        log.warning(
            "trainer.workers=%d is too large for %d processors; %d workers are used",
            requested,
            limit // MAX_WORKERS,
            limit,
        )
    return min(requested, limit)


def _choice_with_chunk(
    executor: str, reason: str, requested: Execution, model: RowModel, rule: LocalRule, shift: Shift, batch: int
) -> ExecutorChoice:
    """The executor with its chunk and workers; `batch`: numbers in a row's."""
    cpu = model.device.type == "cpu"
    threads = torch.get_num_threads() if requested.workers == "auto" else num_workers(int(requested.workers))
    models = num_models_in_use(plain_descents(rule, shift, model)) if executor == "fused" else 1
    row_bytes = torch.finfo(model.dtype).bits // 8 * (models * model.dimension + batch)
    if cpu:
        budget: float = CPU_STACK_BYTES if executor == "fused" else CPU_CHUNK_BYTES
    else:
        budget = torch.cuda.mem_get_info(model.device)[0] * GPU_MEMORY_SHARE / GPU_COPIES
    rows = max(1, math.floor(budget / row_bytes))
    if executor == "vmap":
        return ExecutorChoice(
            "vmap", rows if requested.chunk == "auto" else int(requested.chunk), 1, reason, compile=requested.compile
        )
    chunk = int(requested.chunk) if requested.chunk != "auto" else CHUNK_ROWS_BY_EXECUTOR[executor] if cpu else rows
    stack = min(rows, chunk) if executor == "fused" and is_model_stackable(model) else 1
    return ExecutorChoice(executor, chunk, threads if cpu and stack == 1 else 1, reason, stack)
