"""Names of a module's tensors in a row, by which rows become a `state_dict` that the module accepts strictly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core.columns import ParameterPartition
from fedsim.models.copying import get_named_tensor


@dataclass
class StateDictLayout:
    """The entries of a module's `state_dict`, and where each is in a row.

    Attributes:
        names: of all entries, in the module's order.
        shapes: of the trained parameters, in the order of the row.
        statistics: shapes of the statistics, which follow them.
        kinds: dtypes of the statistics, as torch calls them without 'torch.'.
        aliases: an entry that is another one's tensor (tied weights) → that one.
        private_parameters: names of what stays with the client.
        constants: entries that no client changes (frozen parameters, fixed buffers): they are in no row.
    """

    names: list[str]
    shapes: dict[str, list[int]]
    statistics: dict[str, list[int]]
    kinds: dict[str, str]
    aliases: dict[str, str] = field(default_factory=dict)
    private_parameters: list[str] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        shapes: Mapping[str, torch.Size],
        statistics: Mapping[str, torch.Size],
        kinds: Mapping[str, torch.dtype],
        private_parameters: set[str],
    ) -> StateDictLayout:
        """Build the naming of a module whose rows have these columns."""
        entries = {name: value for name, value in module.state_dict(keep_vars=True).items() if torch.is_tensor(value)}
        names_by_id = {id(get_named_tensor(module, name)): name for name in shapes}
        names_by_id |= {id(get_named_tensor(module, name)): name for name in statistics}
        first_name_by_storage: dict[str, str] = {}
        for name, value in entries.items():
            first_name_by_storage[name] = names_by_id.setdefault(id(value), name)
        constants_by_name = {
            name: entries[name]
            for name, first_name in first_name_by_storage.items()
            if first_name not in {*shapes, *statistics} and first_name == name
        }
        return cls(
            list(entries),
            {name: list(shape) for name, shape in shapes.items()},
            {name: list(shape) for name, shape in statistics.items()},
            {name: str(kind).removeprefix("torch.") for name, kind in kinds.items()},
            {name: first_name for name, first_name in first_name_by_storage.items() if first_name != name},
            sorted(private_parameters),
            {name: value.detach().cpu().clone() for name, value in constants_by_name.items()},
        )

    @property
    def columns(self) -> ParameterPartition:
        """The columns of a row that are sent."""
        sizes = {name: math.prod(shape) for name, shape in (self.shapes | self.statistics).items()}
        return ParameterPartition.from_sizes(sizes, set(self.statistics), set(self.private_parameters))

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """Return a row [d] as a `state_dict` for the module's `load_state_dict`: copies in the module's shapes and
        types."""
        tensors = {name: value.clone() for name, value in named_views(row, self.shapes | self.statistics).items()}
        for name, kind in self.kinds.items():
            dtype = getattr(torch, kind)
            tensors[name] = (tensors[name] if dtype.is_floating_point else tensors[name].round()).to(dtype)
        tensors |= {name: value.clone() for name, value in self.constants.items()}
        return {name: tensors[self.aliases.get(name, name)] for name in self.names}

    def as_json(self) -> dict[str, Any]:
        """Return everything except the constants' values, for JSON."""
        return asdict(self) | {"constants": sorted(self.constants)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], constants: Mapping[str, Tensor]) -> StateDictLayout:
        """Return the naming from the result of `as_json`; `constants` holds the values.

        Raises:
            KeyError: for one that is missing there.
        """
        return cls(**{**content, "constants": {name: constants[name] for name in content["constants"]}})


def named_views(row: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return the first entries of a row by name, as views."""
    views, start = {}, 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        views[name] = row[start:stop].view(tuple(shape))
        start = stop
    return views
