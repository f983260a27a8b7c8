"""Copies of parts: each simulation copies the parts that it is given before they are bound to clients and seeds.

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
MAX_SEARCH_DEPTH = 4  # depth of attributes and containers in which tensors are searched for


class PartCopier:
    """Copies the parts of one simulation; objects that two parts share are shared by their copies.

    Args:
        *shared_values: objects that are not copied, wherever they are met.

    >>> from fedsim.availability import Full
    >>> process = Full()
    >>> copies = PartCopier()
    >>> copies(process) is process
    False
    >>> copies(process) is copies(process)
    True
    """

    def __init__(self, *shared_values: Any) -> None:
        self._memo: dict[int, Any] = {id(component): component for component in shared_values}
        self._referenced_values: list[Any] = [*shared_values]

    def __call__(self, component: T) -> T:
        """Return the simulation's own copy of a part."""
        min_bytes = 0 if isinstance(component, Dataset) else LARGE_TENSOR_BYTES
        large_values = [value for value in _tensors(component, MAX_SEARCH_DEPTH) if value.nbytes >= min_bytes]
        self._memo |= {id(value): value for value in large_values}
        self._referenced_values += large_values
        clone: T = self._copy_object(component, type(component).__name__)
        return clone

    def _copy_object(self, copied_value: Any, attribute_name: str) -> Any:
        if id(copied_value) in self._memo:
            return self._memo[id(copied_value)]
        copy_memo = dict(self._memo)  # a copy that fails leaves a partial copy behind
        try:
            copied_object = copy.deepcopy(copied_value, copy_memo)
        except Exception:
            return self._copy_by_attributes(copied_value, attribute_name)
        self._referenced_values += [
            copied_value,
            copy_memo.pop(id(copy_memo), None),
        ]  # an id is unique as long as the object exists
        self._memo = copy_memo
        return copied_object

    def _copy_by_attributes(self, copied_value: Any, attribute_name: str) -> Any:
        """Return a copy of an object if one of its attributes cannot be copied."""
        try:
            copied_object = copy.copy(copied_value)
        except Exception:
            copied_object = copied_value
        if copied_object is copied_value or not hasattr(copied_object, "__dict__"):
            log.warning(
                "%s (%s) cannot be copied; simulations that are given it share it",
                attribute_name,
                type(copied_value).__name__,
            )
            return copied_value
        self._memo[id(copied_value)] = copied_object
        self._referenced_values.append(copied_value)
        for attribute, attribute_value in vars(copied_value).items():
            vars(copied_object)[attribute] = self._copy_object(attribute_value, f"{attribute_name}.{attribute}")
        return copied_object


def _tensors(copied_value: Any, search_depth: int) -> Iterator[Any]:
    """Return the tensors and arrays in attributes and containers."""
    if isinstance(copied_value, (Tensor, np.ndarray)):
        yield copied_value
    elif search_depth and not isinstance(copied_value, (str, bytes, int, float, type)):
        members = list(copied_value.values()) if isinstance(copied_value, Mapping) else []
        members += list(copied_value) if isinstance(copied_value, (list, tuple)) else []
        for member in [*members, *getattr(copied_value, "__dict__", {}).values()]:
            yield from _tensors(member, search_depth - 1)
