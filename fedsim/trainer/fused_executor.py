"""Plain descents with as little beside the model's own arithmetic as can be: rows step in place, in the backward pass.

Rows of models whose layers can be stacked go through them together (`fedsim.trainer.stepping`), as many as stay in the
cache; rows of other models, and convolutions on a CPU, one by one, by worker threads of which each has its own module.
"""

from __future__ import annotations

import copy
import itertools
import math
import queue
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedsim.local.base import Carry, Descent, LocalRule
from fedsim.models import LOSSES, RowModel
from fedsim.models.losses import weighted_mean
from fedsim.samples import Batch, Chunk
from fedsim.shift import Shift
from fedsim.trainer.loop_executor import first
from fedsim.trainer.objective import Noted, PlainObjective, moved_columns, put_buffers
from fedsim.trainer.stepping import InPlace, along, stackable, with_stepping_layers
from fedsim.trainer.workers import share


def descents(rule: LocalRule, shift: Shift, model: RowModel) -> tuple[Descent, ...]:
    """The plain descents of which a step consists; none where it is more than that, or the data ask for x."""
    if shift.active or model.precision == "bf16":
        return ()
    steps = rule.descents()
    if model.statistics and len(steps) > 1:
        return ()
    mixed = any(step.beside and not step.outputs for step in steps)  # a ridge is then that of the mixture
    return () if model.ridge and mixed else steps


def models_in_use(steps: tuple[Descent, ...]) -> int:
    """How many models of a client are at hand while it steps, mixtures included."""
    return sum(2 if step.beside and not step.outputs else 1 for step in steps)


def stacks(model: RowModel) -> bool:
    """Can several rows of the model go through one forward pass?"""
    apart = not (model.statistics or model.traits.mixes or model.traits.random)
    return apart and model.loss in LOSSES.values() and stackable(model.training_module, not channels_last(model))


def channels_last(model: RowModel) -> bool:
    """Are convolutions fastest row by row, in this layout? On a CPU; elsewhere they are stacked."""
    return model.convolutional and model.device.type == "cpu"


@dataclass
class Loaded:
    """Rows that a module has taken over: parameters by name, [c, …] each.

    Attributes:
        held: those that are stepped in place.
        points: those at which the gradient is taken: the same tensors, unless models are mixed.
        out: where they are written in the end; the same tensors, where nothing is left to write.
        beside: those of the model they are mixed with; nothing where models are not.
        proximal: [c] μ of a proximal term, or None.
    """

    held: dict[str, Tensor] = field(default_factory=dict)
    points: dict[str, Tensor] = field(default_factory=dict)
    out: dict[str, Tensor] = field(default_factory=dict)
    beside: dict[str, Tensor] = field(default_factory=dict)
    proximal: Tensor | None = None


