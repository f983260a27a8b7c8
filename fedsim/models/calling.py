"""How a user's module is called, and which tensor of what it returns is its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fedsim.core.errors import ConfigError

Inputs = Tensor | dict[str, Tensor]  # x, or x and further inputs by name


class Calling:
    """Calls modules on inputs, and makes outputs alike.

    Args:
        output: where the module returns a mapping or an object, the name of its output, such as 'logits'; where it
            returns a tuple, its number. None for a module that returns a tensor.
        more: names of further inputs, which the module gets as keywords.

    Attributes:
        classes_second: outputs for labels of positions are [B, C, …], as convolutions give them, and not [B, …, C].
    """

    def __init__(self, output: str | int | None = None, more: tuple[str, ...] = ()) -> None:
        self.output, self.more, self.classes_second = output, more, False

    def inputs(self, batch: Mapping[str, Tensor]) -> Inputs:
        """What of a batch the module gets: x, or where there is more, x and that by name."""
        return batch["x"] if not self.more else {name: batch[name] for name in ("x", *self.more)}

    def __call__(self, module: Callable[..., Any], inputs: Inputs) -> Tensor:
        """[B, …], or [B, …, C] for classes."""
        if isinstance(inputs, Tensor):
            return self._result(module(inputs))
        return self._result(module(inputs["x"], **{name: inputs[name] for name in self.more}))

    def functional(self, module: nn.Module, parts: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """The same with these parameters and buffers in the place of the module's own."""
        if isinstance(inputs, Tensor):
            return self._result(functional_call(module, parts, (inputs,)))
        named = {name: inputs[name] for name in self.more}
        return self._result(functional_call(module, parts, (inputs["x"],), named))

    def _result(self, returned: Any) -> Tensor:
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
