"""Linear and convolutional layers of several rows at once, whose step is taken inside the backward pass.

The gradient of a weight is a matrix product, dYᵀX. Where the step is a descent (`fedsim.local.rule.Descent`), that
product can write −η dYᵀX onto the weight instead of beside it (`fedsim.trainer.in_place`): no gradient is stored, none
is read again, and rows' weights are never copied. What is left of a step is the matrix products themselves. What steps
need not be the point at which the gradient is taken: that of a mixture of models goes to one of them. A convolution is
a linear layer on the patches of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsim.models.dropout import KeyedDropout
from fedsim.trainer.in_place import InPlaceStep, ParameterRows

# Layers without parameters that process every number, or every sample, independently.
SAMPLEWISE_LAYERS = (
    nn.Identity, nn.Flatten, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Hardtanh, nn.ReLU6, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, KeyedDropout,
)  # fmt: skip


class _SteppingLinearFunction(torch.autograd.Function):
    """x [c, N, in] → x Wᵀ + b [c, N, out], in the type of x; the backward pass steps the layer's own [c, out, in] and
    [c, 1, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: SteppingLinear) -> Tensor:
        weight = weight.detach().to(x.dtype)
        ctx.save_for_backward(x)
        ctx.layer, ctx.weight = layer, weight  # as it is when the step is due
        if layer.bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(layer.bias[: len(x)].to(x.dtype), x, weight.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        (x,), step = ctx.saved_tensors, ctx.layer.in_place_step
        input_gradient = torch.bmm(gradient, ctx.weight) if ctx.needs_input_grad[0] else None
        step.step_linear_layer(gradient, x)
        return input_gradient, None, None


def cast_for_autocast(x: Tensor) -> Tensor:
    """Return x in the type in which a linear layer of PyTorch would use it, that of autocast within its context."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class SteppingLayer(nn.Module):
    """A layer of c rows, whose samples go through it together; it updates its own parameters in the backward pass.

    Attributes:
        parameter_names: of its parameters in the whole module.
        in_place_step: its rows' parameters, as `view` shows them.
        weight, bias: those at which the gradient is taken: the same ones, or others.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, name: str, layer: nn.Module, in_place_step: InPlaceStep) -> None:
        super().__init__()
        prefix = f"{name}." if name else ""
        self.parameter_names = [f"{prefix}weight"] + ([f"{prefix}bias"] if layer.bias is not None else [])
        self.in_place_step = in_place_step
        self.weight, self.bias = torch.empty(0), None

    @property
    def num_rows(self) -> int:
        """The number of rows that take the pending step."""
        return len(self.in_place_step.pending_step.learning_rates)

    def to_layer_shape(self, parameters: Tensor) -> Tensor:
        """Return a parameter of all rows [c, …] in the shape in which the layer uses it."""
        return parameters

    def load(self, rows: Callable[[Sequence[str]], ParameterRows], points: dict[str, Tensor]) -> None:
        """Load parameters [c, …] of some rows: those that are updated in place, by name, and those at which the
        gradient is taken, the same ones or others."""
        self.in_place_step.load(rows(self.parameter_names).map_views(self.to_layer_shape))
        self.weight = self.to_layer_shape(points[self.parameter_names[0]]).detach().requires_grad_()
        self.bias = self.to_layer_shape(points[self.parameter_names[1]]) if len(self.parameter_names) > 1 else None


class SteppingLinear(SteppingLayer):
    """The linear layers of c rows. The rows' samples follow one another: [c·B, …, in] → [c·B, …, out]. Parameters are
    matrices, [c, out, in] and [c, 1, out]."""

    def to_layer_shape(self, parameters: Tensor) -> Tensor:
        return _as_matrices(parameters)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.num_rows
        output: Tensor = _SteppingLinearFunction.apply(
            cast_for_autocast(x).reshape(rows, -1, x.shape[-1]), self.weight[:rows], self
        )  # type: ignore[no-untyped-call]
        return output.reshape(*x.shape[:-1], output.shape[-1])


