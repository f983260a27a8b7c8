"""The hidden channels of a chain of layers, and the columns of a row that belong to them.

A client that holds only some channels of each hidden layer trains a narrower network. In the full network it is the
one whose other columns are zero: a channel with neither incoming weights nor a bias outputs nothing, and nothing is
read from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.models.row_model import StatelessModel

CHANNEL_MIXING_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMALISATION_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class LayerChannels:
    """A layer with parameters.

    Attributes:
        outputs: which hidden layer its output channels are, from 0; None: they are the network's outputs.
        inputs: which hidden layer its inputs come from; None: they are the network's inputs.
        mixes_channels: whether its weight has one entry for each pair of output and input; else one for each channel.
    """

    outputs: int | None
    inputs: int | None
    mixes_channels: bool = True


class HiddenLayerChannels:
    """Maps the columns of a row [d] to channels.

    Args:
        layers: module name → layer, in the order of execution.
        widths: number of channels of each hidden layer.
        shapes: of the trained parameters, by name, in the order of the columns.
    """

    def __init__(
        self, layers: Mapping[str, LayerChannels], widths: Sequence[int], shapes: Mapping[str, torch.Size]
    ) -> None:
        self.layers, self.widths, self.shapes = dict(layers), tuple(widths), dict(shapes)

    @classmethod
    def from_model(cls, model: StatelessModel, samples: Mapping[str, Tensor]) -> HiddenLayerChannels:
        """Trace the chain of a model by following its layers through one evaluation of these samples.

        Raises:
            ConfigError: it is no chain of linear and convolutional layers, or has no hidden channels.
        """
        name = type(model.evaluation_module).__name__
        layers: dict[str, LayerChannels] = {}
        widths: list[int] = []
        modules, previous_layer = dict(model.evaluation_module.named_modules()), None
        order = _executed_layers(model, samples)
        mixing = [layer for layer in order if isinstance(modules[layer], CHANNEL_MIXING_LAYERS)]
        untraced_layers = {parameter.rpartition(".")[0] for parameter in model.shapes} - set(order)
        if untraced_layers or len(set(order)) < len(order):
            unsupported_layer = (
                sorted(untraced_layers)[0]
                if untraced_layers
                else next(layer for layer in order if order.count(layer) > 1)
            )
            raise ConfigError(
                f"capacity: each layer must be executed once, but {unsupported_layer!r} of {name} "
                f"is executed {order.count(unsupported_layer)} "
                "times; use capacity=full"
            )
        for layer in order:
            module = modules[layer]
            if (
                isinstance(module, NORMALISATION_LAYERS)
                and previous_layer is not None
                and module.num_features == widths[previous_layer]
            ):
                layers[layer] = LayerChannels(previous_layer, previous_layer, mixes_channels=False)
                continue
            if (
                not isinstance(module, CHANNEL_MIXING_LAYERS)
                or getattr(module, "groups", 1) != 1
                or _has_odd_parameters(module)
            ):
                raise ConfigError(
                    f"capacity: a model must be a chain of linear and convolutional layers for clients to hold some of "
                    f"its channels, and {layer!r} of {name} is {type(module).__name__}; use another model, such as "
                    "model=mlp, or capacity=full"
                )
            if previous_layer is not None and module.weight.shape[1] % widths[previous_layer]:
                raise ConfigError(
                    f"capacity: {layer!r} of {name} has {module.weight.shape[1]} inputs, no multiple of the "
                    f"{widths[previous_layer]} channels before it; use capacity=full"
                )
            is_last_layer = layer == mixing[-1]
            layers[layer] = LayerChannels(None if is_last_layer else len(widths), previous_layer)
            if not is_last_layer:
                previous_layer = len(widths)
                widths.append(module.weight.shape[0])
        if not widths:
            raise ConfigError(f"capacity: {name} has no hidden layer; use another model, or capacity=full")
        return cls(layers, widths, model.shapes)

    def held_column_masks(self, held_channels: Sequence[Tensor]) -> Tensor:
        """Return the columns of clients that hold these channels.

        Args:
            held_channels: of each hidden layer [k, channels] bool.

        Returns:
            [k, d] bool.
        """
        count, column_masks = len(held_channels[0]), []
        for name, shape in self.shapes.items():
            path, _, parameter = name.rpartition(".")
            layer, outputs = self.layers[path], self._held_output_mask(path, shape[0], held_channels)
            if parameter != "weight" or not layer.mixes_channels:
                column_masks.append(outputs)
                continue
            inputs = held_channels[0].new_ones(count, shape[1])
            if layer.inputs is not None:  # a flattened image has its channels one after another
                channels = held_channels[layer.inputs]
                inputs = channels.repeat_interleave(shape[1] // channels.shape[1], 1)
            pairs = outputs[:, :, None] & inputs[:, None, :]
            column_masks.append(pairs.reshape(count, -1).repeat_interleave(shape[2:].numel(), 1))
        return torch.cat(column_masks, 1)

    def absent_channel_column_mask(self, held_channels: Sequence[Tensor]) -> Tensor:
        """Return [k, d] bool: the columns that lead into channels which are not held."""
        column_masks = []
        for name, shape in self.shapes.items():
            outputs = self._held_output_mask(name.rpartition(".")[0], shape[0], held_channels)
            column_masks.append((~outputs).repeat_interleave(shape[1:].numel(), 1))
        return torch.cat(column_masks, 1)

    def _held_output_mask(self, path: str, width: int, held_channels: Sequence[Tensor]) -> Tensor:
        """Return [k, width] bool: which of a layer's outputs are held; all outputs of the network are."""
        output_channels = self.layers[path].outputs
        return (
            held_channels[0].new_ones(len(held_channels[0]), width)
            if output_channels is None
            else held_channels[output_channels]
        )


