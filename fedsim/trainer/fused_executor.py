"""Plain SGD with as little beside the model's own arithmetic as can be: rows step in place, in the backward pass.

Rows of fully connected models go through stacked layers together (`fedsim.trainer.stepping`), as many as stay in the
cache; rows of other models one by one, on a CPU by worker threads of which each has its own module.
"""

from __future__ import annotations

import copy
import itertools
import math
import queue

import torch
from torch import Tensor

from fedsim.local import SGD
from fedsim.local.base import Batch, Carry, LocalRule
from fedsim.models import LOSSES, RowModel
from fedsim.shift import Shift
from fedsim.trainer.batches import Chunk
from fedsim.trainer.loop_executor import first
from fedsim.trainer.stepping import stackable, with_stepping_layers
from fedsim.trainer.workers import share


def plain_descent(rule: LocalRule, shift: Shift) -> bool:
    """Is a step x − η(∇ + λx), on data that do not ask for x?"""
    return type(rule) is SGD and rule.clip is None and not shift.active


def stacks(model: RowModel) -> bool:
    """Can several rows of the model go through one forward pass?"""
    return not model.dropout_keys and model.loss in LOSSES.values() and stackable(model.training_module)


class _Rows:
    """Up to `stack` rows of the model in one module, for one thread at a time."""

    def __init__(self, model: RowModel, decay: float) -> None:
        self.model, self.decay = model, decay
        module = copy.deepcopy(model.training_module)
        names = {name for name, p in module.named_parameters() if p.requires_grad}
        self.module, self.linear = with_stepping_layers(module, decay)
        self.plain = {name: p for name, p in self.module.named_parameters() if name in names}
        self.dropouts = [self.module.get_submodule(name.rpartition(".")[0]) for name in model.dropout_keys]
        self.channels_last = model.convolutional and model.device.type == "cpu"
        if self.channels_last:
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def load(self, params: Tensor) -> None:
        """Take over rows [c, d], by copies."""
        self.held = {}
        begin = 0
        for name, shape in self.model.shapes.items():
            stop = begin + math.prod(shape)
            own = params[:, begin:stop].unflatten(1, shape)
            if name in self.plain:
                self.plain[name].copy_(own[0])
                self.held[name] = self.plain[name].detach()[None]
            else:
                self.held[name] = own.clone(memory_format=torch.contiguous_format)
            begin = stop
        for layer in self.linear:
            layer.load(self.held)

    def store(self, out: Tensor) -> None:
        """Write the rows to [c, d]."""
        begin = 0
        for name, shape in self.model.shapes.items():
            stop = begin + math.prod(shape)
            out[:, begin:stop].unflatten(1, shape).copy_(self.held[name])
            begin = stop

    def step(self, batch: Batch, rates: Tensor) -> Tensor:
        """One step of the first rows on their batches [c, B, …] at rates [c]; their losses [c] before it."""
        rows = len(rates)
        for layer in self.linear:
            layer.begin(rates)
        for dropout in self.dropouts:
            dropout.key = batch["key"][0]
        flat = first(batch) if rows == 1 else {k: v.flatten(0, 1) for k, v in batch.items() if v.dim() > 1}
        if self.channels_last and flat["x"].dim() == 4:
            flat["x"] = flat["x"].contiguous(memory_format=torch.channels_last)
        ridge: Tensor | float = 0.0
        if self.model.ridge:
            held = [p[:rows].flatten(1) for p in self.held.values()]
            ridge = 0.5 * self.model.ridge * sum(p.square().sum(1) for p in held)
        with torch.enable_grad():
            losses = self.model.loss(self.module(flat["x"]), flat).view(rows, -1)
            weight = batch.get("weight")
            value = losses.mean(1) if weight is None else (losses * weight).sum(1) / weight.sum(1)
            value.sum().backward()
        for layer in self.linear:
            layer.shrink()
        for parameter in self.plain.values():
            if self.decay:
                parameter.mul_(1 - rates[0] * self.decay)
            if parameter.grad is not None:
                parameter.addcmul_(parameter.grad, rates[0], value=-1)
                parameter.grad = None
        return value.detach() + ridge


class FusedExecutor:
    """Rows of a chunk in stacks; they carry parameters alone.

    Args:
        rule: SGD for which `plain_descent` holds.
        stack: rows that go through the module together; 1 unless the model `stacks`.
        workers: threads that share the stacks on a CPU.
    """

    def __init__(self, rule: SGD, model: RowModel, stack: int, workers: int) -> None:
        self.stack, self.workers, self.dtype = stack, workers, model.dtype
        self._modules: queue.SimpleQueue[_Rows] = queue.SimpleQueue()
        for _ in range(workers):
            self._modules.put(_Rows(model, rule.weight_decay + model.ridge))

    def run(self, chunk: Chunk, carry: Carry, rates: Tensor, deployed: Tensor | None) -> tuple[Carry, Tensor]:
        """As `VmapExecutor.run`."""
        start = carry["params"]
        losses = torch.zeros(len(start), dtype=self.dtype, device=rates.device)
        out = torch.empty_like(start)

        @torch.no_grad()
        def run_stack(rows: range) -> None:
            own = self._modules.get()
            try:
                own.load(start[rows.start : rows.stop])
                steps = chunk.steps[rows.start : rows.stop]
                for step in range(int(steps.max())):
                    stop = rows.start + int((steps > step).sum())
                    batch = chunk.batch(step, rows.start, stop, self.dtype)
                    batch = chunk.contaminate(batch, step, rows.start, stop)
                    losses[rows.start : stop] += own.step(batch, rates[step, rows.start : stop])
                own.store(out[rows.start : rows.stop])
            finally:
                self._modules.put(own)

        parts = math.ceil(len(start) / self.stack)
        bounds = [len(start) * part // parts for part in range(parts + 1)]
        share(run_stack, [range(*pair) for pair in itertools.pairwise(bounds)], self.workers)
        return {"params": out}, losses
