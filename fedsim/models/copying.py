"""Copies of a user's module, and its tensors by name."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedsim.core.errors import ConfigError, first_message_line


def copy_module(module: nn.Module) -> nn.Module:
    """Deep-copy a module, also one that holds results of an earlier forward pass.

    Pruning, the older weight normalisation and modules that keep their last activation hold tensors that belong to a
    graph, which deepcopy refuses; the copy holds them detached. Pruning and weight normalisation compute them anew at
    each forward pass.

    Raises:
        ConfigError: the module holds something that cannot be copied.
    """
    tensors = [
        value
        for layer in module.modules()
        for attribute in vars(layer).values()
        for value in tree_leaves(attribute)
        if isinstance(value, Tensor)
    ]
    replacements: dict[int, Tensor] = {}
    for value in tensors:
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            replacements[id(value)] = _unwrapped_functorch_tensor(value)
        elif value.grad_fn is not None:
            replacements[id(value)] = value.detach().clone()
    for name, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise ConfigError(
                f"model: layer {name!r} of {type(module).__name__} is one of TorchScript, whose copies cannot be "
                "trained; use the module that it was made from"
            )
    try:
        return copy.deepcopy(module, replacements)
    except Exception as error:
        reason = first_message_line(error, type(error).__name__)
        raise ConfigError(
            f"model: {type(module).__name__} cannot be copied ({reason}), and each client trains a copy of its own; "
            "keep what cannot be copied out of its attributes"
        ) from error


def _unwrapped_functorch_tensor(value: Tensor) -> Tensor:
    """Return a plain tensor for one that a pass under torch.func left in an attribute: its value, or 0 if it holds
    values of several clients, which none of them can use."""
    while torch._C._functorch.is_gradtrackingtensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return torch.zeros(()) if torch._C._functorch.is_functorch_wrapped_tensor(value) else value.detach().clone()


def get_named_tensor(module: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer with this dotted name."""
    parent, _, leaf = name.rpartition(".")
    value = getattr(module.get_submodule(parent), leaf)
    assert isinstance(value, Tensor)
    return value


def set_module_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Set these tensors as the module's buffers and frozen parameters."""
    for name, value in tensors.items():
        parent, _, leaf = name.rpartition(".")
        layer = module.get_submodule(parent)
        if leaf in layer._parameters:
            layer._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            setattr(layer, leaf, value)


def refuse_parameter_hooks(module: nn.Module) -> None:
    """Refuse hooks on parameters, since deep copies, and so the models of clients, lack them.

    Raises:
        ConfigError: naming the parameter and what to use instead.
    """
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"model: parameter {name!r} of {type(module).__name__} has a hook, which copies of a module lose; "
                "change gradients by a torch.autograd.Function or a hook on an activation, or in a local "
                "rule"
            )


def storage_key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors that share memory."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or without memory of its own
        return 0
