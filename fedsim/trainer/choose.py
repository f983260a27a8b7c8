"""The rule by which `executor: auto` and `chunk: auto` decide, and the executors that may be tried in addition.

- Plain descents (local=sgd, momentum, adam, and local=apfl whose α rests during a round; without clipping, on data that
  do not react to the model): `fused` for models of linear layers, and for any convolutions on a CPU.
- Convolutions on a CPU, where steps are more than plain descents: `loop`, since vmapped convolutions are slower there.
- Convolutions on a GPU: `vmap`, which may turn them into grouped ones; `fused` and `loop` are tried in addition.
- Plain descents of small convolutional networks on a CPU: `grouped` may be faster than `fused`, which the first round
  measures. It pays with up to some 16 channels; wide convolutions are faster client by client.
- Everything else: `vmap`.
- On a CPU, rows that run one by one (`loop`, and `fused` with convolutions) and grouped rows are shared by one worker
  thread per core; other rows that run together leave the cores to their batched kernels.
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
from fedsim.models import StatelessModel
from fedsim.shift import Shift
from fedsim.trainer.agreement import ExecutorAgreement
from fedsim.trainer.cuda_graph import check_graph_capturable
from fedsim.trainer.execution import Execution
from fedsim.trainer.fused_executor import (
    FUSED_EXECUTORS,
    fusible_descents,
    has_groupable_convolutions,
    is_model_stackable,
    num_rows_in_memory,
)

log = logging.getLogger(__name__)

MAX_WORKERS = 16  # largest number of threads per processor
CPU_CHUNK_BYTES = 64 * 2**20
CPU_STACK_BYTES = 32 * 2**20
GROUPED_ROWS = 16  # at most this many clients per convolution: more are not faster, as images leave the cache
GPU_MEMORY_SHARE = 0.25
UNCOMPILED_MODES = ("replay", "never")
GPU_COPIES = 8  # parameters, gradients, activations and their temporaries, in units of parameters plus batch
CHUNK_ROWS_BY_EXECUTOR = {
    "loop": 64,
    "fused": 1024,
    "grouped": 1024,
}  # rows of a chunk, of which only the sample numbers are made at once


@dataclass(frozen=True)
class ExecutorChoice:
    """A chosen executor, and why it was chosen."""

    executor: str
    chunk: int  # rows passed to the executor together
    workers: int
    reason: str
    rows_per_stack: int = 1  # number of these that share one module under `fused` and `grouped`
    compile: str = "replay"

    def describe(self) -> str:
        """Describe the choice in one line for the log."""
        row_count = self.chunk if self.executor == "vmap" else self.rows_per_stack
        mode = f"up to {row_count} rows at once" if row_count > 1 else f"row by row in {self.workers} threads"
        if self.executor == "grouped":
            mode += f" in each of {self.workers} threads"
        reason = self.reason if self.compile in UNCOMPILED_MODES else "compiled, which takes a while in the first round"
        reason = "captured as CUDA graphs" if self.compile == "graph" else reason
        return f"{self.executor} executor, {mode} ({reason})"


def candidate_executors(
    requested_execution: Execution,
    model: StatelessModel,
    local_rule: LocalRule,
    shift: Shift,
    batch_size: int,
    sample_size: int,
    ranks: int = 1,
    agreement: ExecutorAgreement | None = None,
) -> list[ExecutorChoice]:
    """Resolve 'auto' settings: the choice of the rule first, then those that may be tried in addition.

    Args:
        requested_execution: of which these are looked at.
            executor: 'auto', 'fused', 'grouped', 'vmap' or 'loop'.
            chunk: rows per chunk, or 'auto'.
            workers: threads that share rows which run one by one on a CPU, or 'auto'.
            compile: of vmapped steps: 'replay' has small ones recorded (`fedsim.trainer.replay`), 'never' does not,
            'graph' has a GPU capture what was recorded (`fedsim.trainer.captures`); or the mode in which
            `torch.compile` makes one program of a step: 'default', 'reduce-overhead' (CUDA graphs, for steps too short
            to keep a GPU busy) or 'max-autotune'.
            trial, deterministic: whether more than the rule's choice is a candidate.
        model, local_rule, shift: what runs.
        batch_size: largest batch of a row.
        sample_size: numbers in one input.
        ranks: processes that share the run.
        agreement: says which executors are right for a user's module and loss; what it finds the module to need
            (batches without padding, a fresh copy for each client) becomes one of its traits.

    Raises:
        ConfigError: executor=fused or grouped where the rule's step is more than plain descents, grouped where the
            model's convolutions cannot be grouped, compile where nothing is vmapped.
    """
    if requested_execution.compile == "graph":
        check_graph_capturable(local_rule, model, shift)
    batch_numbers = batch_size * max(sample_size, 1)
    if model.traits.isolation_reason is not None:
        loop = _isolated_rows_choice(requested_execution, model, local_rule, shift, batch_numbers)
        return _agreeing_executor_choices([loop], agreement, requested_execution, model) or [loop]
    executor = _executor_to_compile(requested_execution)
    has_plain_descents = bool(fusible_descents(local_rule, shift, model))
    can_stack = is_model_stackable(model) and not (model.convolutional and model.device.type == "cuda")
    is_executor_settled = executor in (*FUSED_EXECUTORS, "loop") or (
        executor == "auto" and has_plain_descents and can_stack
    )
    unvmapped_reason = None if is_executor_settled else model.no_vmap_reason
    _check_executor_possible(executor, model, has_plain_descents, unvmapped_reason)
    reason_by_executor = {executor: "as configured"}
    if executor == "auto":
        slow_batched = model.convolutional and model.device.type == "cpu"
        groupable = has_plain_descents and has_groupable_convolutions(model)
        reason_by_executor = _ordered_executors(
            has_plain_descents, can_stack, slow_batched, unvmapped_reason is None, groupable
        )
        if not requested_execution.trial or requested_execution.deterministic or ranks > 1:
            # The rule's choice: a measurement differs from run to run, and between ranks.
            first_executor = next(iter(reason_by_executor))
            reason_by_executor = {first_executor: reason_by_executor[first_executor]}
    choices = [
        _choice_with_chunk(name, reason, requested_execution, model, local_rule, shift, batch_numbers)
        for name, reason in reason_by_executor.items()
    ]
    agreeing_choices = _agreeing_executor_choices(choices, agreement, requested_execution, model)
    if agreeing_choices is None:  # the model has changed and needs another executor
        return candidate_executors(
            requested_execution, model, local_rule, shift, batch_size, sample_size, ranks, agreement
        )
    return agreeing_choices


def _isolated_rows_choice(
    requested_execution: Execution, model: StatelessModel, local_rule: LocalRule, shift: Shift, batch_numbers: int
) -> ExecutorChoice:
    """Choose rows one by one, the only way for a model of which each client needs a new copy."""
    if requested_execution.executor not in ("auto", "loop"):
        raise ConfigError(
            f"trainer.executor={requested_execution.executor} cannot run this model, since "
            f"{model.traits.isolation_reason}; use trainer.executor=auto, or loop"
        )
    reason = f"a fresh copy of the module for each client, since {model.traits.isolation_reason}"
    return _choice_with_chunk("loop", reason, requested_execution, model, local_rule, shift, batch_numbers)


def _executor_to_compile(requested: Execution) -> str:
    """Return the requested executor; `vmap` in place of 'auto' if steps are compiled, which no other executor can."""
    if requested.compile in UNCOMPILED_MODES:
        return requested.executor
    if requested.executor not in ("auto", "vmap"):
        raise ConfigError(f"trainer.compile={requested.compile} is for trainer.executor=vmap, not {requested.executor}")
    return "vmap"


def _check_executor_possible(
    executor: str, model: StatelessModel, has_plain_descents: bool, unvmapped_reason: str | None
) -> None:
    if executor == "vmap" and unvmapped_reason is not None:
        raise ConfigError(
            f"trainer.executor=vmap cannot run {_model_name(model)} ({unvmapped_reason}); use trainer.executor=auto, "
            "or loop"
        )
    if executor == "grouped" and not has_groupable_convolutions(model):
        raise ConfigError(
            f"trainer.executor=grouped cannot run {_model_name(model)}: it takes networks on a CPU with their "
            "convolutions in one nn.Sequential up to an nn.Flatten, without dropout or batch normalisation; use "
            "trainer.executor=auto"
        )
    if executor in FUSED_EXECUTORS and not has_plain_descents:
        raise ConfigError(
            f"trainer.executor={executor} takes plain descents only: local=sgd, momentum or adam, or local=apfl with "
            "local.alpha_every=round and without a ridge on mixed parameters; no local.clip, and shift=none; use "
            "trainer.executor=auto"
        )


def _agreeing_executor_choices(
    executor_choices: list[ExecutorChoice],
    agreement: ExecutorAgreement | None,
    requested_execution: Execution,
    model: StatelessModel,
) -> list[ExecutorChoice] | None:
    """Return the choices that give the same numbers as plain PyTorch; None after a trait of the model has changed, so
    that other choices are possible.

    Raises:
        ConfigError: there are none.
    """
    if agreement is None:
        return executor_choices
    model_traits = model.traits
    reason_by_executor = {
        choice.executor: agreement.executor_refusal_reason(choice.executor, model_traits) for choice in executor_choices
    }
    agreeing_choices = [choice for choice in executor_choices if reason_by_executor[choice.executor] is None]
    if not model.mixes_samples and len(agreeing_choices) < len(executor_choices):
        unpadded_traits = dataclasses.replace(model_traits, mixes_samples=True)
        if any(
            reason and agreement.executor_refusal_reason(name, unpadded_traits) is None
            for name, reason in reason_by_executor.items()
            if name != "loop"
        ):
            log.info("trainer: batches of %s are not padded, since padding changes its results", _model_name(model))
            model_traits.mixes_samples = True
            return None
    if agreeing_choices:
        return agreeing_choices
    reason = next(iter(reason_by_executor.values()))
    if requested_execution.executor in ("auto", "loop") and model_traits.isolation_reason is None:
        isolated_traits = dataclasses.replace(model_traits, isolation_reason="one client's pass changes the next one's")
        if agreement.executor_refusal_reason("loop", isolated_traits) is None:
            model_traits.isolation_reason = isolated_traits.isolation_reason
            return None
    remedy = (
        "trainer.executor=auto"
        if requested_execution.executor != "auto"
        else "plain operations of PyTorch in its forward pass"
    )
    raise ConfigError(
        f"model: {_model_name(model)} cannot be trained as trainer.executor={requested_execution.executor} does it "
        f"({reason}); use {remedy}"
    )


def _model_name(model: StatelessModel) -> str:
    return type(model.training_module).__name__


def _ordered_executors(
    has_plain_descents: bool, stackable: bool, has_convolutions: bool, can_vmap: bool, groupable: bool
) -> dict[str, str]:
    """Return executors and reasons, the rule's first; `has_convolutions`: on a CPU."""
    if has_plain_descents and stackable:
        return {"fused": "plain SGD steps"}
    is_possible = {"fused": has_plain_descents, "grouped": groupable, "vmap": can_vmap, "loop": True}
    first_executor, reason = "vmap", "batched kernels"
    if has_plain_descents and (has_convolutions or not can_vmap):
        first_executor, reason = "fused", "plain SGD steps"
    elif not can_vmap:
        first_executor, reason = "loop", "what the model does cannot be vmapped"
    elif has_convolutions:
        first_executor, reason = "loop", "convolutions on a CPU"
    return {first_executor: reason} | {
        name: "by trial"
        for name, is_possible_here in is_possible.items()
        if is_possible_here and name != first_executor
    }


