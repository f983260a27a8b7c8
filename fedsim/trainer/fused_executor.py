"""Plain descents with as little beside the model's own arithmetic as can be: rows step in place, in the backward pass.

Rows of models whose layers can be stacked go through them together (`fedsim.trainer.stepping`), as many as stay in the
cache; rows of other models, and convolutions on a CPU, one by one, by worker threads of which each has its own module.
"""

from __future__ import annotations

import itertools
import math
import queue

import torch
from torch import Tensor

from fedsim.data.samples import Batch, Chunk
from fedsim.local.rule import Carry, GradientStep, LocalRule
from fedsim.models import LOSSES, RowModel
from fedsim.models.calling import cast_output
from fedsim.models.losses import weighted_mean, without_vmap
from fedsim.shift import Shift
from fedsim.trainer.buffer_recording import BufferRecordingObjective
from fedsim.trainer.in_place import broadcast_rows
from fedsim.trainer.loop_executor import first_row
from fedsim.trainer.model_stack import ModelStack, channels_last
from fedsim.trainer.objective import PlainObjective
from fedsim.trainer.stepping import is_stackable
from fedsim.trainer.workers import map_threads


def plain_descents(rule: LocalRule, shift: Shift, model: RowModel) -> tuple[GradientStep, ...]:
    """The plain descents of which a step consists; none where it is more than that, or the data ask for x."""
    if shift.active:
        return ()
    steps = rule.descents()
    if model.statistics and len(steps) > 1:
        return ()
    mixed = any(step.mix_with and not step.outputs for step in steps)  # a ridge is then that of the mixture
    return () if model.ridge and mixed else steps


def num_models_in_use(steps: tuple[GradientStep, ...]) -> int:
    """How many rows of a client are at hand while it steps: its models, mixtures, and what optimisers remember."""
    return sum((2 if step.mix_with and not step.outputs else 1) + len(step.state) for step in steps)


def is_model_stackable(model: RowModel) -> bool:
    """Can several rows of the model go through one forward pass?"""
    independent = not (model.statistics or model.mixes_samples or model.traits.random)
    return (
        independent and model.loss in LOSSES.values() and is_stackable(model.training_module, not channels_last(model))
    )


