"""A client's loss and its gradients, in the form that local rules use (`fedsim.local.Objective`).

Two classes differentiate one client's loss: `FunctionalObjective` by torch.func, safe under vmap, `AutogradObjective`
by ordinary autograd through an own module, safe in a thread. Their methods end with what the forward passes left in the
columns of statistics, [d − trained] for every point; `fedsim.trainer.buffer_recording` takes note of that.
`per_sample` leaves a batch's weights to the caller; its losses and gradients include the ridge, so that their mean over
the samples is what `gradient` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap

from fedsim.core.errors import ConfigError
from fedsim.data.samples import Batch
from fedsim.models import StatelessModel
from fedsim.models.calling import cast_output
from fedsim.models.copying import copy_module, get_named_tensor, set_module_tensors
from fedsim.models.features import ForwardPass, record_features

ShiftResponse = Callable[[Batch, Tensor], Batch]
Penalty = Callable[[ForwardPass, Batch], Tensor]


def check_per_sample_gradients(model: StatelessModel) -> None:
    """Raise an error if single samples have no gradient of their own: a dropout mask belongs to a whole batch."""
    rule = "but this local rule takes gradients sample by sample"
    if model.dropout_keys:
        raise ConfigError(
            f"model: dropout layer {model.dropout_keys[0].removesuffix('.key')!r} draws its mask for a whole batch, "
            f"{rule}; use a model without dropout, or local=sgd"
        )
    model_traits = model.traits
    if model.loss_mixes_samples:
        raise ConfigError(f"model: its loss looks at a whole batch, {rule}; use a loss per sample, or local=sgd")
    if model_traits.random or model_traits.mixes_samples or model_traits.statistics:
        action = (
            "draws random numbers for"
            if model_traits.random
            else "normalises over"
            if model_traits.mixes_samples
            else "keeps statistics of"
        )
        raise ConfigError(f"model: its forward pass {action} a whole batch, {rule}; use another model, or local=sgd")


def flatten_gradients(gradients: Iterable[Tensor], statistics: int = 0) -> Tensor:
    """Return gradients [d] of the parameters, in their order, with zeros for the columns of statistics."""
    columns = [(g.to_dense() if g.layout != torch.strided else g).reshape(-1) for g in gradients]  # sparse embeddings
    return torch.cat([*columns, columns[0].new_zeros(statistics)] if statistics else columns)


def per_sample_entries(batch: Batch) -> Batch:
    """Return the entries of a batch that have one value per sample; weights are handled by the caller."""
    return {name: value for name, value in batch.items() if value.dim() and name != "weight"}


class FunctionalObjective:
    """A client's loss as a pure function of its row, differentiable by torch.func and safe under vmap."""

    def __init__(self, model: StatelessModel) -> None:
        self.model = model
        self.num_statistics = model.dimension - model.trained

    def _predict(self, parameters: dict[str, Tensor], params: Tensor, batch: Batch) -> tuple[Any, Tensor]:
        """Return the output with these parameters and the statistics of the row [d], and the updated statistics."""
        statistics = self.model.unflatten_statistics(params)
        output = self.model.predict(parameters, batch, statistics)
        return output, self.model.flatten_statistics(statistics) if statistics else params[self.model.trained :]

    def _loss(self, parameters: dict[str, Tensor], params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        output, statistics = self._predict(parameters, params, batch)
        return self.model.objective(output, batch, list(parameters.values())), statistics

    def gradient(self, params: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        gradient_and_value = grad_and_value(self._loss, has_aux=True)
        gradients, (value, statistics) = gradient_and_value(self.model.unflatten(params), params, batch)
        return flatten_gradients(gradients.values(), self.num_statistics), value, statistics

    def value(self, params: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        return self._loss(self.model.unflatten(params), params, batch)

    def gradient_through(self, params: Tensor, batch: Batch, shift_samples: ShiftResponse) -> tuple[Tensor, ...]:
        def loss(parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return self._loss(parameters, params, shift_samples(batch, flatten_gradients(parameters.values())))

        gradients, (value, statistics) = grad_and_value(loss, has_aux=True)(self.model.unflatten(params))
        return flatten_gradients(gradients.values(), self.num_statistics), value, statistics

    def penalised(self, params: Tensor, batch: Batch, penalty: Penalty) -> tuple[Tensor, ...]:
        model = self.model

        def loss(parameters: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
            with record_features(model.training_module, model.feature_layer) as recorded:
                output, statistics = self._predict(parameters, params, batch)
            forward = ForwardPass.from_recording(output, recorded, model.dtype)
            value = model.objective(output, batch, list(parameters.values()))
            return value + penalty(forward, batch), (value, forward.features, statistics)

        gradients, (value, features, statistics) = grad(loss, has_aux=True)(model.unflatten(params))
        return flatten_gradients(gradients.values(), self.num_statistics), value, features, statistics

    def forward(self, params: Tensor, batch: Batch) -> ForwardPass:
        model = self.model
        with torch.no_grad(), record_features(model.evaluation_module, model.feature_layer) as recorded:
            output = model.evaluate(params, model.call.inputs(batch))
        return ForwardPass.from_recording(cast_output(output, model.dtype), recorded, model.dtype)

    def per_sample(self, params: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        check_per_sample_gradients(self.model)

        def one_sample_loss(parameters: dict[str, Tensor], sample: Batch) -> Tensor:
            return self._loss(parameters, params, {name: value[None] for name, value in sample.items()})[0]

        sample_gradients = vmap(grad_and_value(one_sample_loss), in_dims=(None, 0))
        gradients, values = sample_gradients(self.model.unflatten(params), per_sample_entries(batch))
        return values, torch.cat([g.flatten(1) for g in gradients.values()], dim=1), params[:0]

    def hessian_product(self, params: Tensor, vector: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        direction = self.model.unflatten(vector)

        def directional_derivative(parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            gradients, statistics = grad(self._loss, has_aux=True)(parameters, params, batch)
            return torch.stack([(g * direction[name]).sum() for name, g in gradients.items()]).sum(), statistics

        product, statistics = grad(directional_derivative, has_aux=True)(self.model.unflatten(params))
        return flatten_gradients(product.values(), self.num_statistics), statistics

    def mixed_outputs(self, personal_params: Tensor, params: Tensor, alpha: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        global_output, global_statistics = self._predict(self.model.unflatten(params), params, batch)

        def loss(parameters: dict[str, Tensor], alpha: Tensor) -> tuple[Tensor, Tensor]:
            personal_output, personal_statistics = self._predict(parameters, personal_params, batch)
            return self.model.objective(
                torch.lerp(global_output, personal_output, alpha), batch, list(parameters.values())
            ), personal_statistics

        gradient_and_value = grad_and_value(loss, argnums=(0, 1), has_aux=True)
        (gradients, slope), (value, personal_statistics) = gradient_and_value(
            self.model.unflatten(personal_params), alpha
        )
        return (
            flatten_gradients(gradients.values(), self.num_statistics),
            slope,
            value,
            personal_statistics,
            global_statistics,
        )


class AutogradObjective:
    """A client's loss through its own copy of the module, with ordinary autograd; used by one thread at a time."""

    def __init__(self, model: StatelessModel) -> None:
        self.model = model
        self.num_statistics = model.dimension - model.trained
        self.renew_module()

    def renew_module(self) -> None:
        """Replace the module by a new copy, without what earlier forward passes left in its attributes."""
        self.module = copy_module(self.model.training_module)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.dropouts = [self.module.get_submodule(name.rpartition(".")[0]) for name in self.model.dropout_keys]
        self._write_guard = self.model.guard_writes(self.module)
        self._evaluation_module: nn.Module | None = None  # a copy in evaluation mode, created when first needed

    def _output_and_statistics(self, params: Tensor, batch: Batch) -> tuple[Any, Tensor]:
        """Set these parameters in the module; return its output and the updated statistics."""
        self._load_parameters(params, batch)
        return self._forward(params, batch)

    def _load_parameters(self, params: Tensor, batch: Batch) -> None:
        for dropout in self.dropouts:
            dropout.key = batch["key"]
        for parameter, value in zip(self.parameters, self.model.unflatten(params).values(), strict=True):
            parameter.data = value
        set_module_tensors(self.module, self.model.unflatten_statistics(params))

    def _forward(self, params: Tensor, batch: Batch) -> tuple[Any, Tensor]:
        with self.model.training_context(), self.model.random_context(batch), self._write_guard:
            output = cast_output(self.model.call(self.module, self.model.call.inputs(batch)), self.model.dtype)
        return output, updated_statistics(self.model, self.module, params)

    def _gradients(self, value: Tensor, *extra_inputs: Tensor, create_graph: bool = False) -> tuple[Tensor, ...]:
        """Return the gradients of a value by all parameters, as a row, and by other given tensors; `create_graph`:
        for a second derivative."""
        gradients = torch.autograd.grad(
            value, [*self.parameters, *extra_inputs], create_graph=create_graph, materialize_grads=True
        )
        count = len(self.parameters)
        return flatten_gradients(gradients[:count], self.num_statistics), *gradients[count:]

    def gradient(self, params: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            output, statistics = self._output_and_statistics(params, batch)
            value = self.model.objective(output, batch, self.parameters)
            (gradient,) = self._gradients(value)
        return gradient, value.detach(), statistics

    def value(self, params: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        with torch.no_grad():
            output, statistics = self._output_and_statistics(params, batch)
            return self.model.objective(output, batch, self.parameters), statistics

    def gradient_through(self, params: Tensor, batch: Batch, shift_samples: ShiftResponse) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            self._load_parameters(params, batch)
            batch = shift_samples(batch, flatten_gradients(self.parameters))
            output, statistics = self._forward(params, batch)
            value = self.model.objective(output, batch, self.parameters)
            (gradient,) = self._gradients(value)
        return gradient, value.detach(), statistics

    def penalised(self, params: Tensor, batch: Batch, penalty: Penalty) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            with record_features(self.module, self.model.feature_layer) as recorded:
                output, statistics = self._output_and_statistics(params, batch)
            forward = ForwardPass.from_recording(output, recorded, self.model.dtype)
            value = self.model.objective(output, batch, self.parameters)
            (gradient,) = self._gradients(value + penalty(forward, batch))
        return gradient, value.detach(), forward.features.detach(), statistics

    def forward(self, params: Tensor, batch: Batch) -> ForwardPass:
        model = self.model
        if self._evaluation_module is None:
            self._evaluation_module = copy_module(model.evaluation_module)
        trained = [p for p in self._evaluation_module.parameters() if p.requires_grad]
        for parameter, value in zip(trained, model.unflatten(params).values(), strict=True):
            parameter.data = value
        set_module_tensors(self._evaluation_module, model.unflatten_statistics(params))
        with torch.no_grad(), record_features(self._evaluation_module, model.feature_layer) as recorded:
            output = model.call(self._evaluation_module, model.call.inputs(batch))
        return ForwardPass.from_recording(cast_output(output, model.dtype), recorded, model.dtype)

    def per_sample(self, params: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        check_per_sample_gradients(self.model)
        sample_gradients = vmap_by_loop(self.gradient)
        samples = {name: value[:, None] for name, value in per_sample_entries(batch).items()}  # batches of one
        gradients, values, _ = sample_gradients(params.expand(len(batch["x"]), -1), samples)
        return values, gradients, params[:0]

    def hessian_product(self, params: Tensor, vector: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            output, statistics = self._output_and_statistics(params, batch)
            value = self.model.objective(output, batch, self.parameters)
            (gradient,) = self._gradients(value, create_graph=True)
            slope = (gradient * vector).sum()
        if not slope.requires_grad:  # a loss that is linear in the parameters
            return torch.zeros_like(params), statistics
        return self._gradients(slope)[0], statistics

    def mixed_outputs(self, personal_params: Tensor, params: Tensor, alpha: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        global_output, global_statistics = self._output_and_statistics(params, batch)
        with torch.enable_grad():
            alpha = alpha.detach().requires_grad_()
            personal_output, personal_statistics = self._output_and_statistics(personal_params, batch)
            value = self.model.objective(
                torch.lerp(global_output.detach(), personal_output, alpha), batch, self.parameters
            )
            gradient, slope = self._gradients(value, alpha)
        return gradient, slope, value.detach(), personal_statistics, global_statistics


def updated_statistics(model: StatelessModel, module: nn.Module, row: Tensor) -> Tensor:
    """Return the columns of statistics as the module holds them; empty if a row [d] has none."""
    if not model.statistics:
        return row[model.trained :]
    return model.flatten_statistics({name: get_named_tensor(module, name).detach() for name in model.statistics})


def vmap_by_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what `vmap` makes of a function of tensors and dictionaries of tensors, computed row by row and
    stacked."""

    def of_row(argument: Tensor | Batch, row: int) -> Tensor | Batch:
        return {k: v[row] for k, v in argument.items()} if isinstance(argument, dict) else argument[row]

    def apply_per_row(*arguments: Tensor | Batch) -> Any:
        results = [function(*(of_row(a, row) for a in arguments)) for row in range(len(arguments[0]))]
        return tuple(torch.stack(values) for values in zip(*results, strict=True))

    return apply_per_row
