"""Row by row through plain modules: for models whose batched kernels lose, such as convolutions on a CPU.

functorch transforms and `functional_call` are not thread-safe; plain modules with plain autograd are. Each worker
thread owns a copy of the module and one intra-op thread, which beats one module with all intra-op threads.
"""

from __future__ import annotations

import copy
import queue
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fedsim.local.base import Batch, Carry, LocalRule
from fedsim.models import RowModel
from fedsim.shift import Shift
from fedsim.trainer.batches import Chunk


class PlainObjective:
    """A client's loss through an own copy of the module, with ordinary autograd. For one thread at a time."""

    def __init__(self, model: RowModel, shift: Shift) -> None:
        self.model, self.shift = model, shift
        self.module = copy.deepcopy(model.training_module)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.dropouts = [self.module.get_submodule(name.rpartition(".")[0]) for name in model.dropout_keys]

    def gradient(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.shift.active:
            batch = self.shift(batch, batch.get("deployed", params))
        for dropout in self.dropouts:
            dropout.key = batch["key"]
        for parameter, value in zip(self.parameters, self.model.unflatten(params).values(), strict=True):
            parameter.data = value
        with torch.enable_grad():
            value = self.model.objective(self.module(batch["x"]), batch, self.parameters)
            gradients = torch.autograd.grad(value, self.parameters)
        return torch.cat([g.reshape(-1) for g in gradients]), value.detach()


class LoopExecutor:
    """Rows one by one, on a CPU by `workers` threads. A row's numbers do not depend on who ran it."""

    def __init__(self, rule: LocalRule, model: RowModel, shift: Shift, workers: int = 1) -> None:
        self.rule, self.dtype, self.workers = rule, model.dtype, workers
        self._objectives: queue.SimpleQueue[PlainObjective] = queue.SimpleQueue()
        for _ in range(workers):
            self._objectives.put(PlainObjective(model, shift))

    def run(self, chunk: Chunk, carry: Carry, rates: Tensor, deployed: Tensor | None) -> tuple[Carry, Tensor]:
        """As `VmapExecutor.run`."""
        losses = torch.zeros(len(chunk.steps), dtype=self.dtype, device=rates.device)
        out = {name: torch.empty_like(value) for name, value in carry.items()}

        def run_row(row: int) -> None:
            objective = self._objectives.get()
            try:
                own = {name: value[row] for name, value in carry.items()}
                for step in range(int(chunk.steps[row])):
                    batch = {k: v[0] for k, v in chunk.batch(step, row, row + 1, self.dtype).items()}
                    if deployed is not None:
                        batch["deployed"] = deployed[row]
                    own, loss = self.rule.step(own, batch, rates[step, row], objective)
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
