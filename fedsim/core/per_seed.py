"""Settings with one number, or one number per replicate: the rest of the run is shared, so that a sweep is rows of
one run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, repr=False)
class PerSeed:
    """A number per replicate (or row, see `Cohort.expand_per_seed`). Arithmetic with numbers is that of each number, in
    double precision; with tensors [R, …] each number meets its own part of them.

    Attributes:
        values: R of them.
    """

    values: tuple[float, ...]

    __array_ufunc__ = None  # NumPy must not treat it as an object in an array

    def __repr__(self) -> str:
        return str(list(self.values))

    def expand_to_rows(self, bounds: Sequence[int]) -> PerSeed:
        """Return a number per row; the rows of replicate r are bounds[r]:bounds[r + 1]."""
        return PerSeed(tuple(np.repeat(self.values, np.diff(bounds)).tolist()))

    def broadcast_like(self, rows: Tensor) -> Tensor:
        """Return [R, 1, …] with as many dimensions as `rows` [R, …], of their type and on their device."""
        if not rows.dim() or len(rows) != len(self.values):
            raise ValueError(
                f"a number for each of {len(self.values)} replicates meets a tensor {list(rows.shape)}, whose first "
                "dimension differs; for rows of clients use cohort.expand_per_seed(setting)"
            )
        dtype = rows.dtype if rows.is_floating_point() else torch.get_default_dtype()
        column = torch.tensor(self.values, dtype=dtype).reshape(len(rows), *[1] * (rows.dim() - 1))
        return column.to(rows.device, non_blocking=True)

    def _apply_per_seed(self, operand: Any, operation: Callable[[Any, Any], Any]) -> Any:
        if isinstance(operand, Tensor):
            return operation(self.broadcast_like(operand), operand)
        if not isinstance(operand, (float, int, PerSeed)):
            return NotImplemented
        other_values = operand.values if isinstance(operand, PerSeed) else [operand] * len(self.values)
        return PerSeed(
            tuple(operation(value, other_value) for value, other_value in zip(self.values, other_values, strict=True))
        )

    def __mul__(self, operand: Any) -> Any:
        return self._apply_per_seed(operand, operator.mul)

    __rmul__ = __mul__

    def __add__(self, operand: Any) -> Any:
        return self._apply_per_seed(operand, operator.add)

    __radd__ = __add__

    def __sub__(self, operand: Any) -> Any:
        return self._apply_per_seed(operand, operator.sub)

    def __rsub__(self, operand: Any) -> Any:
        return self._apply_per_seed(operand, lambda value, first: first - value)

    def __truediv__(self, operand: Any) -> Any:
        if isinstance(operand, Tensor):  # as PyTorch divides a number by a tensor: the same bits
            return operand.reciprocal() * self
        return self._apply_per_seed(operand, operator.truediv)

    def __rtruediv__(self, operand: Any) -> Any:
        return self._apply_per_seed(operand, lambda value, first: first / value)

    def __pow__(self, exponent: float) -> PerSeed:
        return PerSeed(tuple(value**exponent for value in self.values))


NumberOrListPerSeed: TypeAlias = float | list[float]  # what a person gives
NumberOrPerSeed: TypeAlias = float | PerSeed  # what it becomes


def as_per_seed(value: NumberOrListPerSeed) -> NumberOrPerSeed:
    """Return one number, or a number per seed for a list; a list of one number is that number.

    The numbers are checked where the parameter is declared (`PositivePerSeed`, … of `fedsim.core.constraints`).
    """
    if not isinstance(value, (list, tuple)):
        return value
    return value[0] if len(value) == 1 else PerSeed(tuple(value))


def largest_value(setting: NumberOrPerSeed) -> float:
    """Return the largest value over the replicates."""
    return max(setting.values) if isinstance(setting, PerSeed) else setting


def per_seed_settings(group: str, component: object, number_class: type) -> Mapping[str, Sequence[float]]:
    """Return key → numbers of the settings of an object, and of nested objects of the class, that are given per
    seed."""
    numbers_by_key: dict[str, Sequence[float]] = {}
    for name, value in vars(component).items():
        if isinstance(value, PerSeed):
            numbers_by_key[f"{group}.{name}"] = value.values
        elif isinstance(value, number_class):
            numbers_by_key |= per_seed_settings(f"{group}.{name}", value, number_class)
    return numbers_by_key


def select_replicate_settings(component: object, replicates: Sequence[int], number_class: type) -> None:
    """Restrict settings that are given per seed, of an object and of nested objects of the class, to the numbers of
    these replicates, in place."""
    for name, value in list(vars(component).items()):
        if isinstance(value, PerSeed):
            vars(component)[name] = as_per_seed([value.values[replicate] for replicate in replicates])
        elif isinstance(value, number_class):
            select_replicate_settings(value, replicates, number_class)
