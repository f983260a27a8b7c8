"""Undo what user code changes outside of its results: globals, class attributes, closures, containers, tensors.

A check that calls user code twice must begin both times where the first call began. Copies of an object do not help
with a module global or a class attribute, which all copies share.

>>> def count(calls=[]):
...     calls.append(1)
...     return len(calls)
>>> rewind = Rewind(count)
>>> count(), count()
(1, 2)
>>> rewind()
>>> count()
1

What an `lru_cache` of a user's function has remembered since is forgotten, with all that it remembered before. Put back
is what `fedsim.core.snapshot` compares, with these limits: tensors and arrays above `LARGE_ARRAY_BYTES`,
slots, iterators and attributes of libraries' classes stay as they are.
"""

from __future__ import annotations

import collections
import functools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.core.snapshot import IGNORED_CLASS_ATTRIBUTES, LARGE_ARRAY_BYTES, SnapshotBuilder, names_in_code

MISSING_ATTRIBUTE = object()
_CACHED_FUNCTION_TYPE = type(functools.lru_cache(len))
RestoreFunction = Callable[[], None]


class Rewind:
    """Stores everything that is reachable from some objects; each call restores it.

    Args:
        *roots: functions, modules or other objects of a user's.
        skipped_types: types whose instances are not looked into.
    """

    def __init__(self, *roots: Any, skipped_types: tuple[type, ...] = ()) -> None:
        self._restore_functions: list[RestoreFunction] = []
        # A reader for each: the root package decides which modules count as the user's.
        self._readers = [SnapshotBuilder(root, skipped_types) for root in roots]
        for reader, root in zip(self._readers, roots, strict=True):
            reader.read(root)  # it keeps references to the objects that it found
            for value in reader.referenced_objects:
                self._restore_functions += _make_restorers(value, reader)

    def __call__(self) -> None:
        """Restore everything."""
        for restore in self._restore_functions:
            restore()


def _make_restorers(value: Any, reader: SnapshotBuilder) -> Iterator[RestoreFunction]:
    """Return functions that restore one object's own state, without following references."""
    if isinstance(value, reader.skipped_types):
        return
    if isinstance(value, Tensor):
        yield from _tensor_restorers(value)
    elif isinstance(value, np.ndarray):
        yield from _array_restorers(value)
    elif isinstance(value, types.FunctionType):
        yield from _function_restorers(value, reader)
    elif isinstance(value, _CACHED_FUNCTION_TYPE):
        function = getattr(value, "__wrapped__", None)
        if isinstance(function, types.FunctionType) and reader.is_user_module(
            function.__module__, function.__code__.co_filename
        ):
            yield _cache_restorer(value)
    elif isinstance(value, type):
        if reader.is_user_class(value):
            yield _class_restorer(value)
    elif isinstance(value, (torch.Generator, random.Random, np.random.Generator)):
        yield _stream_restorer(value)
    else:
        yield from _object_restorers(value)


def _object_restorers(value: Any) -> Iterator[RestoreFunction]:
    """Return functions that restore a container's members or an object's attributes."""
    if isinstance(value, nn.Module):
        yield from (_mapping_restorer(registry) for registry in (value._parameters, value._buffers, value._modules))
    if type(value) in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
        yield _mapping_restorer(value)
    elif type(value) in (list, collections.deque):
        yield _sequence_restorer(value)
    elif type(value) is set:
        yield _set_restorer(value)
    if isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, types.ModuleType):
        yield _mapping_restorer(vars(value))


def _tensor_restorers(value: Tensor) -> Iterator[RestoreFunction]:
    is_plain = value.layout == torch.strided and value.device.type != "meta"
    if not is_plain or value.nbytes > LARGE_ARRAY_BYTES or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return
    saved = value.detach().clone()

    def restore() -> None:
        if value.shape != saved.shape:
            value.data = saved.clone()
        elif not torch.equal(value.detach(), saved):
            value.detach().copy_(saved)

    yield restore


