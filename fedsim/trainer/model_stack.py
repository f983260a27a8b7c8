"""One model of several clients in one module, stepped in place by descents (`fedsim.local.rule.Descent`)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedsim.local.rule import Carry, GradientStep, Moments
from fedsim.models import RowModel
from fedsim.models.calling import Inputs
from fedsim.models.copying import copy_module, put_tensors
from fedsim.trainer.in_place import Parameters, PendingStep, broadcast_rows, in_place
from fedsim.trainer.objective import moved_columns
from fedsim.trainer.stepping import with_stepping_layers

NamedParameters = dict[str, Tensor]  # parameters by name, [c, …] each


def channels_last(model: RowModel) -> bool:
    """Are convolutions fastest row by row, in this layout? On a CPU; elsewhere they are stacked."""
    return model.convolutional and model.device.type == "cpu"


@dataclass
class StackedParameters:
    """Rows that a module has taken over.

    Attributes:
        parameters: those that are stepped in place.
        points: those at which the gradient is taken: the same tensors, unless models are mixed.
        mixed_with: those of the model they are mixed with; nothing where models are not.
        drift: what is added to the gradient; nothing where nothing is.
        state: what their optimiser remembers, by its names.
        updates: [c] how many steps they have taken, where it counts them.
        proximal: [c] μ of a proximal term, or None.
        write_backs: pairs of what was stepped and where it is to be written in the end, where that is elsewhere.
    """

    parameters: NamedParameters = field(default_factory=dict)
    points: NamedParameters = field(default_factory=dict)
    mixed_with: NamedParameters = field(default_factory=dict)
    drift: NamedParameters = field(default_factory=dict)
    state: dict[str, NamedParameters] = field(default_factory=dict)
    updates: Tensor | None = None
    proximal: Tensor | None = None
    write_backs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def rows(self, names: Sequence[str]) -> Parameters:
        """Those of some names."""
        parameters, drift = (
            [tensor_by_name[name] for name in names if tensor_by_name]
            for tensor_by_name in (self.parameters, self.drift)
        )
        return Parameters(
            parameters,
            drift,
            {key: [tensor_by_name[name] for name in names] for key, tensor_by_name in self.state.items()},
        )


class ModelStack:
    """One model of up to `stack` clients in one module, for one thread at a time.

    Args:
        model: of the run.
        descent: the model's step.

    Attributes:
        seed: [c'] what the backward pass of the step that is to come begins with, for every row.
    """

    def __init__(self, model: RowModel, descent: GradientStep) -> None:
        self.model, self.descent = model, descent
        self.decay = descent.decay + model.ridge
        module = copy_module(model.training_module)
        names = {name for name, p in module.named_parameters() if p.requires_grad}
        make_step = functools.partial(in_place, descent.optimiser)
        self.module, self.layers = with_stepping_layers(module, not channels_last(model), make_step)
        self.plain = {name: p for name, p in self.module.named_parameters() if name in names}
        self.plain_step = make_step()
        self.dropouts = [self.module.get_submodule(name.rpartition(".")[0]) for name in model.dropout_keys]
        if channels_last(model):
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.plain_state = {
            key: {name: torch.empty_like(parameter.detach()[None]) for name, parameter in self.plain.items()}
            for key in descent.state
        }
        self._guard = model.guard(self.module)
        self.loaded, self.seed = StackedParameters(), torch.empty(0)
        self.statistics = torch.empty(0)  # where those of the row are to be written

    def forward(self, inputs: Inputs) -> Any:
        """The module's output for the samples of the rows, one row's behind the other's."""
        with self._guard:
            return self.model.call(self.module, inputs)

    def load(self, carry: Carry, mixed_with: NamedParameters | None, out: Carry) -> None:
        """Take over rows of the carry [c, …], which `store` will have written to `out`; `mixed_with` are parameters
        [c, …] to mix them with."""
        loaded = self.loaded = StackedParameters(mixed_with=mixed_with or {})
        loaded.proximal, loaded.drift = self._strategy_terms(carry)
        name = self.descent.name
        plain = {name: parameter.detach()[None] for name, parameter in self.plain.items()}  # of one row at a time
        parameters = self._parameter_views(carry[name], out[name], plain if mixed_with is None else {})
        loaded.parameters = loaded.points = parameters
        if mixed_with is not None:
            loaded.points = {name: torch.empty_like(rows) for name, rows in parameters.items()} | plain
        for key in self.descent.state:
            loaded.state[key] = self._parameter_views(carry[key], out[key], self.plain_state[key])
            out[key][:, self.model.trained :] = carry[key][:, self.model.trained :]
        if "updates" in self.descent.moves:
            loaded.updates = out["updates"].copy_(carry["updates"])
        for layer in self.layers:
            layer.load(loaded.rows, loaded.points)
        self.plain_step.load(loaded.rows(list(plain)))
        if self.model.statistics:
            put_tensors(self.module, self.model.statistics_of(carry[name][0]))
            self.statistics = out[name][0, self.model.trained :]

    def _parameter_views(self, rows: Tensor, out: Tensor, plain: NamedParameters) -> NamedParameters:
        """The parameters' columns of rows [c, d], where they are stepped: in `out` [c, d] if it is one row, else in
        tensors of their own, or in those of the module."""
        out_views = self._views_by_name(out)
        parameters = out_views if len(out) == 1 else {name: torch.empty_like(view) for name, view in out_views.items()}
        parameters = parameters | plain
        row_views = self._views_by_name(rows)
        torch._foreach_copy_([parameters[name] for name in row_views], list(row_views.values()))
        self.loaded.write_backs += [
            (parameters[name], view) for name, view in out_views.items() if parameters[name] is not view
        ]
        return parameters

    def store(self) -> None:
        """Write what does not lie there."""
        if self.loaded.write_backs:
            rows, out = zip(*self.loaded.write_backs, strict=True)
            torch._foreach_copy_(out, rows)
        if self.model.statistics:
            self.statistics.copy_(moved_columns(self.model, self.module, self.statistics))

    def _strategy_terms(self, carry: Carry) -> tuple[Tensor | None, NamedParameters]:
        """What a strategy adds to its own model's gradient: μ [c] of a proximal term, and the rest, which does not
        depend on x: its correction and −μ·anchor."""
        federal = carry if self.descent.name == "params" else {}
        proximal, drift = federal.get("proximal"), federal.get("correction")
        if proximal is not None:
            proximal_pull = -proximal[:, None] * federal["anchor"]
            drift = proximal_pull if drift is None else drift + proximal_pull
        return proximal, {} if drift is None else self._views_by_name(drift)

    def _views_by_name(self, rows: Tensor) -> NamedParameters:
        """[c, d] → parameters [c, …], views."""
        columns = rows[:, : self.model.trained].split([math.prod(s) for s in self.model.shapes.values()], dim=1)
        shapes = self.model.shapes.items()
        return {name: column.unflatten(1, shape) for (name, shape), column in zip(shapes, columns, strict=True)}

    def begin(self, keys: Tensor | None, rates: Tensor, mixing: Tensor | None) -> None:
        """A step of the first c rows at rates [c] is to come: dropout by keys [c], a share [c] in the mixture."""
        loaded, scale = self.loaded, self.descent.scale
        rates = rates if scale == 1 else rates * scale
        pending_step = self._pending_step(rates)
        if loaded.mixed_with and mixing is not None:
            pending_step = dataclasses.replace(pending_step, rates=rates * mixing)
            for name, point in loaded.points.items():
                stepped_rows, partner_rows = (
                    loaded.parameters[name][: len(mixing)],
                    loaded.mixed_with[name][: len(mixing)],
                )
                torch.lerp(partner_rows, stepped_rows, broadcast_rows(mixing, point), out=point[: len(mixing)])
        self.seed = -pending_step.rates if self.plain_step.scaled else torch.ones_like(pending_step.rates)
        for stepped in (*(layer.stepped for layer in self.layers), self.plain_step):
            stepped.begin(pending_step)
        for dropout in self.dropouts:
            dropout.key = keys  # type: ignore[assignment]

    def _pending_step(self, rates: Tensor) -> PendingStep:
        """The step at these rates."""
        loaded, optimiser, count = self.loaded, self.descent.optimiser, len(rates)
        decay: float | Tensor = self.decay if loaded.proximal is None else self.decay + loaded.proximal[:count]
        decays = loaded.proximal is not None or bool(self.decay)
        if optimiser is None:
            return PendingStep(rates, shrinking=1 - rates * decay if decays else None)
        decoupled_decay = optimiser.decay if isinstance(optimiser, Moments) else 0.0
        updates = None if loaded.updates is None else loaded.updates[:count].add_(1)
        of_gradient = decay + torch.zeros_like(rates) if decays else None
        return PendingStep(rates, of_gradient, 1 - rates * decoupled_decay if decoupled_decay else None, updates)

    def finish(self) -> None:
        """What of the step the backward pass has left to do."""
        for layer in self.layers:
            layer.stepped.apply_remaining()
        gradients = [parameter.grad for parameter in self.plain.values()]
        self.plain_step.descend([None if gradient is None else gradient[None] for gradient in gradients])
        for parameter in self.plain.values():
            parameter.grad = None

    def penalty(self, rows: int) -> Tensor:
        """[c] the ridge of the first c rows as they are."""
        squares = [parameter[:rows].flatten(1).square().sum(1) for parameter in self.loaded.parameters.values()]
        return 0.5 * self.model.ridge * torch.stack(squares).sum(0)
