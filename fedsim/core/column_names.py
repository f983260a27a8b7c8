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

TRAINED_ROLE, RECEIVED_ROLE, PRIVATE_ROLE, STATISTIC_ROLE = "trained", "received", "private", "statistic"


@dataclass(frozen=True)
class TensorColumns:
    """The columns of one of the model's tensors in the rows that a strategy sees.

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

    def select(self, rows: Tensor) -> Tensor:
        """Return […, d] → […, *shape], a view of these columns with the tensor's shape.

        Raises:
            ConfigError: rows do not have them.
        """
        if self.columns is None:
            role_text = "stays with the client" if self.role == PRIVATE_ROLE else "is averaged by the simulator"
            raise ConfigError(
                f"a strategy asks for the columns of {self.name}, which {role_text} and is in no row "
                "that a strategy sees; "
                "choose another parameter, or columns=all"
            )
        tensor: Tensor = rows[..., self.columns].reshape(*rows.shape[:-1], *self.shape)
        return tensor

    def replace(self, rows: Tensor, values: Tensor) -> Tensor:
        """Return a copy of the rows […, d] in which these columns have the tensor's values […, *shape]."""
        changed_rows = rows.clone()
        self.select(changed_rows).copy_(values)
        return changed_rows


@dataclass(frozen=True)
class ColumnsByName(Mapping[str, TensorColumns]):
    """Name of a tensor → its columns, in the module's order: parameters first, then running statistics.

    Example:
        >>> names = ColumnNames.from_shapes({"body.weight": (2, 3), "head.bias": (2,)}, {}, {"body.weight"})
        >>> names["head.bias"].columns, names["body.weight"].role
        (slice(0, 2, None), 'private')
    """

    columns_by_name: dict[str, TensorColumns] = field(default_factory=dict)

    @classmethod
    def from_shapes(
        cls,
        shapes: Mapping[str, Any],
        statistics: Mapping[str, Any],
        private_parameters: set[str],
        received_parameters: Collection[str] = (),
    ) -> ColumnsByName:
        """Build the columns of a model whose parameters and statistics have these shapes."""
        by_name: dict[str, TensorColumns] = {}
        start_column = 0
        for name, shape in {**shapes, **statistics}.items():
            role = (
                PRIVATE_ROLE if name in private_parameters else STATISTIC_ROLE if name in statistics else TRAINED_ROLE
            )
            role = RECEIVED_ROLE if role == TRAINED_ROLE and name in received_parameters else role
            columns = None
            if role in (TRAINED_ROLE, RECEIVED_ROLE):
                columns = slice(start_column, start_column + math.prod(shape))
                start_column = columns.stop
            by_name[name] = TensorColumns(name, tuple(shape), role, columns)
        return cls(by_name)

    def __getitem__(self, name: str) -> TensorColumns:
        if name not in self.columns_by_name:
            name_hint = checks.nearest_name_hint(name, self.columns_by_name)
            raise ConfigError(
                f"a strategy asks for the columns of {name!r}, but the model has "
                f"{', '.join(self) or 'no names'}{name_hint}"
            )
        return self.columns_by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns_by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns_by_name)

    def __len__(self) -> int:
        return len(self.columns_by_name)

    @property
    def num_received_columns(self) -> int:
        """The number of columns that clients receive and do not send."""
        return sum(math.prod(entry.shape) for entry in self.columns_by_name.values() if entry.role == RECEIVED_ROLE)

    def matching(self, pattern: str) -> list[TensorColumns]:
        """Return the tensors in rows whose names match the regular expression.

        Raises:
            ConfigError: there are none.
        """
        matching_entries = [
            entry for entry in self.columns_by_name.values() if entry.columns and re.search(pattern, entry.name)
        ]
        if not matching_entries:
            names = ", ".join(name for name, entry in self.columns_by_name.items() if entry.columns)
            raise ConfigError(f"a strategy asks for columns that match {pattern!r}, but rows have those of {names}")
        return matching_entries

    def column_mask(self, pattern: str, like: Tensor) -> Tensor:
        """Return [d] 1 in the columns of `matching`, else 0, on the device and with the type of rows or models […,
        d]."""
        mask = torch.zeros(like.shape[-1], dtype=like.dtype, device=like.device)
        for entry in self.matching(pattern):
            mask[entry.columns] = 1.0
        return mask
