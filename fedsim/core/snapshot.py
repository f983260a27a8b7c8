"""Deep snapshots: everything that an object can reach, by value, so that a change shows whatever holds it.

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
LONG_LIST_LENGTH = 256  # items of a list of numbers, from which on they are hashed together

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


class Node:
    """What a snapshot knows of one object: its type, a value that can be compared, and what it refers to.

    `children` are by label; a label that begins with a space is a place of its own, such as a global, and not a part of
    the path to it.
    """

    __slots__ = ("children", "kind", "value")

    def __init__(self, kind: str, value: Any = None) -> None:
        self.kind, self.value = kind, value
        self.children: dict[str, Node] = {}


def snapshot(root: Any, skip: tuple[type, ...] = ()) -> Node:
    """Everything that can be reached from `root`, by value.

    Args:
        root: any object; an `nn.Module`, a function, a list of several.
        skip: types whose instances are not looked into, such as data sets that are known to be left alone.

    Returns:
        A structure for `differing_paths`, which shares nothing with `root` and may be compared after it has been
            written to.
    """
    return Reader(root, skip).read(root)


def differing_paths(before: Node, after: Node) -> list[str]:
    """Where two snapshots of one object differ, as paths such as `state['x'][0]`, in order; none where they agree.

    Whether two references lead to one object or to two with equal values makes no difference.
    """
    changed_paths: list[str] = []
    compared_pairs: set[tuple[int, int]] = set()
    waiting: list[tuple[Any, Node | None, Node | None]] = [(None, before, after)]  # with linked labels, the last first
    while waiting:
        path, before_node, after_node = waiting.pop()
        if (
            before_node is None
            or after_node is None
            or before_node.kind != after_node.kind
            or before_node.value != after_node.value
        ):
            changed_paths.append(_path_text(path))
            continue
        if before_node is after_node or (id(before_node), id(after_node)) in compared_pairs:
            continue
        compared_pairs.add((id(before_node), id(after_node)))
        labels = [*before_node.children, *(label for label in after_node.children if label not in before_node.children)]
        for label in reversed(labels):
            waiting.append(((label, path), before_node.children.get(label), after_node.children.get(label)))
    return list(dict.fromkeys(changed_paths))


def enlarged_counter(value: Any) -> Any:
    """A number or an array that has counted a thousand times as long; None of anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor, np.ndarray)):
        return None
    if isinstance(value, (Tensor, np.ndarray)) and value.dtype in (torch.bool, np.bool_):
        return None
    return value * 1000 + 1000


def snapshot_key(node: Node) -> Hashable:
    """A snapshot as a key of dictionaries, by which equal ones are known again within a process."""
    numbers: dict[int, int] = {id(node): 0}
    rows: list[Hashable] = []
    waiting = [node]
    while waiting:
        parent = waiting.pop()
        children = []
        for label, child in parent.children.items():
            if id(child) not in numbers:
                numbers[id(child)] = len(numbers)
                waiting.append(child)
            children.append((label, numbers[id(child)]))
        rows.append((numbers[id(parent)], parent.kind, parent.value, tuple(children)))
    return tuple(rows)


def _path_text(path: Any) -> str:
    """Linked labels as a path, from the last place of its own on."""
    labels: list[str] = []
    while path is not None:
        label, path = path
        labels.append(label)
        if label.startswith(" "):
            break
    return "".join(reversed(labels)).lstrip(" .")