@functools.cache  # said once
def resolve_num_workers(requested_workers: int) -> int:
    """Return the number of threads: as many as requested, each with its own model, as long as there are processors
    for them."""
    max_workers = MAX_WORKERS * (os.cpu_count() or 1)
    if requested_workers > max_workers:
        log.warning(
            "trainer.workers=%d is too large for %d processors; %d workers are used",
            requested_workers,
            max_workers // MAX_WORKERS,
            max_workers,
        )
    return min(requested_workers, max_workers)


def _choice_with_chunk(
    executor: str,
    reason: str,
    requested_execution: Execution,
    model: StatelessModel,
    rule: LocalRule,
    shift: Shift,
    batch: int,
) -> ExecutorChoice:
    """Return the executor with its chunk and workers; `batch`: numbers in a row's batch."""
    is_cpu = model.device.type == "cpu"
    threads = (
        torch.get_num_threads()
        if requested_execution.workers == "auto"
        else resolve_num_workers(int(requested_execution.workers))
    )
    models = num_rows_in_memory(fusible_descents(rule, shift, model)) if executor in FUSED_EXECUTORS else 1
    row_bytes = torch.finfo(model.dtype).bits // 8 * (models * model.dimension + batch)
    if is_cpu:
        budget: float = CPU_STACK_BYTES if executor in FUSED_EXECUTORS else CPU_CHUNK_BYTES
    else:
        budget = torch.cuda.mem_get_info(model.device)[0] * GPU_MEMORY_SHARE / GPU_COPIES
    rows = max(1, math.floor(budget / row_bytes))
    if executor == "vmap":
        return ExecutorChoice(
            "vmap",
            rows if requested_execution.chunk == "auto" else int(requested_execution.chunk),
            1,
            reason,
            compile=requested_execution.compile,
        )
    chunk = (
        int(requested_execution.chunk)
        if requested_execution.chunk != "auto"
        else CHUNK_ROWS_BY_EXECUTOR[executor]
        if is_cpu
        else rows
    )
    stack = min(rows, chunk) if executor == "fused" and is_model_stackable(model) else 1
    if executor == "grouped":
        stack = min(rows, chunk, GROUPED_ROWS)
    return ExecutorChoice(
        executor, chunk, threads if is_cpu and (stack == 1 or executor == "grouped") else 1, reason, stack
    )
