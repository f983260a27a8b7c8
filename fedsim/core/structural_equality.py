"""Are two objects the same all the way down? By what they hold, not by who they are."""

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
    first: Any, second: Any, skipped_names: frozenset[str] = frozenset(), compared_pairs: ComparedPairs | None = None
) -> bool:
    """Would whatever these two do be the same? In doubt they are not.

    Args:
        first, second: anything: numbers, tensors, containers, functions with what they close over, objects, modules.
        skipped_names: names of attributes of the two objects themselves that may differ.
        compared_pairs: pairs that are being compared, which are alike unless something else tells them apart.
    """
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    compared_pairs = set() if compared_pairs is None else compared_pairs
    pair = (id(first), id(second))
    if pair in compared_pairs:
        return True
    compared_pairs.add(pair)
    nested_equal = functools.partial(structurally_equal, compared_pairs=compared_pairs)
    if isinstance(first, PLAIN_TYPES):
        return bool(first == second or (first != first and second != second))
    if isinstance(first, nn.Module):
        return _modules(first, second, nested_equal)
    for kind, compare in COMPARISON_BY_TYPE.items():
        if isinstance(first, kind):
            return bool(compare(first, second, nested_equal))
    return _objects(first, second, skipped_names, nested_equal)


def _tensors(first: Tensor, second: Tensor) -> bool:
    of_one, of_other = ((t.dtype, t.device, t.shape, t.requires_grad) for t in (first, second))
    return of_one == of_other and torch.equal(first, second)


def _ordered_mappings_equal(first: Mapping[Any, Any], second: Mapping[Any, Any], equal: Callable[..., bool]) -> bool:
    return list(first) == list(second) and all(equal(first[key], second[key]) for key in first)


def _functions_equal(first: types.FunctionType, second: types.FunctionType, equal: Callable[..., bool]) -> bool:
    if first.__code__ is not second.__code__ or first.__globals__ is not second.__globals__:
        return False
    cells = [[cell.cell_contents for cell in of.__closure__ or ()] for of in (first, second)]
    return equal(cells[0], cells[1]) and equal(
        (first.__defaults__, first.__kwdefaults__), (second.__defaults__, second.__kwdefaults__)
    )


def _modules(first: nn.Module, second: nn.Module, equal: Callable[..., bool]) -> bool:
    """Modules that differ in nothing but the values of what they train."""
    for name, parameter in first.named_parameters(recurse=False):
        second_parameter = second._parameters.get(name)
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
        {k: v for k, v in of.__dict__.items() if k != "_parameters"} for of in (first, second)
    )
    hooks = [name for name in attributes if name.endswith("_hooks") and isinstance(attributes[name], dict)]
    equal_hooks = all(
        equal(list(attributes.pop(name).values()), list(other_attributes.pop(name, {}).values())) for name in hooks
    )
    return (
        equal_hooks
        and list(first._parameters) == list(second._parameters)
        and _ordered_mappings_equal(attributes, other_attributes, equal)
    )


def _objects(first: Any, second: Any, skipped_names: frozenset[str], equal: Callable[..., bool]) -> bool:
    """By their attributes; what a property remembers of them is no attribute of their own."""
    kinds = type(first).__mro__
    slots = [name for kind in kinds for name in _slots(kind)]
    if not hasattr(first, "__dict__") and not slots:
        return False
    remembered = functools.cached_property
    excluded = skipped_names | {
        name for kind in kinds for name, value in vars(kind).items() if isinstance(value, remembered)
    }
    attributes, other_attributes = (
        {name: value for name, value in getattr(of, "__dict__", {}).items() if name not in excluded}
        | {name: getattr(of, name, None) for name in slots if name not in excluded}
        for of in (first, second)
    )
    return attributes.keys() == other_attributes.keys() and all(
        equal(attributes[name], other_attributes[name]) for name in attributes
    )


def _slots(kind: type) -> list[str]:
    """Names of the attributes for which a class itself has slots."""
    names = kind.__dict__.get("__slots__", ())
    return [name for name in ([names] if isinstance(names, str) else names) if not name.startswith("__")]


COMPARISON_BY_TYPE: dict[type | tuple[type, ...], Callable[..., bool]] = {
    Tensor: lambda first, second, equal: _tensors(first, second),
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
