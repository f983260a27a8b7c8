"""Row by row through plain modules: for models whose batched kernels lose, such as convolutions on a CPU.

functorch transforms and `functional_call` are not thread-safe; plain modules with plain autograd are. Each worker
thread owns a copy of the module.
"""

from __future__ import annotations

import queue

import torch
from torch import Tensor

from fedsim.data.samples import Chunk
from fedsim.local.rule import Carry, LocalRule
from fedsim.models import RowModel
from fedsim.shift import Shift
from fedsim.trainer.buffer_recording import BufferRecordingObjective
from fedsim.trainer.objective import PlainObjective, loop_over_rows
from fedsim.trainer.shifted_batches import ShiftedBatches
from fedsim.trainer.workers import map_threads


def first_row(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first row of every entry."""
    return {name: value[0] for name, value in rows.items()}


def chunk_of(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """One row as a chunk of one."""
    return {name: value[None] for name, value in row.items()}


class LoopExecutor:
    """Rows one by one, on a CPU by `workers` threads. A row's numbers do not depend on who ran it."""

    def __init__(
        self, rule: LocalRule, model: RowModel, shift: Shift, workers: int = 1, contaminated: bool = False
    ) -> None:
        self.rule, self.shift, self.dtype, self.workers = rule, shift, model.dtype, workers
        self.contaminated = contaminated
        self._shifted_batches = ShiftedBatches(rule, shift, rows=False)
        self._isolated = model.traits.isolated is not None
        self._objectives: queue.SimpleQueue[BufferRecordingObjective] = queue.SimpleQueue()
        for _ in range(workers):
            self._objectives.put(
                BufferRecordingObjective(PlainObjective(model), loop_over_rows if rule.batched else None)
            )

    def padded_size(self, rows: int) -> int:
        """As `VmapExecutor.padded_size`."""
        return rows

    def run(self, chunk: Chunk, carry: Carry, rates: Tensor, deployed: Tensor | None) -> tuple[Carry, Tensor]:
        """As `VmapExecutor.run`."""
        losses = torch.zeros(len(chunk.steps), dtype=self.dtype, device=rates.device)
        end_carry = {name: torch.empty_like(value) for name, value in carry.items()}

        def run_row(row: int) -> None:
            objective = self._objectives.get()
            try:
                if self._isolated:
                    objective.renew()
                row_carry = {name: value[row] for name, value in carry.items()}
                for step in range(int(chunk.steps[row])):
                    batch = first_row(chunk.batch(step, row, row + 1, self.dtype))
                    if self.shift.active:
                        row_carry, theta = self._shifted_batches(row_carry, None if deployed is None else deployed[row])
                        batch, theta = self._shifted_batches.shifted(batch, row_carry, theta)
                        if self.rule.knows_deployed:
                            batch = batch | {"deployed": theta}
                    if self.contaminated:
                        batch = first_row(chunk.contaminate(chunk_of(batch), step, row, row + 1))
                    if step == 0 and self.rule.has_round_start:
                        row_carry = self._start_round(row_carry, batch, rates[0, row], objective)
                    row_carry, loss = self._step(row_carry, batch, rates[step, row], objective)
                    losses[row] += loss
                for name, value in row_carry.items():
                    end_carry[name][row] = value
            finally:
                self._objectives.put(objective)

        map_threads(run_row, range(len(chunk.steps)), self.workers)
        return end_carry, losses

    def _step(
        self, carry: Carry, batch: Carry, lr: Tensor, objective: BufferRecordingObjective
    ) -> tuple[Carry, Tensor]:
        """One step of one client; a batched rule meets it as a chunk of one."""
        if not self.rule.batched:
            return objective.step(self.rule, carry, batch, lr)
        carry, loss = objective.step(self.rule, chunk_of(carry), chunk_of(batch), lr[None])
        return first_row(carry), loss[0]

    def _start_round(self, carry: Carry, batch: Carry, lr: Tensor, objective: BufferRecordingObjective) -> Carry:
        """Before the first step, likewise."""
        if not self.rule.batched:
            return objective.on_round_start(self.rule, carry, batch, lr)
        return first_row(objective.on_round_start(self.rule, chunk_of(carry), chunk_of(batch), lr[None]))