def _executed_layers(model: StatelessModel, samples: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the layers with their own parameters, in the order of execution."""
    order: list[str] = []
    hook_handles = [
        module.register_forward_hook(lambda _module, _inputs, _output, name=name: order.append(name))
        for name, module in model.evaluation_module.named_modules()
        if any(parameter is not None for parameter in module._parameters.values())
    ]
    try:
        model.evaluate(model.initial([0])[0], model.call.inputs(samples))
    finally:
        for hook_handle in hook_handles:
            hook_handle.remove()
    return order


def _has_odd_parameters(module: nn.Module) -> bool:
    """Return whether a layer has parameters other than a weight and a bias, as a parametrisation does."""
    return bool(module._parameters.keys() - {"weight", "bias"}) or bool(list(module.children()))


def check_channel_chain(
    model: StatelessModel, chain: HiddenLayerChannels, held_channels: Sequence[Tensor], samples: Mapping[str, Tensor]
) -> None:
    """Refuse a model that uses channels which a client does not hold: their incoming columns must not affect its
    output, and the columns that it lacks must get no gradient.

    Args:
        model: tried at a random row.
        chain: its layers.
        held_channels: of each hidden layer [1, channels] bool, those that the client holds.
        samples: a few inputs and targets.

    Raises:
        ConfigError: saying which.
    """
    name = type(model.evaluation_module).__name__
    draw = torch.Generator().manual_seed(0)
    row = model.initial([0])[0]
    row = row + (0.1 * torch.randn(len(row), generator=draw)).to(row)
    mask, incoming_columns = (
        columns[0].to(row.device)
        for columns in (chain.held_column_masks(held_channels), chain.absent_channel_column_mask(held_channels))
    )
    masked_row, inputs = row * mask, model.call.inputs(samples)
    with torch.no_grad():
        expected, disturbed = (
            model.evaluate(r, inputs) for r in (masked_row, torch.where(incoming_columns, row, masked_row))
        )
    if not torch.allclose(expected, disturbed, rtol=1e-3, atol=1e-4):
        raise ConfigError(
            f"capacity: channels that a client does not hold change the output of {name} (a normalisation across "
            "channels does this, and a connection that skips layers); use another model, or capacity=full"
        )
    batch = dict(samples) | {"key": torch.zeros((), dtype=torch.int64, device=row.device)}
    leaf_tensors = {key: value.detach().clone().requires_grad_() for key, value in model.unflatten(masked_row).items()}
    with torch.enable_grad():
        value = model.objective(model.predict(leaf_tensors, batch), batch, list(leaf_tensors.values()))
        gradients = torch.autograd.grad(value, list(leaf_tensors.values()), materialize_grads=True)
    gradient = torch.cat([gradient_part.reshape(-1) for gradient_part in gradients])
    if bool((gradient * ~mask).abs().max() > 1e-6 * gradient.abs().max()):
        raise ConfigError(
            f"capacity: columns that a client does not hold get a gradient in {name}; its activations must be 0 at 0, "
            "as ReLU and tanh are (sigmoid is not); use another activation, or capacity=full"
        )
