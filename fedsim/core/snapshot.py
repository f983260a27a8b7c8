"""Deep snapshots: everything that an object can reach, by value, so that any change shows.

>>> class Counter:
...     def __init__(self):
...         self._calls = [0]
>>> counter = Counter()
>>> before = snapshot(counter)
>>> counter._calls[0] += 1
>>> changed(before, snapshot(counter))
['_calls[0]']

A snapshot follows attributes (private ones too), slots, containers, tensors, NumPy arrays, random generators,
iterators, functions with their closures, default arguments and the module globals they refer to, and the classes of
objects. Of libraries it looks at instances only: not at their functions, their classes or their globals. What a
`functools.cached_property` or an `lru_cache` remembers, `Module.training` and locks are left out.

Limits: tensors and arrays above `LARGE_ARRAY_BYTES` are compared by `SAMPLED_ELEMENTS` evenly spaced elements, and
tensors also by PyTorch's version counter, which in-place operations raise; an object in C without attributes that is
not one of the kinds above is compared by its type alone.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import io
import itertools
import logging
import random
import sys
import sysconfig
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LARGE_ARRAY_BYTES = 64 * 2**20  # bytes
SAMPLED_ELEMENTS = 2**16  # elements
MAX_NODES = 1_000_000
LONG_LIST_LENGTH = 256  # lists of numbers with at least this many items are hashed together

PLAIN_TYPES: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), range, slice, type(Ellipsis), Path)
PLAIN_TYPES += (torch.dtype, torch.device, torch.Size, torch.layout, np.dtype, np.generic, types.CodeType)
OPAQUE_TYPES = (logging.Logger, logging.Handler, weakref.ref, types.FrameType, types.TracebackType)
PICKLABLE_MODULES = {"builtins", "itertools", "collections", "_collections", "datetime", "decimal", "fractions"}
LIBRARY_PACKAGES = {
    "fedsim",
    "torch",
    "torchvision",
    "numpy",
    "scipy",
    "sklearn",
    "pandas",
    "transformers",
    "peft",
    "timm",
}
SYSTEM_PATHS = {Path(path).resolve() for path in sysconfig.get_paths().values()}
IGNORED_CLASS_ATTRIBUTES = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__qualname__",
    "__annotations__",
    "__parameters__",
}
IGNORED_CLASS_ATTRIBUTES |= {"__abstractmethods__", "_abc_impl", "__slots__", "__match_args__", "__dataclass_params__"}
IGNORED_CLASS_ATTRIBUTES |= {"__dataclass_fields__", "__orig_bases__", "__firstlineno__", "__static_attributes__"}


class SnapshotNode:
    """One object in a snapshot: its type, a value that can be compared, and the objects that it refers to.

    `children` are by label; a label that begins with a space is a place of its own, such as a global, and not a part of
    the path to it.
    """

    __slots__ = ("children", "kind", "value")

    def __init__(self, kind: str, value: Any = None) -> None:
        self.kind, self.value = kind, value
        self.children: dict[str, SnapshotNode] = {}


def snapshot(root: Any, skipped_types: tuple[type, ...] = ()) -> SnapshotNode:
    """Return everything that can be reached from `root`, by value.

    Args:
        root: any object; an `nn.Module`, a function, a list of several.
        skipped_types: types whose instances are not looked into, such as data sets that are known to be left alone.

    Returns:
        A structure for `differing_paths`, which shares nothing with `root` and may be compared after it has been
            written to.
    """
    return SnapshotBuilder(root, skipped_types).read(root)


def differing_paths(snapshot_before: SnapshotNode, snapshot_after: SnapshotNode) -> list[str]:
    """Return where two snapshots of one object differ, as paths such as `state['x'][0]`, in order; empty if they agree.

    Whether two references lead to one object or to two with equal values makes no difference.
    """
    changed_paths: list[str] = []
    compared_pairs: set[tuple[int, int]] = set()
    pending_pairs: list[tuple[Any, SnapshotNode | None, SnapshotNode | None]] = [
        (None, snapshot_before, snapshot_after)
    ]  # with linked labels, the last first
    while pending_pairs:
        path, before_node, after_node = pending_pairs.pop()
        if (
            before_node is None
            or after_node is None
            or before_node.kind != after_node.kind
            or before_node.value != after_node.value
        ):
            changed_paths.append(_attribute_path_text(path))
            continue
        if before_node is after_node or (id(before_node), id(after_node)) in compared_pairs:
            continue
        compared_pairs.add((id(before_node), id(after_node)))
        labels = [*before_node.children, *(label for label in after_node.children if label not in before_node.children)]
        for label in reversed(labels):
            pending_pairs.append(((label, path), before_node.children.get(label), after_node.children.get(label)))
    return list(dict.fromkeys(changed_paths))


def enlarged_counter(value: Any) -> Any:
    """Return a number or an array as if it had counted a thousand times as long; None for other values."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor, np.ndarray)):
        return None
    if isinstance(value, (Tensor, np.ndarray)) and value.dtype in (torch.bool, np.bool_):
        return None
    return value * 1000 + 1000


