"""Features: the output of a chosen layer of the module, for local rules that use it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core import checks
from fedsim.core.errors import ConfigError


@dataclass(frozen=True)
class FeatureLayer:
    """The layer whose output, or input, are the features.

    Attributes:
        name: of the layer in the module.
        of_input: whether the features are what the layer receives.
    """

    name: str
    of_input: bool = False

    @classmethod
    def from_layer_name(cls, module: nn.Module, name: str | None, key: str) -> FeatureLayer:
        """Choose the output of the named layer; without a name, the input of the module's last linear layer.

        Args:
            module: that has the layer.
            name: as in `named_modules`.
            key: of the setting, for messages.

        Raises:
            ConfigError: there is no such layer.
        """
        layers = [layer_name for layer_name, _ in module.named_modules() if layer_name]
        if name is not None:
            if name not in layers:
                name_hint = checks.nearest_name_hint(name, layers)
                raise ConfigError(
                    f"{key}={name!r} is not a layer of {type(module).__name__}, which has "
                    f"{', '.join(layers)}{name_hint}"
                )
            return cls(name)
        linear = [layer_name for layer_name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
        if not linear:
            raise ConfigError(
                f"{key} must name the layer whose outputs are features, since {type(module).__name__} has no linear "
                f"layer; it has {', '.join(layers) or 'a single layer'}"
            )
        return cls(linear[-1], of_input=True)

    @contextlib.contextmanager
    def record_features(self, module: nn.Module) -> Iterator[list[Tensor]]:
        """Within the block, the features of this layer of the module are appended to the list."""
        recorded_tensors: list[Tensor] = []

        def record_tensor(layer: nn.Module, inputs: tuple[Any, ...], output: Any = None) -> None:
            recorded_tensors.append(inputs[0] if self.of_input else output)

        layer = module.get_submodule(self.name)
        hook_handle = (
            layer.register_forward_pre_hook(record_tensor)
            if self.of_input
            else layer.register_forward_hook(record_tensor)
        )
        try:
            yield recorded_tensors
        finally:
            hook_handle.remove()

    def describe(self) -> str:
        """Describe the layer, for messages."""
        return f"the {'input' if self.of_input else 'output'} of layer {self.name!r}"


@dataclass(frozen=True)
class ForwardPass:
    """The results of a forward pass of a batch.

    Attributes:
        output: [B, …] of the module.
        features: [B, k] of the rule's feature layer, flattened; k = 0 where the rule asks for none.
    """

    output: Tensor
    features: Tensor

    @classmethod
    def from_recording(cls, output: Tensor, recorded: list[Tensor], dtype: torch.dtype) -> ForwardPass:
        """Build from recorded tensors, in the run's type."""
        return cls(output, recorded[-1].flatten(1).to(dtype) if recorded else output.new_zeros(len(output), 0))


def record_features(module: nn.Module, layer: FeatureLayer | None) -> contextlib.AbstractContextManager[list[Tensor]]:
    """Return the features of a forward pass of the module within the block; an empty list if no layer was chosen."""
    return layer.record_features(module) if layer is not None else contextlib.nullcontext([])
