"""Detects which tensors a piece of code writes to, operation by operation rather than by comparing values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedsim.core.errors import RunError
from fedsim.models.copying import storage_key


class WriteRecorder(TorchDispatchMode):
    """Records which of the watched tensors are written in place, even if their values stay the same.

    Args:
        watched_tensors: tensors by name.

    Attributes:
        written_names: names of those that were.
    """

    def __init__(self, watched_tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names: dict[int, list[str]] = {}
        for name, tensor in watched_tensors.items():
            self._names.setdefault(storage_key(tensor), []).append(name)
        self._names.pop(0, None)
        self.written_names: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this, PyTorch imports its compiler, for 1.5 s, to exempt this class from it; no run compiles it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for value in tree_leaves(arguments.get(argument.name)):
                        if isinstance(value, Tensor):
                            self.written_names.update(self._names.get(storage_key(value), ()))
        return func(*args, **kwargs)


class TensorWriteGuard:
    """Ends a run in which a forward pass writes to a tensor that it left unchanged in the probe.

    A buffer may move only for some batches, or after many passes. It is then no column of a row, and clients would
    share it, so the run must not go on.

    Args:
        module: whose parameters and buffers are watched.
        written_names: names of buffers and frozen parameters that are columns.
    """

    def __init__(self, module: nn.Module, written_names: Collection[str]) -> None:
        self._kind = type(module).__name__
        self._storage_ranges = [
            (name, tensors, leaf) for name, tensors, leaf in _tensor_locations(module) if name not in written_names
        ]
        self._states_before: list[tuple[Tensor | None, int]] = []

    def __enter__(self) -> None:
        self._states_before = [self._tensor_version(tensors[leaf]) for _, tensors, leaf in self._storage_ranges]

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            return
        for (name, tensors, leaf), (tensor, version) in zip(self._storage_ranges, self._states_before, strict=True):
            current_tensor = tensors.get(leaf)
            if current_tensor is not tensor or self._tensor_version(current_tensor)[1] != version:
                raise RunError(
                    f"the forward pass of {self._kind} writes to {name!r}, which it left alone when it was tried "
                    "before the run, so that clients would share it; move it in each training pass (for example by "
                    "torch.where)"
                )

    @staticmethod
    def _tensor_version(tensor: Tensor | None) -> tuple[Tensor | None, int]:
        return tensor, -1 if tensor is None else tensor._version


def _tensor_locations(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Return the name of each parameter and buffer, and the layer and attribute that hold it."""
    for prefix, layer in module.named_modules():
        for tensors in (layer._parameters, layer._buffers):
            for leaf in tensors:
                yield (f"{prefix}.{leaf}" if prefix else leaf), tensors, leaf


class DataAssignmentCounter(TorchFunctionMode):
    """Counts assignments to `tensor.data`, under which torch.func's transforms crash the process."""

    SETTERS = (Tensor.data.__set__, Tensor.set_)  # type: ignore[attr-defined]

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.SETTERS
        return func(*args, **(kwargs or {}))