def snapshot_key(node: SnapshotNode) -> Hashable:
    """Return a snapshot as a dictionary key, by which equal snapshots are found again within a process."""
    node_numbers: dict[int, int] = {id(node): 0}
    rows: list[Hashable] = []
    pending_nodes = [node]
    while pending_nodes:
        parent_node = pending_nodes.pop()
        children = []
        for label, child in parent_node.children.items():
            if id(child) not in node_numbers:
                node_numbers[id(child)] = len(node_numbers)
                pending_nodes.append(child)
            children.append((label, node_numbers[id(child)]))
        rows.append((node_numbers[id(parent_node)], parent_node.kind, parent_node.value, tuple(children)))
    return tuple(rows)


def _attribute_path_text(path: Any) -> str:
    """Return linked labels as a path, from the last named place on."""
    path_labels: list[str] = []
    while path is not None:
        label, path = path
        path_labels.append(label)
        if label.startswith(" "):
            break
    return "".join(reversed(path_labels)).lstrip(" .")


class SnapshotBuilder:
    """Reads one snapshot. Objects are visited once, from a stack, so that depth and cycles are no problem."""

    def __init__(self, root: Any, skipped_types: tuple[type, ...]) -> None:
        self.skipped_types = (*OPAQUE_TYPES, *skipped_types)
        package = (getattr(type(root), "__module__", "") or "").partition(".")[0]
        self.packages = {package} - LIBRARY_PACKAGES - sys.stdlib_module_names if package != "builtins" else set()
        self.nodes: dict[int, SnapshotNode] = {}
        self.referenced_objects: list[Any] = []  # an id is unique as long as the object exists
        self.pending_nodes: list[tuple[Any, SnapshotNode]] = []

    def read(self, root: Any) -> SnapshotNode:
        node = self.node_of(root)
        while self.pending_nodes and len(self.nodes) < MAX_NODES:
            self.read_child_nodes(*self.pending_nodes.pop())
        return node

    def node_of(self, value: Any) -> SnapshotNode:
        """Return the node of an object, whose children are read later, once."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, PLAIN_TYPES):
            return SnapshotNode(kind, _comparable_value(value))
        if id(value) in self.nodes:
            return self.nodes[id(value)]
        node = self.nodes[id(value)] = SnapshotNode(kind)
        self.referenced_objects.append(value)
        if not isinstance(value, self.skipped_types):
            self.pending_nodes.append((value, node))
        return node

    def read_child_nodes(self, value: Any, node: SnapshotNode) -> None:
        """Read the children of an object by the first kind that it belongs to."""
        for kind, read_method in READ_METHOD_BY_TYPE:
            if isinstance(value, kind):
                read_method(self, value, node)
                return
        self.record_object(value, node)

    def add_child(self, node: SnapshotNode, label: str, value: Any) -> None:
        node.children[label] = self.node_of(value)

    def snapshot_tensor(self, value: Tensor, node: SnapshotNode) -> None:
        node.value = _tensor_fingerprint(value)
        self.read_attributes(value, node)
        if value.is_leaf and value.grad is not None:
            self.add_child(node, ".grad", value.grad)

    def read_array(self, value: np.ndarray, node: SnapshotNode) -> None:
        if value.dtype.hasobject:
            node.value = value.shape
            for number, item in enumerate(value.reshape(-1)):
                self.add_child(node, f"[{number}]", item)
            return
        node.value = (value.shape, value.dtype.str, _digest(value))

    def record_mapping(self, value: Mapping[Any, Any], node: SnapshotNode) -> None:
        keys = list(value)
        if all(isinstance(key, PLAIN_TYPES) for key in keys):
            for key in sorted(keys, key=repr):
                self.add_child(node, f"[{key!r}]", value[key])
        else:
            for number, key in enumerate(keys):
                self.add_child(node, f".keys[{number}]", key)
                self.add_child(node, f"[{number}]", value[key])
        self.read_attributes(value, node)

    def read_sequence(self, value: Sequence[Any], node: SnapshotNode) -> None:
        elements = list(value)
        if len(elements) >= LONG_LIST_LENGTH and all(type(item) in (int, float, bool, str) for item in elements):
            node.value = (len(elements), hashlib.blake2b(repr(elements).encode(), digest_size=16).digest())
        else:
            for number, item in enumerate(elements):
                self.add_child(node, f"[{number}]", item)
        self.read_attributes(value, node)

    def record_set(self, value: Set[Any], node: SnapshotNode) -> None:
        if all(isinstance(item, PLAIN_TYPES) for item in value):
            node.value = frozenset((type(item).__qualname__, _comparable_value(item)) for item in value)
        else:
            node.value = len(value)  # for items that cannot be ordered, only their number

    def snapshot_function(self, value: types.FunctionType, node: SnapshotNode) -> None:
        node.value = value.__code__
        self.read_closure(value, node)
        self.read_attributes(value, node)
        if self.is_user_module(value.__module__, value.__code__.co_filename):
            self.snapshot_globals(value, node)

    def read_closure(self, value: types.FunctionType, node: SnapshotNode) -> None:
        """Read the values in a function's closure, and its default arguments."""
        for variable_name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                self.add_child(node, f" {variable_name!r} in the closure of {value.__name__}", cell.cell_contents)
        defaults = dict(value.__kwdefaults__ or {})
        names = value.__code__.co_varnames[: value.__code__.co_argcount]
        if value.__defaults__:
            defaults |= dict(zip(names[-len(value.__defaults__) :], value.__defaults__, strict=False))
        for variable_name, default in defaults.items():
            self.add_child(node, f" default argument {variable_name!r} of {value.__name__}", default)

    def snapshot_globals(self, value: types.FunctionType, node: SnapshotNode) -> None:
        """Read the globals that a function names, and of user modules the attributes that it names."""
        global_names = names_in_code(value.__code__)
        for global_name in sorted(global_names & value.__globals__.keys()):
            global_value = value.__globals__[global_name]
            if not isinstance(global_value, types.ModuleType):
                self.add_child(node, f" global {global_name!r}", global_value)
            elif self.is_user_module(global_value.__name__, getattr(global_value, "__file__", None)):
                for attribute in sorted(global_names & vars(global_value).keys()):
                    if not isinstance(vars(global_value)[attribute], types.ModuleType):
                        self.add_child(node, f" global {global_name}.{attribute}", vars(global_value)[attribute])

    def read_bound_method(self, value: types.MethodType, node: SnapshotNode) -> None:
        self.add_child(node, ".__func__", value.__func__)
        self.add_child(node, "", value.__self__)

    def record_partial(self, value: functools.partial[Any], node: SnapshotNode) -> None:
        for name in ("func", "args", "keywords"):
            self.add_child(node, f".{name}", getattr(value, name))
        self.read_attributes(value, node)

    def snapshot_wrapped_function(self, value: Any, node: SnapshotNode) -> None:
        """Read the function inside a cached function, a property, a class method or a static method."""
        for name in ("__wrapped__", "__func__", "fget", "fset", "func"):
            function = getattr(value, name, None)
            if callable(function):
                self.add_child(node, f".{name}", function)

    def snapshot_user_class(self, value: type, node: SnapshotNode) -> None:
        """Read a user's class: its attributes and methods, and those of its user-defined bases."""
        node.value = value
        for base_class in value.__mro__:
            if base_class.__module__ == "builtins" or not self.is_user_class(base_class):
                continue
            for name, attribute in vars(base_class).items():
                slot = isinstance(attribute, (types.MemberDescriptorType, types.GetSetDescriptorType))
                if name not in IGNORED_CLASS_ATTRIBUTES and not slot:
                    self.add_child(node, f" {base_class.__name__}.{name}", attribute)

    def read_generator_frame(self, value: types.GeneratorType[Any, Any, Any], node: SnapshotNode) -> None:
        frame = value.gi_frame
        node.value = None if frame is None else frame.f_lasti
        for name, local in (frame.f_locals if frame is not None else {}).items():
            self.add_child(node, f".{name}", local)

    def read_random_generator(self, value: Any, node: SnapshotNode) -> None:
        """Read the state of a generator of random numbers."""
        if isinstance(value, torch.Generator):
            self.add_child(node, ".state", value.get_state())
        elif isinstance(value, random.Random):
            self.add_child(node, ".state", value.getstate())
        elif isinstance(value, np.random.Generator):
            self.add_child(node, ".state", value.bit_generator)
        elif isinstance(value, np.random.RandomState):
            self.add_child(node, ".state", value.get_state(legacy=False))
        else:
            self.add_child(node, ".state", value.state)

    def snapshot_file_position(self, value: io.IOBase, node: SnapshotNode) -> None:
        with contextlib.suppress(Exception):
            node.value = value.tell()

    def read_iterator(self, value: Iterator[Any], node: SnapshotNode) -> None:
        """Read the position of an iterator implemented in C from its pickled form."""
        if type(value).__module__ not in PICKLABLE_MODULES:
            self.record_object(value, node)
            return
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            pickle_state = value.__reduce__()
            for number, item in enumerate(pickle_state[1:] if isinstance(pickle_state, tuple) else (pickle_state,)):
                self.add_child(node, f".{number}", item)

    def snapshot_module(self, value: nn.Module, node: SnapshotNode) -> None:
        """Read parameters, buffers and submodules by name, and all other attributes."""
        registries = ("_parameters", "_buffers", "_modules")
        for registry in registries:
            for name, member in getattr(value, registry).items():
                self.add_child(node, f".{name}", member)
        self.read_attributes(value, node, {*registries, "training"})
        self.record_class(value, node)

    def record_object(self, value: Any, node: SnapshotNode) -> None:
        """Read an object by its attributes or, if it has none and its type is a plain one, by its pickled form."""
        if type(value).__module__ in PICKLABLE_MODULES and not hasattr(value, "__dict__"):
            with contextlib.suppress(Exception):
                node.value = repr(value) if " at 0x" not in repr(value) else None
        self.read_attributes(value, node)
        self.record_class(value, node)

    def read_attributes(self, value: Any, node: SnapshotNode, skipped_names: Iterable[str] = ()) -> None:
        kind: Any = type(value)
        cached_names, slots = _cached_property_and_slot_names(kind)
        instance_dict, excluded = getattr(value, "__dict__", {}), cached_names.union(skipped_names)
        for name in sorted(name for name in instance_dict if isinstance(name, str) and name not in excluded):
            self.add_child(node, f".{name}", instance_dict[name])
        for name, mangled in slots:
            with contextlib.suppress(AttributeError):
                self.add_child(node, f".{name}", getattr(value, mangled))

    def record_class(self, value: Any, node: SnapshotNode) -> None:
        """Classes of libraries are not read; a user's class that derives from one is."""
        self.add_child(node, " class", type(value))

    def is_user_class(self, cls: type) -> bool:
        """Return whether a class belongs to a user's module, or was made by a call of `type` with user-defined
        methods."""
        module = sys.modules.get(cls.__module__)
        if self.is_user_module(cls.__module__, getattr(module, "__file__", None)):
            return True
        methods = [value for value in vars(cls).values() if isinstance(value, types.FunctionType)]
        return cls.__module__ == "abc" and any(
            self.is_user_module(m.__module__, m.__code__.co_filename) for m in methods
        )

    def is_user_module(self, module: str | None, file_path: str | None) -> bool:
        """Return whether a module belongs to the user and not to a library."""
        package = (module or "").partition(".")[0]
        if package in self.packages or package == "__main__":
            return True
        if package in LIBRARY_PACKAGES or package in sys.stdlib_module_names:
            return False
        return not is_library_file(file_path)


