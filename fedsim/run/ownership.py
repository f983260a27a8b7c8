"""Every simulation has parts of its own: it copies what it is given before anything binds it to clients and seeds.

Setting up a strategy, an availability process or a local rule writes into it: how many clients there are, their
probabilities, their seeds. So that one object may be given to several simulations, which are built in any order before
the first of them runs, each works on copies. What a part learnt in a run is found in the simulation's own copy, such as
`simulation.strategy`, not in the object that was passed in.

Shared, not copied, are the tensors and arrays of a data set, and those above `LARGE_TENSOR_BYTES` of any part. A part
that cannot be copied as a whole (it holds a file, a lock, a generator) is copied attribute by attribute; attributes
that cannot be copied are shared, which is logged.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from fedsim.data.datasets import Dataset

log = logging.getLogger(__name__)

T = TypeVar("T")
LARGE_TENSOR_BYTES = 64 * 2**20  # bytes
MAX_SEARCH_DEPTH = 4  # of attributes and containers in which tensors are looked for


class PartCopies:
    """Copies the parts of one simulation; what two parts have in common, their copies have in common.

    Args:
        *shared: objects that are not copied, wherever they are met.

    >>> from fedsim.availability import Full
    >>> process = Full()
    >>> copies = PartCopies()
    >>> copies(process) is process
    False
    >>> copies(process) is copies(process)
    True
    """

    def __init__(self, *shared: Any) -> None:
        self._memo: dict[int, Any] = {id(component): component for component in shared}
        self._alive: list[Any] = [*shared]

    def __call__(self, component: T) -> T:
        """The simulation's own copy of a part."""
        min_bytes = 0 if isinstance(component, Dataset) else LARGE_TENSOR_BYTES
        shared = [value for value in _tensors(component, MAX_SEARCH_DEPTH) if value.nbytes >= min_bytes]
        self._memo |= {id(value): value for value in shared}
        self._alive += shared
        clone: T = self._copy_object(component, type(component).__name__)
        return clone

    def _copy_object(self, value: Any, name: str) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        memo = dict(self._memo)  # a copy that fails half-way leaves halves behind
        try:
            clone = copy.deepcopy(value, memo)
        except Exception:
            return self._copy_by_attributes(value, name)
        self._alive += [value, memo.pop(id(memo), None)]  # an id stays an object's own as long as the object lives
        self._memo = memo
        return clone

    def _copy_by_attributes(self, value: Any, name: str) -> Any:
        """A copy of an object, some attribute of which cannot be copied."""
        try:
            clone = copy.copy(value)
        except Exception:
            clone = value
        if clone is value or not hasattr(clone, "__dict__"):
            log.warning("%s (%s) cannot be copied; simulations that are given it share it", name, type(value).__name__)
            return value
        self._memo[id(value)] = clone
        self._alive.append(value)
        for attribute, attribute_value in vars(value).items():
            vars(clone)[attribute] = self._copy_object(attribute_value, f"{name}.{attribute}")
        return clone


def _tensors(value: Any, depth: int) -> Iterator[Any]:
    """Tensors and arrays in attributes and containers."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield value
    elif depth and not isinstance(value, (str, bytes, int, float, type)):
        members = list(value.values()) if isinstance(value, Mapping) else []
        members += list(value) if isinstance(value, (list, tuple)) else []
        for member in [*members, *getattr(value, "__dict__", {}).values()]:
            yield from _tensors(member, depth - 1)
