"""Runs rows one by one through plain modules: for models whose batched kernels are slower, such as convolutions on a
CPU.

functorch transforms and `functional_call` are not thread-safe; plain modules with plain autograd are. Each worker
thread owns a copy of the module.
"""

from __future__ import annotations

import queue

import torch
from torch import Tensor

from fedsim.data.samples import Chunk
from fedsim.local.rule import Carry, LocalRule
from fedsim.models import StatelessModel
from fedsim.shift import Shift
from fedsim.trainer.buffer_recording import BufferRecordingObjective
from fedsim.trainer.objective import AutogradObjective, vmap_by_loop
from fedsim.trainer.shifted_batches import ShiftedBatches
from fedsim.trainer.workers import map_threads


def unstack_first_row(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the first row of each entry."""
    return {name: value[0] for name, value in rows.items()}


def stack_single_row(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return one row as a chunk of one."""
    return {name: value[None] for name, value in row.items()}


class LoopExecutor:
    """Runs rows one by one, on a CPU in `workers` threads. Results do not depend on the thread."""

    def __init__(
        self, local_rule: LocalRule, model: StatelessModel, shift: Shift, workers: int = 1, contaminated: bool = False
    ) -> None:
        self.local_rule, self.shift, self.dtype, self.workers = local_rule, shift, model.dtype, workers
        self.is_contaminated = contaminated
        self._shifted_batches = ShiftedBatches(local_rule, shift, rows=False)
        self._is_isolated = model.traits.isolation_reason is not None
        self._objectives: queue.SimpleQueue[BufferRecordingObjective] = queue.SimpleQueue()
        for _ in range(workers):
            self._objectives.put(
                BufferRecordingObjective(AutogradObjective(model), vmap_by_loop if local_rule.batched else None)
            )

    def padded_size(self, rows: int) -> int:
        """As `VmapExecutor.padded_size`."""
        return rows

    def run(
        self, chunk: Chunk, carry: Carry, learning_rates: Tensor, deployed_models: Tensor | None
    ) -> tuple[Carry, Tensor]:
        """As `VmapExecutor.run`."""
        losses = torch.zeros(len(chunk.steps), dtype=self.dtype, device=learning_rates.device)
        end_carry = {name: torch.empty_like(value) for name, value in carry.items()}

        def train_row(row: int) -> None:
            objective = self._objectives.get()
            try:
                if self._is_isolated:
                    objective.renew_module()
                row_carry = {name: value[row] for name, value in carry.items()}
                for step in range(int(chunk.steps[row])):
                    batch = unstack_first_row(chunk.batch(step, row, row + 1, self.dtype))
                    if self.shift.active:
                        row_carry, theta = self._shifted_batches(
                            row_carry, None if deployed_models is None else deployed_models[row]
                        )
                        batch, theta = self._shifted_batches.shifted_batch(batch, row_carry, theta)
                        if self.local_rule.knows_deployed:
                            batch = batch | {"deployed": theta}
                    if self.is_contaminated:
                        batch = unstack_first_row(chunk.contaminate(stack_single_row(batch), step, row, row + 1))
                    if step == 0 and self.local_rule.has_round_start:
                        row_carry = self._start_round(row_carry, batch, learning_rates[0, row], objective)
                    row_carry, loss = self._step(row_carry, batch, learning_rates[step, row], objective)
                    losses[row] += loss
                for name, value in row_carry.items():
                    end_carry[name][row] = value
            finally:
                self._objectives.put(objective)

        map_threads(train_row, range(len(chunk.steps)), self.workers)
        return end_carry, losses

    def _step(
        self, carry: Carry, batch: Carry, lr: Tensor, objective: BufferRecordingObjective
    ) -> tuple[Carry, Tensor]:
        """Take one step of one client; a batched rule gets it as a chunk of one."""
        if not self.local_rule.batched:
            return objective.step(self.local_rule, carry, batch, lr)
        carry, loss = objective.step(self.local_rule, stack_single_row(carry), stack_single_row(batch), lr[None])
        return unstack_first_row(carry), loss[0]

    def _start_round(self, carry: Carry, batch: Carry, lr: Tensor, objective: BufferRecordingObjective) -> Carry:
        """Call the rule before the first step."""
        if not self.local_rule.batched:
            return objective.on_round_start(self.local_rule, carry, batch, lr)
        return unstack_first_row(
            objective.on_round_start(self.local_rule, stack_single_row(carry), stack_single_row(batch), lr[None])
        )
