"""How a user's module is called, and which tensor of what it returns is its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fedsim.core.errors import ConfigError


class Calling:
    """Calls modules on inputs, and makes outputs alike.

    Args:
        output: where the module returns a mapping or an object, the name of its output, such as 'logits'; where it
            returns a tuple, its number. None for a module that returns a tensor.

    Attributes:
        classes_second: outputs for labels of positions are [B, C, …], as convolutions give them, and not [B, …, C].
    """

    def __init__(self, output: str | int | None = None) -> None:
        self.output, self.classes_second = output, False

    def __call__(self, module: Callable[..., Any], x: Tensor) -> Tensor:
        """[B, …], or [B, …, C] for classes."""
        return self.result(module(x))

    def result(self, returned: Any) -> Tensor:
        """The output among what a module returned."""
        found = returned if self.output is None else self._named(returned)
        if not isinstance(found, Tensor):
            told = ", ".join(map(repr, self._names(returned)))
            raise ConfigError(
                f"model: the module returns a {type(returned).__name__}, not a tensor; name its output by model.output"
                + (f", one of {told}" if told else "")
            )
        return found.movedim(1, -1) if self.classes_second else found

    def _named(self, returned: Any) -> Any:
        """By name or number; None where there is no such thing."""
        if isinstance(returned, Mapping):
            return returned.get(self.output)
        if isinstance(self.output, int):
            many = isinstance(returned, (tuple, list)) and -len(returned) <= self.output < len(returned)
            return returned[self.output] if many else None
        return getattr(returned, str(self.output), None)

    @staticmethod
    def _names(returned: Any) -> list[Any]:
        """What `output` could be."""
        if isinstance(returned, Mapping):
            return [name for name, value in returned.items() if isinstance(value, Tensor)]
        if hasattr(returned, "_fields"):
            return list(returned._fields)
        if isinstance(returned, (tuple, list)):
            return [number for number, value in enumerate(returned) if isinstance(value, Tensor)]
        return [name for name, value in vars(returned).items() if isinstance(value, Tensor)] if returned else []