def backpropagate(values: Tensor, gradient: Tensor) -> None:
    """`values.backward(gradient)` of [c] numbers, for tensors of equal shape.

    `Tensor.backward` compares the shapes as symbols, which takes 20 µs at each step and imports SymPy before the first.
    """
    torch.autograd.graph._engine_run_backward(
        (values,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class ClientStack:
    """All models of up to `stack` clients, for one thread at a time."""

    def __init__(self, rule: LocalRule, model: RowModel, steps: tuple[GradientStep, ...]) -> None:
        self.rule, self.model, self.steps = rule, model, steps
        self.stacks = {step.name: ModelStack(model, step) for step in steps}
        self.objective = BufferRecordingObjective(PlainObjective(model), None) if rule.has_round_start else None
        self.channels_last, self.loss = channels_last(model), without_vmap(model.loss)
        self.mixing: dict[str, Tensor] = {}

    def begin(self, carry: Carry, batch: Batch, rates: Tensor) -> Carry:
        """What the rule does with rows [c, …] before their first step, on its batch [c, B, …] at its rates [c]."""
        assert self.objective is not None
        carries = []
        for row, rate in enumerate(rates):
            row_carry, samples = ({name: value[row] for name, value in entries.items()} for entries in (carry, batch))
            carries.append(self.objective.on_round_start(self.rule, row_carry, samples, rate))
        return {name: torch.stack([entries[name] for entries in carries]) for name in carry}

    def load(self, carry: Carry, out: Carry) -> None:
        """Take over rows of the carry [c, …], which `store` will have written to `out`."""
        self.mixing = {step.name: carry[step.mixing] for step in self.steps if step.mixing}
        for step in reversed(self.steps):
            other_parameters = (
                None if step.outputs or step.mix_with is None else self.stacks[step.mix_with].loaded.parameters
            )
            self.stacks[step.name].load(carry, other_parameters, out)

    def store(self) -> None:
        """Have the rows written."""
        for stack in self.stacks.values():
            stack.store()

    def step(self, batch: Batch, rates: Tensor) -> Tensor:
        """One step of the first rows on their batches [c, B, …] at rates [c]; their losses [c] before it."""
        count = len(rates)
        mixing = {name: share[:count] for name, share in self.mixing.items()}
        keys = batch["key"] if self.model.dropout_keys else None
        for name, stack in self.stacks.items():
            stack.begin(keys, rates, mixing.get(name))
        flat = first_row(batch) if count == 1 else {k: v.flatten(0, 1) for k, v in batch.items() if v.dim() > 1}
        if self.channels_last and flat["x"].dim() == 4:
            flat["x"] = flat["x"].contiguous(memory_format=torch.channels_last)
        penalty = self.stacks[self.steps[-1].name].penalty(count) if self.model.ridge else None
        with torch.enable_grad():
            with self.model.random_context(flat), self.model.training_context():
                inputs = self.model.call.inputs(flat)
                outputs = {name: stack.forward(inputs) for name, stack in self.stacks.items()}
            outputs = {name: cast_output(output, self.model.dtype) for name, output in outputs.items()}
            for step in self.steps:
                output = outputs[step.name]
                if step.outputs and step.mix_with:
                    base_output = outputs[step.mix_with].detach().unflatten(0, (count, -1))
                    step_output = output.unflatten(0, (count, -1))
                    output = torch.lerp(
                        base_output, step_output, broadcast_rows(mixing[step.name], step_output)
                    ).flatten(0, 1)
                losses = self.loss(output, flat).view(count, -1)
                value = weighted_mean(losses, batch.get("weight"))
                backpropagate(value, self.stacks[step.name].seed)
        for stack in self.stacks.values():
            stack.finish()
        return value.detach() if penalty is None else value.detach() + penalty


class FusedExecutor:
    """Rows of a chunk in stacks.

    Args:
        rule: whose steps are descents.
        steps: these `descents`.
        stack: rows that go through the module together; 1 unless the model `stacks`.
        workers: threads that share the stacks on a CPU.
    """

    def __init__(
        self, rule: LocalRule, model: RowModel, steps: tuple[GradientStep, ...], stack: int, workers: int
    ) -> None:
        self.stack, self.workers, self.dtype = stack, workers, model.dtype
        self.moved_names = {name for step in steps for name in step.moves}
        self.has_round_start = rule.has_round_start
        self._clients: queue.SimpleQueue[ClientStack] = queue.SimpleQueue()
        for _ in range(workers):
            self._clients.put(ClientStack(rule, model, steps))

    def padded_size(self, rows: int) -> int:
        """As `VmapExecutor.padded_size`."""
        return rows

    def run(self, chunk: Chunk, carry: Carry, rates: Tensor, deployed: Tensor | None) -> tuple[Carry, Tensor]:
        """As `VmapExecutor.run`."""
        count = len(carry["params"])
        losses = torch.zeros(count, dtype=self.dtype, device=rates.device)
        changing = carry.keys() if self.has_round_start else self.moved_names
        out = carry | {name: torch.empty_like(carry[name]) for name in changing}

        @torch.no_grad()
        def run_stack(rows: range) -> None:
            client_stack = self._clients.get()
            try:
                row_slice = slice(rows.start, rows.stop)
                steps = chunk.steps[row_slice]
                stack_carry = {name: value[row_slice] for name, value in carry.items()}
                for step in range(int(steps.max())):
                    stop = rows.start + int((steps > step).sum())
                    batch = chunk.batch(step, rows.start, stop, self.dtype)
                    batch = chunk.contaminate(batch, step, rows.start, stop)
                    if step == 0:
                        if self.has_round_start:
                            stack_carry = client_stack.begin(stack_carry, batch, rates[0, row_slice])
                            for name in out.keys() - self.moved_names:
                                out[name][row_slice] = stack_carry[name]
                        client_stack.load(stack_carry, {name: out[name][row_slice] for name in self.moved_names})
                    losses[rows.start : stop].add_(client_stack.step(batch, rates[step, rows.start : stop]))
                client_stack.store()
            finally:
                self._clients.put(client_stack)

        stack_count = math.ceil(count / self.stack)
        bounds = [count * stack_carry // stack_count for stack_carry in range(stack_count + 1)]
        map_threads(run_stack, [range(*pair) for pair in itertools.pairwise(bounds)], self.workers)
        return out, losses
