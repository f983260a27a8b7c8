"""One model of several clients in one module, updated in place by gradient steps (`fedsim.local.rule.GradientStep`)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedsim.local.rule import AdamMoments, Carry, GradientStep
from fedsim.models import StatelessModel
from fedsim.models.calling import Inputs
from fedsim.models.copying import copy_module, set_module_tensors
from fedsim.trainer.grouped_convolutions import replace_trunk_layers
from fedsim.trainer.in_place import ParameterRows, PendingStep, broadcastable_to_rows, make_in_place_step
from fedsim.trainer.objective import updated_statistics
from fedsim.trainer.stepping import install_stepping_layers

NamedParameters = dict[str, Tensor]  # parameters by name, [c, …] each


def prefers_channels_last(model: StatelessModel) -> bool:
    """Return whether convolutions are fastest row by row in channels-last layout: on a CPU. Elsewhere they are
    stacked."""
    return model.convolutional and model.device.type == "cpu"


@dataclass
class StackedParameters:
    """Rows that a module has loaded.

    Attributes:
        parameters: those that are stepped in place.
        evaluation_points: those at which the gradient is taken: the same tensors, unless models are mixed.
        mixed_parameters: those of the model they are mixed with; nothing where models are not.
        gradient_terms: what is added to the gradient; nothing where nothing is.
        optimiser_state: what their optimiser remembers, by its names.
        update_counts: [c] how many steps they have taken, where it counts them.
        proximal_weights: [c] μ of a proximal term, or None.
        write_backs: pairs of what was stepped and where it is to be written in the end, where that is elsewhere.
    """

    parameters: NamedParameters = field(default_factory=dict)
    evaluation_points: NamedParameters = field(default_factory=dict)
    mixed_parameters: NamedParameters = field(default_factory=dict)
    gradient_terms: NamedParameters = field(default_factory=dict)
    optimiser_state: dict[str, NamedParameters] = field(default_factory=dict)
    update_counts: Tensor | None = None
    proximal_weights: Tensor | None = None
    write_backs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def select_parameters(self, names: Sequence[str]) -> ParameterRows:
        """Return the entries of some names."""
        parameters, drift = (
            [tensor_by_name[name] for name in names if tensor_by_name]
            for tensor_by_name in (self.parameters, self.gradient_terms)
        )
        return ParameterRows(
            parameters,
            drift,
            {key: [tensor_by_name[name] for name in names] for key, tensor_by_name in self.optimiser_state.items()},
        )


class ModelStack:
    """One model of up to `stack` clients in one module, used by one thread at a time.

    Args:
        model: of the run.
        gradient_step: the model's step.
        grouped: convolutions of several rows are one grouped convolution (`fedsim.trainer.grouped_convolutions`).

    Attributes:
        loss_gradient: [c'] what the backward pass of the step that is to come begins with, for every row.
    """

    def __init__(self, model: StatelessModel, gradient_step: GradientStep, grouped: bool = False) -> None:
        self.model, self.gradient_step = model, gradient_step
        self.weight_decay = gradient_step.decay + model.ridge
        module = copy_module(model.training_module)
        names = {name for name, p in module.named_parameters() if p.requires_grad}
        make_step = functools.partial(make_in_place_step, gradient_step.optimiser)
        trunk_layers = replace_trunk_layers(module, make_step) if grouped else []
        self.module, layers = install_stepping_layers(module, not prefers_channels_last(model), make_step)
        self.layers = trunk_layers + layers
        self.plain_parameters = {name: p for name, p in self.module.named_parameters() if name in names}
        self.plain_step = make_step()
        self.dropouts = [self.module.get_submodule(name.rpartition(".")[0]) for name in model.dropout_keys]
        if prefers_channels_last(model) and not grouped:
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.plain_state = {
            key: {name: torch.empty_like(parameter.detach()[None]) for name, parameter in self.plain_parameters.items()}
            for key in gradient_step.state
        }
        self._write_guard = model.guard_writes(self.module)
        self.loaded_parameters, self.loss_gradient = StackedParameters(), torch.empty(0)
        self.statistics = torch.empty(0)  # where the row's parameters are written

    def forward(self, inputs: Inputs) -> Any:
        """Return the module's output for the samples of all rows, concatenated."""
        with self._write_guard:
            return self.model.call(self.module, inputs)

    def load(self, carry: Carry, mixed_with: NamedParameters | None, output_carry: Carry) -> None:
        """Load rows of the carry [c, …], which `store` will have written to `output_carry`; `mixed_with` are
        parameters [c, …] to mix them with."""
        loaded_parameters = self.loaded_parameters = StackedParameters(mixed_parameters=mixed_with or {})
        loaded_parameters.proximal_weights, loaded_parameters.gradient_terms = self._strategy_terms(carry)
        name = self.gradient_step.name
        plain_parameters = {
            name: parameter.detach()[None] for name, parameter in self.plain_parameters.items()
        }  # of one row at a time
        parameters = self._parameter_views(
            carry[name], output_carry[name], plain_parameters if mixed_with is None else {}
        )
        loaded_parameters.parameters = loaded_parameters.evaluation_points = parameters
        if mixed_with is not None:
            loaded_parameters.evaluation_points = {
                name: torch.empty_like(rows) for name, rows in parameters.items()
            } | plain_parameters
        for key in self.gradient_step.state:
            loaded_parameters.optimiser_state[key] = self._parameter_views(
                carry[key], output_carry[key], self.plain_state[key]
            )
            output_carry[key][:, self.model.trained :] = carry[key][:, self.model.trained :]
        if "updates" in self.gradient_step.changed_entry_names:
            loaded_parameters.update_counts = output_carry["updates"].copy_(carry["updates"])
        for layer in self.layers:
            layer.load(loaded_parameters.select_parameters, loaded_parameters.evaluation_points)
        self.plain_step.load(loaded_parameters.select_parameters(list(plain_parameters)))
        if self.model.statistics:
            set_module_tensors(self.module, self.model.unflatten_statistics(carry[name][0]))
            self.statistics = output_carry[name][0, self.model.trained :]

    def _parameter_views(
        self, rows: Tensor, output_carry: Tensor, plain_parameters: NamedParameters
    ) -> NamedParameters:
        """Return the parameters of rows [c, d] where they are updated: in `output_carry` [c, d] if it is one row,
        otherwise in separate tensors or those of the module."""
        out_views = self._views_by_name(output_carry)
        parameters = (
            out_views
            if len(output_carry) == 1
            else {name: torch.empty_like(parameter_view) for name, parameter_view in out_views.items()}
        )
        parameters = parameters | plain_parameters
        row_views = self._views_by_name(rows)
        torch._foreach_copy_([parameters[name] for name in row_views], list(row_views.values()))
        self.loaded_parameters.write_backs += [
            (parameters[name], parameter_view)
            for name, parameter_view in out_views.items()
            if parameters[name] is not parameter_view
        ]
        return parameters

    def store(self) -> None:
        """Write the rows that are not in place already."""
        if self.loaded_parameters.write_backs:
            rows, output_carry = zip(*self.loaded_parameters.write_backs, strict=True)
            torch._foreach_copy_(output_carry, rows)
        if self.model.statistics:
            self.statistics.copy_(updated_statistics(self.model, self.module, self.statistics))

    def _strategy_terms(self, carry: Carry) -> tuple[Tensor | None, NamedParameters]:
        """Return what a strategy adds to its model's gradient: μ [c] of a proximal term, and the part that does not
        depend on x, which is its correction and −μ·anchor."""
        strategy_entries = carry if self.gradient_step.name == "params" else {}
        proximal, drift = strategy_entries.get("proximal"), strategy_entries.get("correction")
        if proximal is not None:
            proximal_pull = -proximal[:, None] * strategy_entries["anchor"]
            drift = proximal_pull if drift is None else drift + proximal_pull
        return proximal, {} if drift is None else self._views_by_name(drift)

    def _views_by_name(self, rows: Tensor) -> NamedParameters:
        """Return [c, d] → parameters [c, …], as views."""
        columns = rows[:, : self.model.trained].split([math.prod(s) for s in self.model.shapes.values()], dim=1)
        shapes = self.model.shapes.items()
        return {name: column.unflatten(1, shape) for (name, shape), column in zip(shapes, columns, strict=True)}

    def begin(self, keys: Tensor | None, learning_rates: Tensor, mixing_weights: Tensor | None) -> None:
        """Announce a step of the first c rows at rates [c], with dropout keys [c] and shares [c] in the mixture."""
        loaded_parameters, scale = self.loaded_parameters, self.gradient_step.scale
        learning_rates = learning_rates if scale == 1 else learning_rates * scale
        pending_step = self._pending_step(learning_rates)
        if loaded_parameters.mixed_parameters and mixing_weights is not None:
            pending_step = dataclasses.replace(pending_step, learning_rates=learning_rates * mixing_weights)
            for name, point in loaded_parameters.evaluation_points.items():
                stepped_rows, partner_rows = (
                    loaded_parameters.parameters[name][: len(mixing_weights)],
                    loaded_parameters.mixed_parameters[name][: len(mixing_weights)],
                )
                torch.lerp(
                    partner_rows,
                    stepped_rows,
                    broadcastable_to_rows(mixing_weights, point),
                    out=point[: len(mixing_weights)],
                )
        self.loss_gradient = (
            -pending_step.learning_rates
            if self.plain_step.scales_by_rate
            else torch.ones_like(pending_step.learning_rates)
        )
        for in_place_step in (*(layer.in_place_step for layer in self.layers), self.plain_step):
            in_place_step.begin(pending_step)
        for dropout in self.dropouts:
            dropout.key = keys  # type: ignore[assignment]

    def _pending_step(self, learning_rates: Tensor) -> PendingStep:
        """Return the pending step at these rates."""
        loaded_parameters, optimiser, row_count = (
            self.loaded_parameters,
            self.gradient_step.optimiser,
            len(learning_rates),
        )
        decay: float | Tensor = (
            self.weight_decay
            if loaded_parameters.proximal_weights is None
            else self.weight_decay + loaded_parameters.proximal_weights[:row_count]
        )
        decays = loaded_parameters.proximal_weights is not None or bool(self.weight_decay)
        if optimiser is None:
            return PendingStep(learning_rates, weight_decay_factor=1 - learning_rates * decay if decays else None)
        decoupled_decay = optimiser.decay if isinstance(optimiser, AdamMoments) else 0.0
        updates = (
            None if loaded_parameters.update_counts is None else loaded_parameters.update_counts[:row_count].add_(1)
        )
        of_gradient = decay + torch.zeros_like(learning_rates) if decays else None
        return PendingStep(
            learning_rates, of_gradient, 1 - learning_rates * decoupled_decay if decoupled_decay else None, updates
        )

    def finish(self) -> None:
        """Finish the step with the parameters that the backward pass did not update."""
        for layer in self.layers:
            layer.in_place_step.take_pending_step()
        gradients = [parameter.grad for parameter in self.plain_parameters.values()]
        self.plain_step.descend([None if gradient is None else gradient[None] for gradient in gradients])
        for parameter in self.plain_parameters.values():
            parameter.grad = None

    def penalty(self, rows: int) -> Tensor:
        """Return the ridge penalty of the first c rows, [c]."""
        squares = [
            parameter[:rows].flatten(1).square().sum(1) for parameter in self.loaded_parameters.parameters.values()
        ]
        return 0.5 * self.model.ridge * torch.stack(squares).sum(0)
