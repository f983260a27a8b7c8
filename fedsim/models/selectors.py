"""Selectors of private parameters, which stay with the client: they are neither sent nor averaged."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fedsim.core.columns import ParameterPartition
from fedsim.core.constraints import Count, Validated
from fedsim.core.errors import ConfigError


class Selector(Validated, ABC):
    """Chooses among the names of a row's tensors: trained parameters and statistics."""

    @abstractmethod
    def private_parameters(self, module: nn.Module, names: list[str]) -> set[str]:
        """Return the names of the tensors that stay with the client."""


class Everything(Selector):
    """Send all tensors of a model."""

    def private_parameters(self, module: nn.Module, names: list[str]) -> set[str]:
        return set()


class ByName(Selector):
    """Regular expressions over names such as '0.weight' or 'head.bias', each found anywhere in a name.

    Args:
        travels: what matches one of these travels, the rest stays; give this or `stays`.
        stays: what matches one of these stays.
    """

    def __init__(self, travels: list[str] | None = None, stays: list[str] | None = None) -> None:
        if (travels is None) == (stays is None):
            raise ConfigError(
                "{travels} and {stays}: give one of the two, a list of regular expressions",
                mentions=("travels", "stays"),
            )
        self.key, patterns = ("travels", travels) if stays is None else ("stays", stays)
        self.patterns = {}
        for pattern in patterns or []:
            try:
                self.patterns[pattern] = re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"columns.{self.key}: {pattern!r} is not a regular expression ({error})") from error

    def private_parameters(self, module: nn.Module, names: list[str]) -> set[str]:
        for pattern, compiled_pattern in self.patterns.items():
            if not any(map(compiled_pattern.search, names)):
                raise ConfigError(f"columns.{self.key}: {pattern!r} matches none of the model's {', '.join(names)}")
        matching_names = {name for name in names if any(p.search(name) for p in self.patterns.values())}
        return matching_names if self.key == "stays" else set(names) - matching_names


class Normalisation(Selector):
    """Layers of batch normalisation stay, parameters and statistics (FedBN: Li et al., ICLR 2021, Alg. 1)."""

    def private_parameters(self, module: nn.Module, names: list[str]) -> set[str]:
        kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
        layers = {name for name, layer in module.named_modules() if isinstance(layer, kinds)}
        private_names = {name for name in names if name.rpartition(".")[0] in layers}
        if not private_names:
            raise ConfigError(
                "columns=fedbn keeps layers of batch normalisation with the client, but "
                f"{type(module).__name__} has none"
            )
        return private_names


class Head(Selector):
    """The last layers stay, the others travel (FedPer: Arivazhagan et al., 2019, §3), or the other way round with
    `travels` (LG-FedAvg: Liang et al., 2020, §2.1).

    Args:
        layers: how many, counted among those with parameters, in the order in which the module names them.
        travels: it is the head that travels.
    """

    def __init__(self, layers: Count = 1, travels: bool = False) -> None:
        self.layers, self.travels = layers, travels

    def private_parameters(self, module: nn.Module, names: list[str]) -> set[str]:
        order = _layer_names(names)
        if self.layers >= len(order):
            raise ConfigError(
                f"columns.layers={self.layers}, but {type(module).__name__} has {len(order)} layers with parameters; "
                "some must travel and some must stay"
            )
        head = _names_of_layers(names, order[-self.layers :])
        return set(names) - head if self.travels else head


def columns_of_last_layers(shapes: Mapping[str, torch.Size], layers: int) -> Tensor:
    """Return the indices [k] of the columns of the last layers, of those with trained parameters of these shapes."""
    order = _layer_names(shapes)
    if layers > len(order):
        raise ConfigError(f"local.layers={layers}, but the model has {len(order)} with parameters; lower it")
    sizes = {name: shape.numel() for name, shape in shapes.items()}
    return ParameterPartition.from_sizes(sizes, set(), _names_of_layers(shapes, order[-layers:])).private


def _layer_names(names: Iterable[str]) -> list[str]:
    """Return the layers that have these parameters, in their order."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _names_of_layers(names: Iterable[str], layers: Iterable[str]) -> set[str]:
    """Return the names that belong to these layers."""
    return {name for name in names if name.rpartition(".")[0] in set(layers)}
