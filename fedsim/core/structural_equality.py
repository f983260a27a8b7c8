"""Structural equality of objects: by their content, not by identity."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ComparedPairs = set[tuple[int, int]]
PLAIN_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    np.dtype,
    range,
)


def structurally_equal(
    first_value: Any,
    second_value: Any,
    skipped_names: frozenset[str] = frozenset(),
    compared_pairs: ComparedPairs | None = None,
) -> bool:
    """Return whether two objects behave the same, by their content; False in doubt.

    Args:
        first_value, second_value: anything: numbers, tensors, containers, functions with what they close over, objects,
            modules.
        skipped_names: names of attributes of the two objects themselves that may differ.
        compared_pairs: pairs that are being compared, which are alike unless something else tells them apart.
    """
    if first_value is second_value:
        return True
    if type(first_value) is not type(second_value):
        return False
    compared_pairs = set() if compared_pairs is None else compared_pairs
    pair = (id(first_value), id(second_value))
    if pair in compared_pairs:
        return True
    compared_pairs.add(pair)
    nested_equal = functools.partial(structurally_equal, compared_pairs=compared_pairs)
    if isinstance(first_value, PLAIN_TYPES):
        return bool(first_value == second_value or (first_value != first_value and second_value != second_value))
    if isinstance(first_value, nn.Module):
        return _equal_except_trained(first_value, second_value, nested_equal)
    for kind, compare in COMPARISON_BY_TYPE.items():
        if isinstance(first_value, kind):
            return bool(compare(first_value, second_value, nested_equal))
    return _objects_equal(first_value, second_value, skipped_names, nested_equal)


def _tensors_equal(first_value: Tensor, second_value: Tensor) -> bool:
    of_one, of_other = ((t.dtype, t.device, t.shape, t.requires_grad) for t in (first_value, second_value))
    return of_one == of_other and torch.equal(first_value, second_value)


def _ordered_mappings_equal(
    first_value: Mapping[Any, Any], second_value: Mapping[Any, Any], values_equal: Callable[..., bool]
) -> bool:
    return list(first_value) == list(second_value) and all(
        values_equal(first_value[key], second_value[key]) for key in first_value
    )


def _functions_equal(
    first_value: types.FunctionType, second_value: types.FunctionType, values_equal: Callable[..., bool]
) -> bool:
    if first_value.__code__ is not second_value.__code__ or first_value.__globals__ is not second_value.__globals__:
        return False
    cells = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (first_value, second_value)]
    return values_equal(cells[0], cells[1]) and values_equal(
        (first_value.__defaults__, first_value.__kwdefaults__), (second_value.__defaults__, second_value.__kwdefaults__)
    )


def _equal_except_trained(first_value: nn.Module, second_value: nn.Module, values_equal: Callable[..., bool]) -> bool:
    """Return whether two modules differ only in the values of trained tensors."""
    for parameter_name, parameter in first_value.named_parameters(recurse=False):
        second_parameter = second_value._parameters.get(parameter_name)
        if second_parameter is None or (parameter.shape, parameter.dtype) != (
            second_parameter.shape,
            second_parameter.dtype,
        ):
            return False
        if parameter.requires_grad != second_parameter.requires_grad:
            return False
        if not parameter.requires_grad and not torch.equal(parameter, second_parameter):
            return False
    attributes, other_attributes = (
        {k: v for k, v in module.__dict__.items() if k != "_parameters"} for module in (first_value, second_value)
    )
    hook_dicts = [
        hooks_name
        for hooks_name in attributes
        if hooks_name.endswith("_hooks") and isinstance(attributes[hooks_name], dict)
    ]
    equal_hooks = all(
        values_equal(list(attributes.pop(hooks_name).values()), list(other_attributes.pop(hooks_name, {}).values()))
        for hooks_name in hook_dicts
    )
    return (
        equal_hooks
        and list(first_value._parameters) == list(second_value._parameters)
        and _ordered_mappings_equal(attributes, other_attributes, values_equal)
    )


def _objects_equal(
    first_value: Any, second_value: Any, skipped_names: frozenset[str], values_equal: Callable[..., bool]
) -> bool:
    """Compare two objects by their attributes; cached values of properties are ignored."""
    kinds = type(first_value).__mro__
    slots = [name for kind in kinds for name in _slot_names(kind)]
    if not hasattr(first_value, "__dict__") and not slots:
        return False
    cached_property_type = functools.cached_property
    excluded = skipped_names | {
        name for kind in kinds for name, value in vars(kind).items() if isinstance(value, cached_property_type)
    }
    attributes, other_attributes = (
        {name: value for name, value in getattr(component, "__dict__", {}).items() if name not in excluded}
        | {name: getattr(component, name, None) for name in slots if name not in excluded}
        for component in (first_value, second_value)
    )
    return attributes.keys() == other_attributes.keys() and all(
        values_equal(attributes[name], other_attributes[name]) for name in attributes
    )


def _slot_names(kind: type) -> list[str]:
    """Return the names of a class's own slots."""
    names = kind.__dict__.get("__slots__", ())
    return [name for name in ([names] if isinstance(names, str) else names) if not name.startswith("__")]


COMPARISON_BY_TYPE: dict[type | tuple[type, ...], Callable[..., bool]] = {
    Tensor: lambda first, second, equal: _tensors_equal(first, second),
    np.ndarray: lambda first, second, equal: first.dtype == second.dtype and np.array_equal(first, second),
    np.generic: lambda first, second, equal: bool(first == second),
    Mapping: _ordered_mappings_equal,
    (list, tuple): lambda first, second, equal: len(first) == len(second) and all(map(equal, first, second)),
    Set: lambda first, second, equal: first == second,
    types.FunctionType: _functions_equal,
    types.MethodType: lambda first, second, equal: (
        first.__func__ is second.__func__ and equal(first.__self__, second.__self__)
    ),
    functools.partial: lambda first, second, equal: equal(
        (first.func, first.args, first.keywords), (second.func, second.args, second.keywords)
    ),
    type: lambda first, second, equal: False,
    types.ModuleType: lambda first, second, equal: False,
}