@functools.lru_cache(4096)
def is_library_file(file: str | None) -> bool:
    if file is None:
        return False
    if file.startswith("<"):  # code that was typed in or executed from a string
        return file.startswith("<frozen")
    path = Path(file).resolve()
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return True
    return not SYSTEM_PATHS.isdisjoint(path.parents)


@functools.lru_cache(4096)
def _cached_property_and_slot_names(kind: Any) -> tuple[frozenset[str], tuple[tuple[str, str], ...]]:
    """Return the names of a class's cached properties, and its slots, as written and as looked up."""
    cached_names: list[str] = []
    slot_names: list[tuple[str, str]] = []
    for base_class in kind.__mro__:
        cached_names += [name for name, v in vars(base_class).items() if isinstance(v, functools.cached_property)]
        names = vars(base_class).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            if name not in ("__dict__", "__weakref__"):
                slot_names.append((name, f"_{base_class.__name__.lstrip('_')}{name}" if private else name))
    return frozenset(cached_names), tuple(slot_names)


@functools.lru_cache(4096)
def names_in_code(code: types.CodeType) -> frozenset[str]:
    """Return the names that a function's code refers to, nested functions included."""
    nested_names = (names_in_code(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*nested_names)


def _comparable_value(value: Any) -> Any:
    """Return a value that equals itself, which NaN does not, and distinguishes 1, 1.0 and True."""
    if isinstance(value, (float, complex, np.generic)):
        return repr(value)
    return (type(value).__qualname__, str(value)) if isinstance(value, (slice, Path)) else value


def _digest(array: np.ndarray) -> bytes:
    if array.nbytes > LARGE_ARRAY_BYTES:
        array = array.reshape(-1)[:: -(-array.size // SAMPLED_ELEMENTS)]
    data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else b""
    return hashlib.blake2b(data, digest_size=16).digest()


def _tensor_fingerprint(value: Tensor) -> Any:
    """Return shape, type and a digest of the values; for a large tensor also how often it was written to in place."""
    tensor_metadata = (tuple(value.shape), value.dtype, str(value.device), value.requires_grad, value.layout)
    if value.device.type == "meta" or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return tensor_metadata
    value = value.detach()
    if value.layout != torch.strided:
        return (
            tensor_metadata,
            tuple(_tensor_fingerprint(component) for component in _strided_components(value)),
            value._version,
        )
    times = None
    if value.numel() * value.element_size() > LARGE_ARRAY_BYTES:
        times = value._version
        value = value.reshape(-1)[:: -(-value.numel() // SAMPLED_ELEMENTS)]
    if value.is_quantized:
        value = value.int_repr()
    value = value.resolve_conj().resolve_neg().cpu().contiguous()
    return tensor_metadata, _digest(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else b"", times


def _strided_components(value: Tensor) -> tuple[Tensor, ...]:
    if value.layout == torch.sparse_coo:
        value = value.coalesce()
        return value.indices(), value.values()
    return (value.to_dense(),)


RANDOM_GENERATOR_TYPES = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
)
FUNCTION_WRAPPER_TYPES = (
    property,
    staticmethod,
    classmethod,
    functools.cached_property,
    type(functools.lru_cache(len)),
)
ITERATOR_TYPES = (itertools.count, itertools.cycle, itertools.repeat, itertools.chain, itertools.islice)

READ_METHOD_BY_TYPE: list[tuple[Any, Callable[[SnapshotBuilder, Any, SnapshotNode], None]]] = [
    (Tensor, SnapshotBuilder.snapshot_tensor),
    (np.ndarray, SnapshotBuilder.read_array),
    (nn.Module, SnapshotBuilder.snapshot_module),
    (type, SnapshotBuilder.snapshot_user_class),
    (types.ModuleType, lambda reader, value, node: None),
    (types.FunctionType, SnapshotBuilder.snapshot_function),
    (types.MethodType, SnapshotBuilder.read_bound_method),
    (functools.partial, SnapshotBuilder.record_partial),
    (FUNCTION_WRAPPER_TYPES, SnapshotBuilder.snapshot_wrapped_function),
    (types.GeneratorType, SnapshotBuilder.read_generator_frame),
    (RANDOM_GENERATOR_TYPES, SnapshotBuilder.read_random_generator),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), lambda reader, value, node: None),
    (Mapping, SnapshotBuilder.record_mapping),
    ((list, tuple, collections.deque), SnapshotBuilder.read_sequence),
    ((set, frozenset), SnapshotBuilder.record_set),
    (io.IOBase, SnapshotBuilder.snapshot_file_position),
    (ITERATOR_TYPES, SnapshotBuilder.read_iterator),
    (Iterator, SnapshotBuilder.read_iterator),
]