class Reader:
    """Reads one snapshot: objects are looked at once, from a stack, so that depth and cycles do no harm."""

    def __init__(self, root: Any, skip: tuple[type, ...]) -> None:
        self.skip = (*OPAQUE_TYPES, *skip)
        package = (getattr(type(root), "__module__", "") or "").partition(".")[0]
        self.packages = {package} - LIBRARY_PACKAGES - sys.stdlib_module_names if package != "builtins" else set()
        self.nodes: dict[int, Node] = {}
        self.kept_objects: list[Any] = []  # an id stays an object's own as long as the object lives
        self.waiting: list[tuple[Any, Node]] = []

    def read(self, root: Any) -> Node:
        node = self.node(root)
        while self.waiting and len(self.nodes) < MAX_NODES:
            self.expand(*self.waiting.pop())
        return node

    def node(self, value: Any) -> Node:
        """The node of an object, which is looked into later, once."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, PLAIN_TYPES):
            return Node(kind, _plain_value(value))
        if id(value) in self.nodes:
            return self.nodes[id(value)]
        node = self.nodes[id(value)] = Node(kind)
        self.kept_objects.append(value)
        if not isinstance(value, self.skip):
            self.waiting.append((value, node))
        return node

    def expand(self, value: Any, node: Node) -> None:
        """Look into an object: the first kind that it is of says how."""
        for kind, read_method in READ_METHOD_BY_TYPE:
            if isinstance(value, kind):
                read_method(self, value, node)
                return
        self.object(value, node)

    def add(self, node: Node, label: str, value: Any) -> None:
        node.children[label] = self.node(value)

    def tensor(self, value: Tensor, node: Node) -> None:
        node.value = _tensor(value)
        self.attributes(value, node)
        if value.is_leaf and value.grad is not None:
            self.add(node, ".grad", value.grad)

    def array(self, value: np.ndarray, node: Node) -> None:
        if value.dtype.hasobject:
            node.value = value.shape
            for number, item in enumerate(value.reshape(-1)):
                self.add(node, f"[{number}]", item)
            return
        node.value = (value.shape, value.dtype.str, _digest(value))

    def mapping(self, value: Mapping[Any, Any], node: Node) -> None:
        keys = list(value)
        if all(isinstance(key, PLAIN_TYPES) for key in keys):
            for key in sorted(keys, key=repr):
                self.add(node, f"[{key!r}]", value[key])
        else:
            for number, key in enumerate(keys):
                self.add(node, f".keys[{number}]", key)
                self.add(node, f"[{number}]", value[key])
        self.attributes(value, node)

    def sequence(self, value: Sequence[Any], node: Node) -> None:
        items = list(value)
        if len(items) >= LONG_LIST_LENGTH and all(type(item) in (int, float, bool, str) for item in items):
            node.value = (len(items), hashlib.blake2b(repr(items).encode(), digest_size=16).digest())
        else:
            for number, item in enumerate(items):
                self.add(node, f"[{number}]", item)
        self.attributes(value, node)

    def set(self, value: Set[Any], node: Node) -> None:
        if all(isinstance(item, PLAIN_TYPES) for item in value):
            node.value = frozenset((type(item).__qualname__, _plain_value(item)) for item in value)
        else:
            node.value = len(value)  # of what cannot be ordered, the number

    def function(self, value: types.FunctionType, node: Node) -> None:
        node.value = value.__code__
        self.closure(value, node)
        self.attributes(value, node)
        if self.is_user_module(value.__module__, value.__code__.co_filename):
            self.globals(value, node)

    def closure(self, value: types.FunctionType, node: Node) -> None:
        """What a function closes over, and its default arguments."""
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                self.add(node, f" {name!r} in the closure of {value.__name__}", cell.cell_contents)
        defaults = dict(value.__kwdefaults__ or {})
        names = value.__code__.co_varnames[: value.__code__.co_argcount]
        if value.__defaults__:
            defaults |= dict(zip(names[-len(value.__defaults__) :], value.__defaults__, strict=False))
        for name, default in defaults.items():
            self.add(node, f" default argument {name!r} of {value.__name__}", default)

    def globals(self, value: types.FunctionType, node: Node) -> None:
        """The globals that a function names, and of modules of the user's the attributes that it names."""
        names = names_in(value.__code__)
        for name in sorted(names & value.__globals__.keys()):
            global_value = value.__globals__[name]
            if not isinstance(global_value, types.ModuleType):
                self.add(node, f" global {name!r}", global_value)
            elif self.is_user_module(global_value.__name__, getattr(global_value, "__file__", None)):
                for attribute in sorted(names & vars(global_value).keys()):
                    if not isinstance(vars(global_value)[attribute], types.ModuleType):
                        self.add(node, f" global {name}.{attribute}", vars(global_value)[attribute])

    def method(self, value: types.MethodType, node: Node) -> None:
        self.add(node, ".__func__", value.__func__)
        self.add(node, "", value.__self__)

    def partial(self, value: functools.partial[Any], node: Node) -> None:
        for name in ("func", "args", "keywords"):
            self.add(node, f".{name}", getattr(value, name))
        self.attributes(value, node)

    def wrapper(self, value: Any, node: Node) -> None:
        """A cached function, a property, a class or static method: the function inside."""
        for name in ("__wrapped__", "__func__", "fget", "fset", "func"):
            function = getattr(value, name, None)
            if callable(function):
                self.add(node, f".{name}", function)

    def user_class(self, value: type, node: Node) -> None:
        """A class of the user's: its attributes and its methods, and those of its bases that are the user's too."""
        node.value = value
        for base in value.__mro__:
            if base.__module__ == "builtins" or not self.is_user_class(base):
                continue
            for name, attribute in vars(base).items():
                slot = isinstance(attribute, (types.MemberDescriptorType, types.GetSetDescriptorType))
                if name not in IGNORED_CLASS_ATTRIBUTES and not slot:
                    self.add(node, f" {base.__name__}.{name}", attribute)

    def generator(self, value: types.GeneratorType[Any, Any, Any], node: Node) -> None:
        frame = value.gi_frame
        node.value = None if frame is None else frame.f_lasti
        for name, local in (frame.f_locals if frame is not None else {}).items():
            self.add(node, f".{name}", local)

    def stream(self, value: Any, node: Node) -> None:
        """A generator of random numbers: its state."""
        if isinstance(value, torch.Generator):
            self.add(node, ".state", value.get_state())
        elif isinstance(value, random.Random):
            self.add(node, ".state", value.getstate())
        elif isinstance(value, np.random.Generator):
            self.add(node, ".state", value.bit_generator)
        elif isinstance(value, np.random.RandomState):
            self.add(node, ".state", value.get_state(legacy=False))
        else:
            self.add(node, ".state", value.state)

    def file(self, value: io.IOBase, node: Node) -> None:
        with contextlib.suppress(Exception):
            node.value = value.tell()

    def iterator(self, value: Iterator[Any], node: Node) -> None:
        """An iterator in C tells how far it is by what it would be pickled as."""
        if type(value).__module__ not in PICKLABLE_MODULES:
            self.object(value, node)
            return
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            pickle_state = value.__reduce__()
            for number, item in enumerate(pickle_state[1:] if isinstance(pickle_state, tuple) else (pickle_state,)):
                self.add(node, f".{number}", item)

    def module(self, value: nn.Module, node: Node) -> None:
        """Parameters, buffers and submodules by their names, and all other attributes."""
        registries = ("_parameters", "_buffers", "_modules")
        for registry in registries:
            for name, member in getattr(value, registry).items():
                self.add(node, f".{name}", member)
        self.attributes(value, node, {*registries, "training"})
        self.class_of(value, node)

    def object(self, value: Any, node: Node) -> None:
        """By its attributes; where it has none, by what it would be pickled as, if its type is a plain one."""
        if type(value).__module__ in PICKLABLE_MODULES and not hasattr(value, "__dict__"):
            with contextlib.suppress(Exception):
                node.value = repr(value) if " at 0x" not in repr(value) else None
        self.attributes(value, node)
        self.class_of(value, node)

    def attributes(self, value: Any, node: Node, skipped_names: Iterable[str] = ()) -> None:
        kind: Any = type(value)
        remembered, slots = _attribute_names(kind)
        instance_dict, excluded = getattr(value, "__dict__", {}), remembered.union(skipped_names)
        for name in sorted(name for name in instance_dict if isinstance(name, str) and name not in excluded):
            self.add(node, f".{name}", instance_dict[name])
        for name, mangled in slots:
            with contextlib.suppress(AttributeError):
                self.add(node, f".{name}", getattr(value, mangled))

    def class_of(self, value: Any, node: Node) -> None:
        """A library's classes are taken as they are, but a class may derive from one."""
        self.add(node, " class", type(value))

    def is_user_class(self, cls: type) -> bool:
        """Is it of a user's module, or made by a call of `type` and so without one, with methods of a user's?"""
        module = sys.modules.get(cls.__module__)
        if self.is_user_module(cls.__module__, getattr(module, "__file__", None)):
            return True
        methods = [value for value in vars(cls).values() if isinstance(value, types.FunctionType)]
        return cls.__module__ == "abc" and any(
            self.is_user_module(m.__module__, m.__code__.co_filename) for m in methods
        )

    def is_user_module(self, module: str | None, file: str | None) -> bool:
        """Is this module somebody's own, and no library's?"""
        package = (module or "").partition(".")[0]
        if package in self.packages or package == "__main__":
            return True
        if package in LIBRARY_PACKAGES or package in sys.stdlib_module_names:
            return False
        return not in_a_library(file)


