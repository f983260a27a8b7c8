"""The columns of a row under the names of the model's tensors, for strategies that treat some layers differently."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedsim.core import checks
from fedsim.core.errors import ConfigError

TRAINED, RECEIVED, PRIVATE, STATISTIC = "trained", "received", "private", "statistic"


@dataclass(frozen=True)
class ParameterColumns:
    """Where one of the model's tensors lies in the rows that a strategy sees.

    Attributes:
        name: of the parameter or buffer, as in `state_dict`.
        shape: of the tensor.
        role: 'trained': clients train it and send it; 'received': clients receive it and do not train it, only the
            strategy changes it; 'private': it stays with the client; 'statistic': a running statistic that the
            simulator averages. Rows have columns of the first two kinds only.
        columns: of the rows; None where rows do not have it.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    columns: slice | None

    def of(self, rows: Tensor) -> Tensor:
        """[…, d] → […, *shape], a view of these columns as the tensor that they are.

        Raises:
            ConfigError: rows do not have them.
        """
        if self.columns is None:
            home = "stays with the client" if self.role == PRIVATE else "is averaged by the simulator"
            raise ConfigError(
                f"a strategy asks for the columns of {self.name}, which {home} and is in no row that a strategy sees; "
                "choose another parameter, or columns=all"
            )
        tensor: Tensor = rows[..., self.columns].reshape(*rows.shape[:-1], *self.shape)
        return tensor

    def set(self, rows: Tensor, values: Tensor) -> Tensor:
        """[…, d] a copy of the rows in which these columns are the tensor's values […, *shape]."""
        changed = rows.clone()
        self.of(changed).copy_(values)
        return changed


@dataclass(frozen=True)
class ColumnNames(Mapping[str, ParameterColumns]):
    """Name of a tensor → its columns, in the module's order: parameters first, then running statistics.

    Example:
        >>> names = ColumnNames.of({"body.weight": (2, 3), "head.bias": (2,)}, {}, {"body.weight"})
        >>> names["head.bias"].columns, names["body.weight"].role
        (slice(0, 2, None), 'private')
    """

    by_name: dict[str, ParameterColumns] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Any],
        statistics: Mapping[str, Any],
        private_parameters: set[str],
        received_parameters: Collection[str] = (),
    ) -> ColumnNames:
        """Of a model whose parameters and statistics have these shapes."""
        by_name: dict[str, ParameterColumns] = {}
        start = 0
        for name, shape in {**shapes, **statistics}.items():
            role = PRIVATE if name in private_parameters else STATISTIC if name in statistics else TRAINED
            role = RECEIVED if role == TRAINED and name in received_parameters else role
            columns = None
            if role in (TRAINED, RECEIVED):
                columns = slice(start, start + math.prod(shape))
                start = columns.stop
            by_name[name] = ParameterColumns(name, tuple(shape), role, columns)
        return cls(by_name)

    def __getitem__(self, name: str) -> ParameterColumns:
        if name not in self.by_name:
            near = checks.nearest(name, self.by_name)
            raise ConfigError(
                f"a strategy asks for the columns of {name!r}, but the model has {', '.join(self) or 'no names'}{near}"
            )
        return self.by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self.by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    @property
    def num_received(self) -> int:
        """How many columns clients receive and do not send."""
        return sum(math.prod(entry.shape) for entry in self.by_name.values() if entry.role == RECEIVED)

    def matching(self, pattern: str) -> list[ParameterColumns]:
        """Those that rows have and in whose name the regular expression is found.

        Raises:
            ConfigError: there are none.
        """
        chosen = [entry for entry in self.by_name.values() if entry.columns and re.search(pattern, entry.name)]
        if not chosen:
            names = ", ".join(name for name, entry in self.by_name.items() if entry.columns)
            raise ConfigError(f"a strategy asks for columns that match {pattern!r}, but rows have those of {names}")
        return chosen

    def mask(self, pattern: str, like: Tensor) -> Tensor:
        """[d] 1 in the columns of `matching`, else 0, of the device and type of rows or models […, d]."""
        mask = torch.zeros(like.shape[-1], dtype=like.dtype, device=like.device)
        for entry in self.matching(pattern):
            mask[entry.columns] = 1.0
        return mask
