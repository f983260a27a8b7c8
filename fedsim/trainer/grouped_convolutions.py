"""Convolutions of several rows as one grouped convolution whose step is taken inside the backward pass.

On a CPU, a convolution of few channels spends much of its time outside of arithmetic. The images of c rows, side by
side in the channel dimension, go through one convolution with c groups in channels-last layout: the same products in
fewer and longer calls. Wide convolutions keep a core busy on their own and gain nothing.

A network qualifies if its convolutions are one stretch of an `nn.Sequential`, from the first of them to the
`nn.Flatten` behind the last, and nothing else between mixes channels, apart from group normalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsim.models.dropout import KeyedDropout
from fedsim.trainer.in_place import InPlaceStep
from fedsim.trainer.stepping import (
    SAMPLEWISE_LAYERS,
    SteppingConv2d,
    SteppingLayer,
    cast_for_autocast,
    has_only_weight_and_bias,
    has_sequential_layers,
    is_stackable_layer,
    stepping_layer_class,
)

CHANNELWISE_LAYERS = tuple(kind for kind in SAMPLEWISE_LAYERS if kind not in (nn.Flatten, KeyedDropout))


@dataclass(frozen=True)
class ConvolutionTrunk:
    """The part of a network that contains its convolutions.

    Attributes:
        sequential_name: name of the `nn.Sequential` that it lies in; '' is the module itself.
        first_position: position of its first convolution.
        flatten_position: position of the `nn.Flatten` that ends it.
        sequential: the `nn.Sequential` itself.
    """

    sequential_name: str
    first_position: int
    flatten_position: int
    sequential: nn.Sequential

    @property
    def layers(self) -> list[nn.Module]:
        """The layers before the `nn.Flatten`."""
        return list(self.sequential)[self.first_position : self.flatten_position]

    def layer_name(self, position: int) -> str:
        """Return the name of a layer of the sequence within the whole module."""
        return f"{self.sequential_name}.{position}" if self.sequential_name else str(position)


def find_convolution_trunk(module: nn.Module) -> ConvolutionTrunk | None:
    """Return the part that contains all convolutions of a module and can be grouped; None if there is none."""
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    if not convolutions or module is convolutions[0] or not has_sequential_layers(module):
        return None
    sequence_name, parent = next((n, m) for n, m in module.named_modules() if convolutions[0] in m.children())
    layers = list(parent.children())
    first = layers.index(convolutions[0])
    flatten = next((i for i in range(first, len(layers)) if type(layers[i]) is nn.Flatten), None)
    if type(parent) is not nn.Sequential or flatten is None:
        return None
    trunk, end = ConvolutionTrunk(sequence_name, first, flatten, parent), parent[flatten]
    holds_all = all(layer in trunk.layers for layer in convolutions)
    flattens_samples = isinstance(end, nn.Flatten) and (end.start_dim, end.end_dim) == (1, -1)
    return trunk if holds_all and flattens_samples and all(map(_is_layer_groupable, trunk.layers)) else None


def is_groupable(module: nn.Module) -> bool:
    """Return whether samples of several rows can go through the module together, with grouped convolutions."""
    trunk = find_convolution_trunk(module)
    if trunk is None:
        return False
    leaves = [layer for layer in module.modules() if next(layer.children(), None) is None]
    return all(is_stackable_layer(layer, False) for layer in leaves if layer not in trunk.layers)


def _is_layer_groupable(layer: nn.Module) -> bool:
    if type(layer) is nn.GroupNorm:
        return layer.affine and has_only_weight_and_bias(layer)
    return stepping_layer_class(layer, True) is SteppingConv2d or type(layer) in CHANNELWISE_LAYERS


def replace_trunk_layers(module: nn.Module, make_step: Callable[[], InPlaceStep]) -> list[SteppingLayer]:
    """Replace the layers of the module's trunk in place; return those that have parameters."""
    trunk = find_convolution_trunk(module)
    assert trunk is not None
    replaced_layers: list[SteppingLayer] = []
    for layer_position, layer in enumerate(trunk.layers, trunk.first_position):
        name = trunk.layer_name(layer_position)
        if isinstance(layer, nn.Conv2d):
            replaced_layers.append(
                GroupedConv2d(name, layer, make_step(), groups_input=layer_position == trunk.first_position)
            )
        elif isinstance(layer, nn.GroupNorm):
            replaced_layers.append(GroupedGroupNorm(name, layer, make_step()))
        else:
            continue
        trunk.sequential[layer_position] = replaced_layers[-1]
    trunk.sequential[trunk.flatten_position] = UngroupingFlatten(replaced_layers[0])
    return replaced_layers


