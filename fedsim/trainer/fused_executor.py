"""Plain gradient descent with little overhead: rows are updated in place, inside the backward pass.

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
from fedsim.models import LOSSES, StatelessModel
from fedsim.models.calling import cast_output
from fedsim.models.losses import fused_loss, weighted_mean
from fedsim.shift import Shift
from fedsim.trainer.buffer_recording import BufferRecordingObjective
from fedsim.trainer.grouped_convolutions import is_groupable
from fedsim.trainer.in_place import broadcastable_to_rows
from fedsim.trainer.loop_executor import unstack_first_row
from fedsim.trainer.model_stack import ModelStack, prefers_channels_last
from fedsim.trainer.objective import AutogradObjective
from fedsim.trainer.stepping import accepts_stacked_rows
from fedsim.trainer.workers import map_threads

FUSED_EXECUTORS = ("fused", "grouped")  # names under which it can be chosen


def fusible_descents(rule: LocalRule, shift: Shift, model: StatelessModel) -> tuple[GradientStep, ...]:
    """Return the gradient descents of which a step consists; none if it contains anything else, or if the data
    depend on x."""
    if shift.active:
        return ()
    steps = rule.descents()
    if model.statistics and len(steps) > 1:
        return ()
    mixed = any(step.mix_with and not step.outputs for step in steps)  # a ridge is then that of the mixture
    return () if model.ridge and mixed else steps


def num_rows_in_memory(steps: tuple[GradientStep, ...]) -> int:
    """Return how many rows of a client are in memory during a step: its models, mixtures, and optimiser states."""
    return sum((2 if step.mix_with and not step.outputs else 1) + len(step.state) for step in steps)


def is_model_stackable(model: StatelessModel) -> bool:
    """Return whether several rows of the model can go through one forward pass."""
    return _keeps_rows_independent(model) and accepts_stacked_rows(
        model.training_module, not prefers_channels_last(model)
    )


def has_groupable_convolutions(model: StatelessModel) -> bool:
    """Return whether the convolutions of several rows of the model can become one grouped convolution on a CPU."""
    return prefers_channels_last(model) and _keeps_rows_independent(model) and is_groupable(model.training_module)


def _keeps_rows_independent(model: StatelessModel) -> bool:
    """Return whether samples, and losses of samples, are independent of the rest of the batch."""
    independent = not (model.statistics or model.mixes_samples or model.traits.random)
    return independent and model.loss in LOSSES.values()


def backpropagate(outputs: Tensor, gradient: Tensor) -> None:
    """`outputs.backward(gradient)` of [c] numbers, for tensors of equal shape.

    `Tensor.backward` compares the shapes as symbols, which takes 20 µs at each step and imports SymPy before the first.
    """
    torch.autograd.graph._engine_run_backward(
        (outputs,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class ClientStack:
    """All models of up to `stack` clients, used by one thread at a time."""

    def __init__(self, rule: LocalRule, model: StatelessModel, steps: tuple[GradientStep, ...], grouped: bool) -> None:
        self.local_rule, self.model, self.steps = rule, model, steps
        self.model_stack_by_name = {step.name: ModelStack(model, step, grouped) for step in steps}
        self.objective = BufferRecordingObjective(AutogradObjective(model), None) if rule.has_round_start else None
        self.channels_last, self.loss = prefers_channels_last(model) and not grouped, fused_loss(model.loss)
        self.mixing_weights_by_model: dict[str, Tensor] = {}

    def start_round(self, carry: Carry, batch: Batch, learning_rates: Tensor) -> Carry:
        """Call the rule before the first step of rows [c, …], on its batch [c, B, …] at its rates [c]."""
        assert self.objective is not None
        carries_of_clients = []
        for row, rate in enumerate(learning_rates):
            row_carry, samples = ({name: value[row] for name, value in entries.items()} for entries in (carry, batch))
            carries_of_clients.append(self.objective.on_round_start(self.local_rule, row_carry, samples, rate))
        return {name: torch.stack([entries[name] for entries in carries_of_clients]) for name in carry}

    def load(self, carry: Carry, output_carry: Carry) -> None:
        """Load rows of the carry [c, …]; `store` will have written them to `output_carry`."""
        self.mixing_weights_by_model = {step.name: carry[step.mixing] for step in self.steps if step.mixing}
        for step in reversed(self.steps):
            other_parameters = (
                None
                if step.outputs or step.mix_with is None
                else self.model_stack_by_name[step.mix_with].loaded_parameters.parameters
            )
            self.model_stack_by_name[step.name].load(carry, other_parameters, output_carry)

    def store(self) -> None:
        """Finish writing the rows."""
        for stack in self.model_stack_by_name.values():
            stack.store()

    def step(self, batch: Batch, learning_rates: Tensor) -> Tensor:
        """Take one step of the first rows on their batches [c, B, …] at rates [c]; return their losses [c] before
        it."""
        row_count = len(learning_rates)
        mixing_weights = {name: share[:row_count] for name, share in self.mixing_weights_by_model.items()}
        keys = batch["key"] if self.model.dropout_keys else None
        for name, stack in self.model_stack_by_name.items():
            stack.begin(keys, learning_rates, mixing_weights.get(name))
        flat_batch = (
            unstack_first_row(batch)
            if row_count == 1
            else {k: v.flatten(0, 1) for k, v in batch.items() if v.dim() > 1}
        )
        if self.channels_last and flat_batch["x"].dim() == 4:
            flat_batch["x"] = flat_batch["x"].contiguous(memory_format=torch.channels_last)
        penalty = self.model_stack_by_name[self.steps[-1].name].penalty(row_count) if self.model.ridge else None
        with torch.enable_grad():
            with self.model.random_context(flat_batch), self.model.training_context():
                inputs = self.model.call.inputs(flat_batch)
                outputs = {name: stack.forward(inputs) for name, stack in self.model_stack_by_name.items()}
            outputs = {name: cast_output(layer_output, self.model.dtype) for name, layer_output in outputs.items()}
            for step in self.steps:
                layer_output = outputs[step.name]
                if step.outputs and step.mix_with:
                    base_output = outputs[step.mix_with].detach().unflatten(0, (row_count, -1))
                    step_output = layer_output.unflatten(0, (row_count, -1))
                    layer_output = torch.lerp(
                        base_output, step_output, broadcastable_to_rows(mixing_weights[step.name], step_output)
                    ).flatten(0, 1)
                losses = self.loss(layer_output, flat_batch).view(row_count, -1)
                value = weighted_mean(losses, batch.get("weight"))
                backpropagate(value, self.model_stack_by_name[step.name].loss_gradient)
        for stack in self.model_stack_by_name.values():
            stack.finish()
        return value.detach() if penalty is None else value.detach() + penalty


class FusedExecutor:
    """Runs the rows of a chunk in stacks.

    Args:
        local_rule: whose steps are descents.
        steps: these `descents`.
        stack: rows that go through the module together; 1 unless the model can be stacked or grouped.
        workers: threads that share the stacks on a CPU.
        grouped: convolutions of a stack are one grouped convolution; the model `has_groupable_convolutions`.
    """

    def __init__(
        self,
        local_rule: LocalRule,
        model: StatelessModel,
        steps: tuple[GradientStep, ...],
        stack: int,
        workers: int,
        grouped: bool = False,
    ) -> None:
        self.rows_per_stack, self.workers, self.dtype = stack, workers, model.dtype
        self.changed_entries = {name for step in steps for name in step.changed_entry_names}
        self.has_round_start = local_rule.has_round_start
        self._client_stacks: queue.SimpleQueue[ClientStack] = queue.SimpleQueue()
        for _ in range(workers):
            self._client_stacks.put(ClientStack(local_rule, model, steps, grouped))

    def padded_size(self, rows: int) -> int:
        """As `VmapExecutor.padded_size`."""
        return rows

    def run(
        self, chunk: Chunk, carry: Carry, learning_rates: Tensor, deployed_models: Tensor | None
    ) -> tuple[Carry, Tensor]:
        """As `VmapExecutor.run`."""
        row_count = len(carry["params"])
        losses = torch.zeros(row_count, dtype=self.dtype, device=learning_rates.device)
        changing_names = carry.keys() if self.has_round_start else self.changed_entries
        output_carry = carry | {name: torch.empty_like(carry[name]) for name in changing_names}

        @torch.no_grad()
        def run_stack(rows: range) -> None:
            client_stack = self._client_stacks.get()
            try:
                row_slice = slice(rows.start, rows.stop)
                steps = chunk.steps[row_slice]
                stack_carry = {name: value[row_slice] for name, value in carry.items()}
                for step in range(int(steps.max())):
                    stop_row = rows.start + int((steps > step).sum())
                    batch = chunk.batch(step, rows.start, stop_row, self.dtype)
                    batch = chunk.contaminate(batch, step, rows.start, stop_row)
                    if step == 0:
                        if self.has_round_start:
                            stack_carry = client_stack.start_round(stack_carry, batch, learning_rates[0, row_slice])
                            for name in output_carry.keys() - self.changed_entries:
                                output_carry[name][row_slice] = stack_carry[name]
                        client_stack.load(
                            stack_carry, {name: output_carry[name][row_slice] for name in self.changed_entries}
                        )
                    losses[rows.start : stop_row].add_(
                        client_stack.step(batch, learning_rates[step, rows.start : stop_row])
                    )
                client_stack.store()
            finally:
                self._client_stacks.put(client_stack)

        stack_count = math.ceil(row_count / self.rows_per_stack)
        stack_count = min(row_count, math.ceil(stack_count / self.workers) * self.workers)  # as many for each thread
        bounds = [row_count * stack_carry // stack_count for stack_carry in range(stack_count + 1)]
        map_threads(run_stack, [range(*pair) for pair in itertools.pairwise(bounds)], self.workers)
        return output_carry, losses
