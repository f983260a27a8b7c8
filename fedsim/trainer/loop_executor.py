"""Row by row through plain modules: for models whose batched kernels lose, such as convolutions on a CPU.

functorch transforms and `functional_call` are not thread-safe; plain modules with plain autograd are. Each worker
thread owns a copy of the module and one intra-op thread, which beats one module with all intra-op threads.
"""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fedsim.local.base import Carry, LocalRule, Objective
from fedsim.models import RowModel
from fedsim.shift import Shift
from fedsim.trainer.batches import Chunk
from fedsim.trainer.objective import PlainObjective, StackedObjective


def first(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first row of every entry."""
    return {name: value[0] for name, value in rows.items()}


def alone(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """One row as a chunk of one."""
    return {name: value[None] for name, value in row.items()}


class LoopExecutor:
    """Rows one by one, on a CPU by `workers` threads. A row's numbers do not depend on who ran it."""

    def __init__(
        self, rule: LocalRule, model: RowModel, shift: Shift, workers: int = 1, contaminated: bool = False
    ) -> None:
        self.rule, self.shift, self.dtype, self.workers = rule, shift, model.dtype, workers
        self.contaminated = contaminated
        self._objectives: queue.SimpleQueue[Objective] = queue.SimpleQueue()
        for _ in range(workers):
            own = PlainObjective(model)
            self._objectives.put(StackedObjective(own) if rule.batched else own)

    def run(self, chunk: Chunk, carry: Carry, rates: Tensor, deployed: Tensor | None) -> tuple[Carry, Tensor]:
        """As `VmapExecutor.run`."""
        losses = torch.zeros(len(chunk.steps), dtype=self.dtype, device=rates.device)
        out = {name: torch.empty_like(value) for name, value in carry.items()}

        def run_row(row: int) -> None:
            objective = self._objectives.get()
            try:
                own = {name: value[row] for name, value in carry.items()}
                for step in range(int(chunk.steps[row])):
                    batch = first(chunk.batch(step, row, row + 1, self.dtype))
                    if self.shift.active:
                        own, theta = self.shift.answers_to(own, None if deployed is None else deployed[row])
                        batch = self.shift(batch, theta)
                        if self.rule.knows_deployed:
                            batch = batch | {"deployed": theta}
                    if self.contaminated:
                        batch = first(chunk.contaminate(alone(batch), step, row, row + 1))
                    if step == 0:
                        own = self._begin(own, batch, rates[0, row], objective)
                    own, loss = self._step(own, batch, rates[step, row], objective)
                    losses[row] += loss
                for name, value in own.items():
                    out[name][row] = value
            finally:
                self._objectives.put(objective)

        rows = range(len(chunk.steps))
        if self.workers == 1:
            for row in rows:
                run_row(row)
        else:
            self._threaded(run_row, rows)
        return out, losses

    def _step(self, carry: Carry, batch: Carry, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        """One step of one client; a batched rule meets it as a chunk of one."""
        if not self.rule.batched:
            return self.rule.step(carry, batch, lr, objective)
        carry, loss = self.rule.step(alone(carry), alone(batch), lr[None], objective)
        return first(carry), loss[0]

    def _begin(self, carry: Carry, batch: Carry, lr: Tensor, objective: Objective) -> Carry:
        """Before the first step, likewise."""
        if not self.rule.batched:
            return self.rule.begin(carry, batch, lr, objective)
        return first(self.rule.begin(alone(carry), alone(batch), lr[None], objective))

    def _threaded(self, run_row, rows: range) -> None:  # type: ignore[no-untyped-def]
        """Share the rows among worker threads, each with one intra-op thread; the setting is restored afterwards."""
        intra_op = torch.get_num_threads()
        torch.set_num_threads(1)  # the math library's count is the process's, so it is set here too
        try:
            with ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                for _ in pool.map(run_row, rows):
                    pass
        finally:
            torch.set_num_threads(intra_op)