class _ConvolutionStep(torch.autograd.Function):
    """x [B, c·in, H, W] → [B, c·out, H', W'] by weights [c, out, in, h, w]; the backward pass steps the layer's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: GroupedConv2d) -> Tensor:
        rows = len(weight)
        weight = weight.detach().to(x.dtype).flatten(0, 1)
        weight = weight.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x)
        ctx.layer, ctx.weight, ctx.rows = layer, weight, rows  # as it is when the step is due
        bias = None if layer.bias is None else layer.bias[:rows].to(x.dtype).flatten()
        return F.conv2d(x, weight, bias, **layer.convolution_options, groups=rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        (x,), layer, rows = ctx.saved_tensors, ctx.layer, ctx.rows
        geometry, channels = layer.convolution_options, gradient.shape[1]
        output_mask = [ctx.needs_input_grad[0], True, layer.bias is not None]
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        of_input, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient, x, ctx.weight, [channels], geometry["stride"], geometry["padding"], geometry["dilation"],
            False, [0, 0], rows, output_mask,
        )  # fmt: skip
        kind = layer.in_place_step.rows.parameters[0].dtype
        gradients = [of_weight.unflatten(0, (rows, -1)).to(kind)]
        if layer.bias is not None:
            gradients.append(of_bias.view(rows, -1).to(kind))
        layer.in_place_step.descend(gradients)
        return of_input, None, None


class GroupedConv2d(SteppingLayer):
    """Convolutions of c rows as one with c groups: [B, c·in, H, W] → [B, c·out, H', W'], in channels-last layout.

    Args:
        name, layer, in_place_step: as of every `SteppingLayer`.
        groups_input: the input is that of the network, [c·B, in, H, W], and is brought into that form first.
    """

    def __init__(self, name: str, layer: nn.Conv2d, in_place_step: InPlaceStep, groups_input: bool) -> None:
        super().__init__(name, layer, in_place_step)
        self.is_input_ungrouped = groups_input
        self.convolution_options: dict[str, Any] = {
            key: getattr(layer, key) for key in ("stride", "padding", "dilation")
        }

    def forward(self, x: Tensor) -> Tensor:
        rows, x = self.num_rows, cast_for_autocast(x)
        if self.is_input_ungrouped:
            x = x.unflatten(0, (rows, -1)).transpose(0, 1).flatten(1, 2)
        x = x.contiguous(memory_format=torch.channels_last)
        output: Tensor = _ConvolutionStep.apply(x, self.weight[:rows], self)  # type: ignore[no-untyped-call]
        return output


class _SteppingAffine(torch.autograd.Function):
    """x [B, c·C, H, W] → weight · x + bias, per channel; the backward pass steps the layer's own [c, C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: GroupedGroupNorm) -> Tensor:
        rows = len(weight)
        weight = weight.detach().to(x.dtype).view(1, -1, 1, 1)
        ctx.save_for_backward(x)
        ctx.layer, ctx.weight, ctx.rows = layer, weight, rows  # as it is when the step is due
        assert layer.bias is not None
        return torch.addcmul(layer.bias[:rows].to(x.dtype).view(1, -1, 1, 1), x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,), in_place_step, rows = ctx.saved_tensors, ctx.layer.in_place_step, ctx.rows
        kind = in_place_step.rows.parameters[0].dtype
        sums = [(gradient * x).sum((0, 2, 3), dtype=kind), gradient.sum((0, 2, 3), dtype=kind)]
        input_gradient = gradient * ctx.weight
        in_place_step.descend([of_channels.view(rows, -1) for of_channels in sums])
        return input_gradient, None, None


class GroupedGroupNorm(SteppingLayer):
    """Group normalisations of c rows: [B, c·C, H, W], every row's channels in groups of their own."""

    def __init__(self, name: str, layer: nn.GroupNorm, in_place_step: InPlaceStep) -> None:
        super().__init__(name, layer, in_place_step)
        self.num_groups, self.eps = layer.num_groups, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        rows = self.num_rows
        x = F.group_norm(x, rows * self.num_groups, eps=self.eps)
        output: Tensor = _SteppingAffine.apply(x, self.weight[:rows], self)  # type: ignore[no-untyped-call]
        return output


class UngroupingFlatten(nn.Module):
    """The end of a trunk: [B, c·C, H, W] → [c·B, C·H·W], with the samples of each row contiguous again.

    Args:
        layer: a layer of the trunk, which knows how many rows there are.
    """

    def __init__(self, layer: SteppingLayer) -> None:
        super().__init__()
        self._layer: Sequence[SteppingLayer] = (layer,)  # in a tuple, so that it is not registered as a submodule twice

    def forward(self, x: Tensor) -> Tensor:
        rows = self._layer[0].num_rows
        samples: Tensor = x.unflatten(1, (rows, -1)).transpose(0, 1).flatten(0, 1).flatten(1)
        return samples