class SteppingConv2d(SteppingLinear):
    """Convolutions of c rows, as one batched matrix product over patches: [c·B, in, H, W] → [c·B, out, H', W']."""

    def __init__(self, name: str, layer: nn.Conv2d, in_place_step: InPlaceStep) -> None:
        super().__init__(name, layer, in_place_step)
        self.unfold_options: dict[str, Any] = {
            key: getattr(layer, key) for key in ("kernel_size", "dilation", "stride")
        }
        self.padding: Any = layer.padding

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(cast_for_autocast(x), padding=self.padding, **self.unfold_options).mT
        patch_outputs = super().forward(patches).mT
        window_options = zip(x.shape[2:], self.padding, *self.unfold_options.values(), strict=True)
        size = [(s + 2 * p - d * (k - 1) - 1) // step + 1 for s, p, k, d, step in window_options]
        image: Tensor = patch_outputs.unflatten(2, size)
        return image


def _as_matrices(parameters: Tensor) -> Tensor:
    """Return weights [c, out, …] or biases [c, out] as matrices [c, out, in] or [c, 1, out], as views."""
    return parameters.flatten(2) if parameters.dim() > 2 else parameters[:, None]


def has_sequential_layers(module: nn.Module) -> bool:
    """Return whether each layer is used once, one after another. This holds for `nn.Sequential`, and for modules
    whose class declares it by `samplewise = True` (which also promises that samples are independent)."""
    container_modules = [m for m in module.modules() if next(m.children(), None) is not None]
    layers = [m for _, m in module.named_modules(remove_duplicate=False)]
    parameters = [p for _, p in module.named_parameters(remove_duplicate=False)]
    all_sequential = all(type(m) is nn.Sequential or getattr(m, "samplewise", False) for m in container_modules)
    return all_sequential and len(set(layers)) == len(layers) and len(set(parameters)) == len(parameters)


def accepts_stacked_rows(module: nn.Module, convolutions: bool) -> bool:
    """Return whether samples of several rows can go through together: linear layers, and layers that treat samples
    independently; `convolutions`: whether convolutions may."""
    leaves = [m for m in module.modules() if next(m.children(), None) is None]
    return has_sequential_layers(module) and all(is_stackable_layer(m, convolutions) for m in leaves)


def is_stackable_layer(layer: nn.Module, convolutions: bool) -> bool:
    """Return whether samples of several rows can go through this layer together."""
    samplewise = type(layer) in SAMPLEWISE_LAYERS and getattr(layer, "start_dim", 1) == 1
    return samplewise or stepping_layer_class(layer, convolutions) is not None


def has_only_weight_and_bias(layer: nn.Module) -> bool:
    """Return whether a layer has no parameters except a weight and a bias, all of them trained, and no hooks."""
    parameter_names = {name for name, _ in layer.named_parameters()}
    hooked = layer._forward_hooks or layer._forward_pre_hooks  # such as those of nn.utils.spectral_norm
    return parameter_names <= {"weight", "bias"} and not hooked and all(p.requires_grad for p in layer.parameters())


def stepping_layer_class(module: nn.Module, step_convolutions: bool) -> type[SteppingLinear] | None:
    """Return a layer that can replace this one: for a plain linear layer or a plain convolution whose parameters
    are all trained."""
    if not has_only_weight_and_bias(module):
        return None
    if type(module) is nn.Linear:
        return SteppingLinear
    is_plain_convolution = type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros"
    return (
        SteppingConv2d if step_convolutions and is_plain_convolution and not isinstance(module.padding, str) else None
    )


def install_stepping_layers(
    module: nn.Module, step_convolutions: bool, make_step: Callable[[], InPlaceStep]
) -> tuple[nn.Module, list[SteppingLayer]]:
    """The module with its linear layers exchanged in place (and its convolutions, if asked for), where each is used
    once; and those layers. `make_step` makes what steps the parameters of one."""
    if not has_sequential_layers(module):
        return module, []
    replaced_layers: list[SteppingLayer] = []
    for layer_name, layer in list(module.named_modules()):
        kind = stepping_layer_class(layer, step_convolutions)
        if kind is not None:
            stepping_layer = kind(layer_name, layer, make_step())
            replaced_layers.append(stepping_layer)
            if not layer_name:
                return stepping_layer, replaced_layers
            parent, _, leaf = layer_name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, stepping_layer)
    return module, replaced_layers
