"""Runs chunks of rows through one vmapped step: for models with good batched kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedsim.data.samples import Batch, Chunk
from fedsim.local.rule import Carry, LocalRule
from fedsim.models import StatelessModel
from fedsim.shift import Shift
from fedsim.trainer.buffer_recording import BufferRecordingObjective
from fedsim.trainer.captures import GraphReplay
from fedsim.trainer.cuda_graph import graph_capturer
from fedsim.trainer.objective import FunctionalObjective
from fedsim.trainer.replay import Replay, has_fixed_operations
from fedsim.trainer.shifted_batches import ShiftedBatches

RECORDING_COMPILE_MODES = ("replay", "graph")
PER_CLIENT_ENTRIES = ("client", "row", "key", "deployed")  # per client of a batch, and not per sample
SMALL_MODEL_NUMBERS = (
    2**16
)  # numbers of all rows: of more than these their arithmetic counts, not how often it is asked for
Step = Callable[[Carry, Carry, Tensor], tuple[Carry, Tensor]]


def clone_step_results(step: Step) -> Step:
    """Return copies of results: CUDA graphs return memory that the next replay overwrites."""

    def step_with_copied_results(carry: Carry, batch: Carry, lr: Tensor) -> tuple[Carry, Tensor]:
        carry, loss = step(carry, batch, lr)
        return {name: value.clone() for name, value in carry.items()}, loss.clone()

    return step_with_copied_results


class VmapExecutor:
    """All rows of a chunk take a step together; a row that has finished its steps leaves the chunk."""

    def __init__(
        self,
        local_rule: LocalRule,
        model: StatelessModel,
        shift: Shift,
        is_contaminated: bool = False,
        compile: str = "never",
    ) -> None:
        self.local_rule, self.dtype, self.dimension, self.shift = local_rule, model.dtype, model.dimension, shift
        self._shifted_batches = ShiftedBatches(local_rule, shift, rows=True)
        objective = BufferRecordingObjective(FunctionalObjective(model), vmap if local_rule.batched else None)
        vectorise: Callable[..., Any] = (lambda step: step) if local_rule.batched else vmap
        self._step: Callable[..., Any] = vectorise(functools.partial(objective.step, local_rule))
        self._on_round_start: Callable[..., Any] = vectorise(functools.partial(objective.on_round_start, local_rule))
        self._mixes_samples = model.mixes_samples
        self._shifts_within_step = not (
            is_contaminated or local_rule.has_round_start or self._mixes_samples
        )  # nothing happens between reaction and step
        if compile != "never" and compile not in RECORDING_COMPILE_MODES:
            step = torch.compile(self._step, mode=compile)
            self._step = clone_step_results(step) if compile == "reduce-overhead" else step
        self._shift_batch: Callable[..., Any] = self._shifted_batch
        self._shift_and_step_function: Callable[..., Any] = functools.partial(self._shift_and_step, self._step)
        if compile in RECORDING_COMPILE_MODES and has_fixed_operations(local_rule, model, shift):
            functions = (self._shift_batch, self._on_round_start, self._step, self._shift_and_step_function)
            recorder = (
                Replay if compile == "replay" else functools.partial(GraphReplay, capture=graph_capturer(model.device))
            )
            self._shift_batch, self._on_round_start, self._step, self._shift_and_step_function = map(
                recorder, functions
            )

    def padded_size(self, rows: int) -> int:
        """Return how many rows to pass for so many, with the last one repeated: for small models only every fourth
        number between two powers of two, so that few recordings suffice."""
        if not isinstance(self._shift_and_step_function, Replay) or rows * self.dimension > SMALL_MODEL_NUMBERS:
            return rows
        spacing: int = max(1, 2 ** (rows.bit_length() - 3))
        return -(-rows // spacing) * spacing

    def run(
        self, chunk: Chunk, carry: Carry, learning_rates: Tensor, deployed_models: Tensor | None
    ) -> tuple[Carry, Tensor]:
        """Take every row of the chunk through its local steps.

        Args:
            chunk: c rows, sorted by steps, descending.
            carry: [c, …] per entry.
            learning_rates: [S, c] learning rates.
            deployed_models: [c, d] parameters the data react to, or None for each row's own current ones.

        Returns:
            The carries after each row's last step, and the sum of losses over steps [c].
        """
        num_active = len(chunk.steps)
        total_losses = losses = torch.zeros(num_active, dtype=self.dtype, device=learning_rates.device)
        finished_carries: list[Carry] = []
        for step, num_stepping in enumerate(chunk.active_row_counts()):
            if num_stepping < num_active:
                finished_carries.append({name: value[num_stepping:] for name, value in carry.items()})
                carry = {name: value[:num_stepping] for name, value in carry.items()}
                learning_rates, deployed_models = (
                    learning_rates[:, :num_stepping],
                    None if deployed_models is None else deployed_models[:num_stepping],
                )
                num_active, total_losses = num_stepping, losses[:num_stepping]
            batch = chunk.batch(step, 0, num_active, self.dtype)
            lr, theta = learning_rates[step], deployed_models
            if self._shifts_within_step:
                carry, loss = self._shift_and_step_function(carry, batch, lr, theta)
            else:
                carry, batch = self._shift_batch(carry, batch, theta)
                batch = chunk.contaminate(batch, step, 0, num_active)
                carry, loss = self._step_equal_batch_sizes(chunk.sizes[:num_active, step], step, carry, batch, lr)
            total_losses += loss
        if finished_carries:
            carry_parts = [carry, *reversed(finished_carries)]
            carry = {name: torch.cat([group_carry[name] for group_carry in carry_parts]) for name in carry}
        return carry, losses

    def _shifted_batch(self, carry: Carry, batch: Batch, deployed: Tensor | None) -> tuple[Carry, Batch]:
        """Return the batch after the data have reacted, and the carry with their memory."""
        if not self.shift.active:
            return carry, batch
        carry, theta = self._shifted_batches(carry, deployed)
        batch, theta = self._shifted_batches.shifted_batch(batch, carry, theta)
        return carry, batch | {"deployed": theta} if self.local_rule.knows_deployed else batch

    def _shift_and_step(
        self, step: Step, carry: Carry, batch: Batch, lr: Tensor, deployed: Tensor | None
    ) -> tuple[Carry, Tensor]:
        return step(*self._shifted_batch(carry, batch, deployed), lr)

    def _run_step(self, step: int, carry: Carry, batch: Carry, lr: Tensor) -> tuple[Carry, Tensor]:
        """Take one step of all rows, after what the rule does before the first."""
        if step == 0 and self.local_rule.has_round_start:
            carry = self._on_round_start(carry, batch, lr)
        step_result: tuple[Carry, Tensor] = self._step(carry, batch, lr)
        return step_result

    def _step_equal_batch_sizes(
        self, batch_sizes: np.ndarray, step: int, carry: Carry, batch: Batch, lr: Tensor
    ) -> tuple[Carry, Tensor]:
        """Take one step; if samples depend on their batch, rows with batches of equal size together, without
        padding."""
        if not (self._mixes_samples and np.ptp(batch_sizes)):
            return self._run_step(step, carry, batch, lr)
        end_carry = {name: torch.empty_like(value) for name, value in carry.items()}
        losses = torch.empty_like(lr)
        for size in np.unique(batch_sizes):
            rows = torch.as_tensor(np.flatnonzero(batch_sizes == size), device=lr.device)
            group_batch = {name: value[rows] for name, value in batch.items()}
            group_batch = {
                name: value if name in PER_CLIENT_ENTRIES else value[:, :size] for name, value in group_batch.items()
            }
            if not self.shift.active:
                del group_batch["weight"]  # it distinguished samples from padding
            group_carry, losses[rows] = self._run_step(
                step, {n: value[rows] for n, value in carry.items()}, group_batch, lr[rows]
            )
            for name, value in group_carry.items():
                end_carry[name][rows] = value
        return end_carry, losses