def _array_restorers(value: np.ndarray) -> Iterator[RestoreFunction]:
    if value.nbytes <= LARGE_ARRAY_BYTES and value.flags.writeable:
        saved = value.copy()

        def restore() -> None:
            if not np.array_equal(value, saved):
                value[...] = saved

        yield restore


def _function_restorers(value: types.FunctionType, reader: SnapshotBuilder) -> Iterator[RestoreFunction]:
    for cell in value.__closure__ or ():
        yield _make_cell_restorer(cell)
    yield _mapping_restorer(vars(value))
    if not reader.is_user_module(value.__module__, value.__code__.co_filename):
        return
    global_names = names_in_code(value.__code__)
    yield _namespace_restorers(value.__globals__, global_names)
    for name in global_names & value.__globals__.keys():
        module = value.__globals__[name]
        is_module = isinstance(module, types.ModuleType)
        if is_module and reader.is_user_module(module.__name__, getattr(module, "__file__", None)):
            yield _namespace_restorers(vars(module), global_names)


def _make_cell_restorer(cell: Any) -> RestoreFunction:
    def closure_cell_content() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # an empty cell
            return MISSING_ATTRIBUTE

    saved = closure_cell_content()

    def restore() -> None:
        if closure_cell_content() is not saved:
            if saved is MISSING_ATTRIBUTE:
                del cell.cell_contents
            else:
                cell.cell_contents = saved

    return restore


def _namespace_restorers(namespace: dict[str, Any], names: frozenset[str]) -> RestoreFunction:
    """Return functions that restore the values of some names; a name that had no value is deleted."""
    saved = {name: namespace.get(name, MISSING_ATTRIBUTE) for name in names}

    def restore() -> None:
        for name, value in saved.items():
            if value is MISSING_ATTRIBUTE:
                namespace.pop(name, None)
            elif namespace.get(name, MISSING_ATTRIBUTE) is not value:
                namespace[name] = value

    return restore


def _class_restorer(cls: type) -> RestoreFunction:
    saved = {name: value for name, value in vars(cls).items() if name not in IGNORED_CLASS_ATTRIBUTES}

    def restore() -> None:
        for name in [name for name in vars(cls) if name not in IGNORED_CLASS_ATTRIBUTES and name not in saved]:
            delattr(cls, name)
        for name, value in saved.items():
            if vars(cls).get(name, MISSING_ATTRIBUTE) is not value:
                setattr(cls, name, value)

    return restore


def _mapping_restorer(value: dict[Any, Any]) -> RestoreFunction:
    saved = dict(value)

    def restore() -> None:
        if len(value) != len(saved) or any(
            value.get(key, MISSING_ATTRIBUTE) is not item for key, item in saved.items()
        ):
            value.clear()
            value.update(saved)

    return restore


def _sequence_restorer(value: Any) -> RestoreFunction:
    saved = list(value)

    def restore() -> None:
        if len(value) != len(saved) or any(
            item is not saved_item for item, saved_item in zip(value, saved, strict=True)
        ):
            value.clear()
            value.extend(saved)

    return restore


def _set_restorer(value: set[Any]) -> RestoreFunction:
    saved = set(value)

    def restore() -> None:
        if value != saved:
            value.clear()
            value.update(saved)

    return restore


def _cache_restorer(value: Any) -> RestoreFunction:
    """Return functions that restore a cache whose contents cannot be read or written: it is cleared if a value was
    added."""
    misses = value.cache_info().misses

    def restore() -> None:
        nonlocal misses
        if value.cache_info().misses != misses:
            value.cache_clear()
            misses = 0

    return restore


def _stream_restorer(value: Any) -> RestoreFunction:
    if isinstance(value, torch.Generator):
        tensor_state = value.get_state()
        return lambda: _ignore_result(value.set_state(tensor_state))
    if isinstance(value, random.Random):
        tuple_state = value.getstate()
        return lambda: value.setstate(tuple_state)
    bit_state = value.bit_generator.state
    return lambda: setattr(value.bit_generator, "state", bit_state)


def _ignore_result(_result: Any) -> None:
    """Ignore the result of a call."""