@functools.lru_cache(4096)
def in_a_library(file: str | None) -> bool:
    if file is None:
        return False
    if file.startswith("<"):  # typed in, or executed from a string
        return file.startswith("<frozen")
    path = Path(file).resolve()
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return True
    return not SYSTEM_PATHS.isdisjoint(path.parents)


@functools.lru_cache(4096)
def _attribute_names(kind: Any) -> tuple[frozenset[str], tuple[tuple[str, str], ...]]:
    """Names of a class's cached properties; and its slots, as they are written and as they are looked up."""
    remembered: list[str] = []
    slots: list[tuple[str, str]] = []
    for base in kind.__mro__:
        remembered += [name for name, v in vars(base).items() if isinstance(v, functools.cached_property)]
        names = vars(base).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            if name not in ("__dict__", "__weakref__"):
                slots.append((name, f"_{base.__name__.lstrip('_')}{name}" if private else name))
    return frozenset(remembered), tuple(slots)


@functools.lru_cache(4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Names that a function's code refers to, nested functions included."""
    nested_names = (names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*nested_names)


def _plain_value(value: Any) -> Any:
    """A value that equals itself, which NaN does not, and tells 1 from 1.0 and True."""
    if isinstance(value, (float, complex, np.generic)):
        return repr(value)
    return (type(value).__qualname__, str(value)) if isinstance(value, (slice, Path)) else value


def _digest(array: np.ndarray) -> bytes:
    if array.nbytes > LARGE_ARRAY_BYTES:
        array = array.reshape(-1)[:: -(-array.size // SAMPLED_ELEMENTS)]
    data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else b""
    return hashlib.blake2b(data, digest_size=16).digest()


def _tensor(value: Tensor) -> Any:
    """Shape, type and a digest of the values; of a large one also how often it was written to in place."""
    metadata = (tuple(value.shape), value.dtype, str(value.device), value.requires_grad, value.layout)
    if value.device.type == "meta" or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return metadata
    value = value.detach()
    if value.layout != torch.strided:
        return metadata, tuple(_tensor(component) for component in _sparse(value)), value._version
    times = None
    if value.numel() * value.element_size() > LARGE_ARRAY_BYTES:
        times = value._version
        value = value.reshape(-1)[:: -(-value.numel() // SAMPLED_ELEMENTS)]
    if value.is_quantized:
        value = value.int_repr()
    value = value.resolve_conj().resolve_neg().cpu().contiguous()
    return metadata, _digest(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else b"", times


def _sparse(value: Tensor) -> tuple[Tensor, ...]:
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

READ_METHOD_BY_TYPE: list[tuple[Any, Callable[[Reader, Any, Node], None]]] = [
    (Tensor, Reader.tensor),
    (np.ndarray, Reader.array),
    (nn.Module, Reader.module),
    (type, Reader.user_class),
    (types.ModuleType, lambda reader, value, node: None),
    (types.FunctionType, Reader.function),
    (types.MethodType, Reader.method),
    (functools.partial, Reader.partial),
    (FUNCTION_WRAPPER_TYPES, Reader.wrapper),
    (types.GeneratorType, Reader.generator),
    (RANDOM_GENERATOR_TYPES, Reader.stream),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), lambda reader, value, node: None),
    (Mapping, Reader.mapping),
    ((list, tuple, collections.deque), Reader.sequence),
    ((set, frozenset), Reader.set),
    (io.IOBase, Reader.file),
    (ITERATOR_TYPES, Reader.iterator),
    (Iterator, Reader.iterator),
]