class ModelStack:
    """One model of up to `stack` clients in one module, for one thread at a time.

    Args:
        model: of the run.
        descent: the model's step.
    """

    def __init__(self, model: RowModel, descent: Descent) -> None:
        self.model, self.descent = model, descent
        self.decay = descent.decay + model.ridge
        module = copy.deepcopy(model.training_module)
        names = {name for name, p in module.named_parameters() if p.requires_grad}
        self.module, self.layers = with_stepping_layers(module, not channels_last(model))
        self.plain = {name: p for name, p in self.module.named_parameters() if name in names}
        self.plain_rows = InPlace()
        self.dropouts = [self.module.get_submodule(name.rpartition(".")[0]) for name in model.dropout_keys]
        if channels_last(model):
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.loaded = Loaded()
        self.statistics = torch.empty(0)  # where those of the row are to be written

    def load(self, carry: Carry, beside: dict[str, Tensor] | None, out: Tensor) -> None:
        """Take over rows of the carry [c, …], which `store` will have written to `out` [c, d]; `beside` are parameters
        [c, …] to mix them with."""
        proximal, drift = self._terms(carry)
        written = self._named(out)
        held = written if len(out) == 1 else {name: torch.empty_like(rows) for name, rows in written.items()}
        plain = {name: parameter.detach()[None] for name, parameter in self.plain.items()}  # of one row at a time
        if beside is None:
            held = held | plain
        points = held if beside is None else {name: torch.empty_like(rows) for name, rows in held.items()} | plain
        for name, rows in self._named(carry[self.descent.name]).items():
            held[name].copy_(rows)
        for layer in self.layers:
            layer.load(held, points, drift)
        self.plain_rows.load([held[name] for name in plain], [drift[name] for name in plain if drift])
        self.loaded = Loaded(held, points, written, beside or {}, proximal)
        if self.model.statistics:
            put_buffers(self.module, self.model.statistics_of(carry[self.descent.name][0]))
            self.statistics = out[0, self.model.trained :]

    def store(self) -> None:
        """Write what does not lie there."""
        for name, rows in self.loaded.out.items():
            if self.loaded.held[name] is not rows:
                rows.copy_(self.loaded.held[name])
        if self.model.statistics:
            self.statistics.copy_(moved_columns(self.model, self.module, self.statistics))

    def _terms(self, carry: Carry) -> tuple[Tensor | None, dict[str, Tensor]]:
        """What a strategy adds to its own model's gradient: μ [c] of a proximal term, and the rest, which does not
        depend on x: its correction and −μ·anchor."""
        federal = carry if self.descent.name == "params" else {}
        proximal, drift = federal.get("proximal"), federal.get("correction")
        if proximal is not None:
            towards = -proximal[:, None] * federal["anchor"]
            drift = towards if drift is None else drift + towards
        return proximal, {} if drift is None else self._named(drift)

    def _named(self, rows: Tensor) -> dict[str, Tensor]:
        """[c, d] → parameters [c, …], views."""
        parts = rows[:, : self.model.trained].split([math.prod(s) for s in self.model.shapes.values()], dim=1)
        shapes = self.model.shapes.items()
        return {name: part.unflatten(1, shape) for (name, shape), part in zip(shapes, parts, strict=True)}

    def begin(self, keys: Tensor | None, rates: Tensor, mixing: Tensor | None) -> None:
        """A step of the first c rows at rates [c] is to come: dropout by keys [c], a share [c] in the mixture."""
        loaded, rates = self.loaded, rates * self.descent.scale
        decay = self.decay if loaded.proximal is None else self.decay + loaded.proximal[: len(rates)]
        shrinking = None if loaded.proximal is None and not self.decay else 1 - rates * decay
        if loaded.beside and mixing is not None:
            rates = rates * mixing
            for name, point in loaded.points.items():
                own, other = loaded.held[name][: len(mixing)], loaded.beside[name][: len(mixing)]
                torch.lerp(other, own, along(mixing, point), out=point[: len(mixing)])
        for stepped in (*(layer.stepped for layer in self.layers), self.plain_rows):
            stepped.begin(rates, shrinking)
        for dropout in self.dropouts:
            dropout.key = keys  # type: ignore[assignment]

    def finish(self) -> None:
        """What of the step the backward pass has left to do."""
        for layer in self.layers:
            layer.stepped.rest()
        gradients = [parameter.grad for parameter in self.plain.values()]
        self.plain_rows.descend([None if gradient is None else gradient[None] for gradient in gradients])
        for parameter in self.plain.values():
            parameter.grad = None

    def penalty(self, rows: int) -> Tensor:
        """[c] the ridge of the first c rows as they are."""
        squares = [held[:rows].flatten(1).square().sum(1) for held in self.loaded.held.values()]
        return 0.5 * self.model.ridge * torch.stack(squares).sum(0)


