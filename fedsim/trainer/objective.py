"""A client's loss and its gradients, as local rules ask for them: one implementation per executor.

`per_sample` leaves a batch's weights to the caller; its losses and gradients include the ridge, so that their mean over
the samples is what `gradient` gives.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedsim.errors import ConfigError
from fedsim.local.base import Batch, Objective
from fedsim.models import RowModel


def refuse_dropout(model: RowModel) -> None:
    """Raise where single samples have no gradient of their own: a dropout mask belongs to a whole batch."""
    if model.dropout_keys:
        raise ConfigError(
            f"model: dropout layer {model.dropout_keys[0].removesuffix('.key')!r} draws its mask for a whole batch, "
            "but this local rule takes gradients sample by sample; use a model without dropout, or local=sgd"
        )


def single(sample: Batch) -> Batch:
    """One sample (entries without the batch's axis) as a batch of one; its weight is the caller's."""
    return {name: value[None] for name, value in sample.items() if name != "weight"}


class FunctionalObjective:
    """A client's loss as a pure function of its row, differentiable by torch.func and safe under vmap."""

    def __init__(self, model: RowModel) -> None:
        self.model = model

    def _loss(self, parameters: dict[str, Tensor], batch: Batch) -> Tensor:
        return self.model.objective(self.model.predict(parameters, batch), batch, list(parameters.values()))

    def gradient(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        gradients, value = grad_and_value(self._loss)(self.model.unflatten(params), batch)
        return torch.cat([g.reshape(-1) for g in gradients.values()]), value

    def per_sample(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        refuse_dropout(self.model)
        samples = {name: value for name, value in batch.items() if value.dim()}

        def of_one(parameters: dict[str, Tensor], sample: Batch) -> Tensor:
            return self._loss(parameters, single(sample))

        each = vmap(grad_and_value(of_one), in_dims=(None, 0))
        gradients, values = each(self.model.unflatten(params), samples)
        return values, torch.cat([g.flatten(1) for g in gradients.values()], dim=1)


class PlainObjective:
    """A client's loss through an own copy of the module, with ordinary autograd. For one thread at a time."""

    def __init__(self, model: RowModel) -> None:
        self.model = model
        self.module = copy.deepcopy(model.training_module)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.dropouts = [self.module.get_submodule(name.rpartition(".")[0]) for name in model.dropout_keys]

    def _set(self, params: Tensor) -> None:
        for parameter, value in zip(self.parameters, self.model.unflatten(params).values(), strict=True):
            parameter.data = value

    def _gradient(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            value = self.model.objective(self.module(batch["x"]), batch, self.parameters)
            gradients = torch.autograd.grad(value, self.parameters)
        return torch.cat([g.reshape(-1) for g in gradients]), value.detach()

    def gradient(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        for dropout in self.dropouts:
            dropout.key = batch["key"]
        self._set(params)
        return self._gradient(batch)

    def per_sample(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        refuse_dropout(self.model)
        self._set(params)
        samples = {name: value for name, value in batch.items() if value.dim()}
        each = [self._gradient(single({k: v[j] for k, v in samples.items()})) for j in range(len(batch["x"]))]
        return torch.stack([value for _, value in each]), torch.stack([gradient for gradient, _ in each])


class VmappedObjective:
    """The objective of a rule that steps whole chunks: params [c, d], batch [c, B, …]."""

    def __init__(self, model: RowModel) -> None:
        own = FunctionalObjective(model)
        self.gradient, self.per_sample = vmap(own.gradient), vmap(own.per_sample)


class StackedObjective:
    """The same for the loop executor: row by row through plain modules."""

    def __init__(self, own: Objective) -> None:
        self.own = own

    def gradient(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        found = [self.own.gradient(row, {k: v[i] for k, v in batch.items()}) for i, row in enumerate(params)]
        return torch.stack([g for g, _ in found]), torch.stack([value for _, value in found])

    def per_sample(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        found = [self.own.per_sample(row, {k: v[i] for k, v in batch.items()}) for i, row in enumerate(params)]
        return torch.stack([values for values, _ in found]), torch.stack([g for _, g in found])