class ClientStack:
    """All models of up to `stack` clients, for one thread at a time."""

    def __init__(self, rule: LocalRule, model: RowModel, steps: tuple[Descent, ...]) -> None:
        self.rule, self.model, self.steps = rule, model, steps
        self.stacks = {step.name: ModelStack(model, step) for step in steps}
        self.objective = Noted(PlainObjective(model), None) if rule.begins else None
        self.channels_last = channels_last(model)
        self.mixing: dict[str, Tensor] = {}

    def begin(self, carry: Carry, batch: Batch, rates: Tensor) -> Carry:
        """What the rule does with rows [c, …] before their first step, on its batch [c, B, …] at its rates [c]."""
        assert self.objective is not None
        parts = []
        for row, rate in enumerate(rates):
            own, samples = ({name: value[row] for name, value in part.items()} for part in (carry, batch))
            parts.append(self.objective.begin(self.rule, own, samples, rate))
        return {name: torch.stack([part[name] for part in parts]) for name in carry}

    def load(self, carry: Carry, out: Carry) -> None:
        """Take over rows of the carry [c, …], which `store` will have written to `out`."""
        self.mixing = {step.name: carry[step.mixing] for step in self.steps if step.mixing}
        for step in reversed(self.steps):
            beside = None if step.outputs or step.beside is None else self.stacks[step.beside].loaded.held
            self.stacks[step.name].load(carry, beside, out[step.name])

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
        flat = first(batch) if count == 1 else {k: v.flatten(0, 1) for k, v in batch.items() if v.dim() > 1}
        if self.channels_last and flat["x"].dim() == 4:
            flat["x"] = flat["x"].contiguous(memory_format=torch.channels_last)
        penalty = self.stacks[self.steps[-1].name].penalty(count) if self.model.ridge else 0.0
        with torch.enable_grad():
            with self.model.drawing(flat):
                outputs = {
                    name: self.model.call(s.module, self.model.call.inputs(flat)) for name, s in self.stacks.items()
                }
            for step in self.steps:
                output = outputs[step.name]
                if step.outputs and step.beside:
                    other = outputs[step.beside].detach().unflatten(0, (count, -1))
                    own = output.unflatten(0, (count, -1))
                    output = torch.lerp(other, own, along(mixing[step.name], own)).flatten(0, 1)
                losses = self.model.loss(output, flat).view(count, -1)
                value = weighted_mean(losses, batch.get("weight"))
                value.sum().backward()
        for stack in self.stacks.values():
            stack.finish()
        return value.detach() + penalty


class FusedExecutor:
    """Rows of a chunk in stacks.

    Args:
        rule: whose steps are descents.
        steps: these `descents`.
        stack: rows that go through the module together; 1 unless the model `stacks`.
        workers: threads that share the stacks on a CPU.
    """

    def __init__(self, rule: LocalRule, model: RowModel, steps: tuple[Descent, ...], stack: int, workers: int) -> None:
        self.stack, self.workers, self.dtype = stack, workers, model.dtype
        self.moved = {step.name for step in steps}
        self.begins = rule.begins
        self._clients: queue.SimpleQueue[ClientStack] = queue.SimpleQueue()
        for _ in range(workers):
            self._clients.put(ClientStack(rule, model, steps))

    def run(self, chunk: Chunk, carry: Carry, rates: Tensor, deployed: Tensor | None) -> tuple[Carry, Tensor]:
        """As `VmapExecutor.run`."""
        count = len(carry["params"])
        losses = torch.zeros(count, dtype=self.dtype, device=rates.device)
        changing = carry.keys() if self.begins else self.moved
        out = carry | {name: torch.empty_like(carry[name]) for name in changing}

        @torch.no_grad()
        def run_stack(rows: range) -> None:
            own = self._clients.get()
            try:
                place = slice(rows.start, rows.stop)
                steps = chunk.steps[place]
                part = {name: value[place] for name, value in carry.items()}
                for step in range(int(steps.max())):
                    stop = rows.start + int((steps > step).sum())
                    batch = chunk.batch(step, rows.start, stop, self.dtype)
                    batch = chunk.contaminate(batch, step, rows.start, stop)
                    if step == 0:
                        if self.begins:
                            part = own.begin(part, batch, rates[0, place])
                            for name in out.keys() - self.moved:
                                out[name][place] = part[name]
                        own.load(part, {name: out[name][place] for name in self.moved})
                    losses[rows.start : stop] += own.step(batch, rates[step, rows.start : stop])
                own.store()
            finally:
                self._clients.put(own)

        parts = math.ceil(count / self.stack)
        bounds = [count * part // parts for part in range(parts + 1)]
        share(run_stack, [range(*pair) for pair in itertools.pairwise(bounds)], self.workers)
        return out, losses
