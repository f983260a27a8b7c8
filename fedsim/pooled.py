"""Everybody's data in one client: what a centralised baseline trains on (profl Table 1, PG).

Sample j of every batch is member j mod m's: a stream draws it from that member's law, and the shift moves it with that
member's sensitivity. Stored data are dealt out in the same way whoever would hold them, which is the mixture of an iid
partition.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedsim import rng
from fedsim.datasets import Dataset
from fedsim.errors import ConfigError
from fedsim.federation import Federation
from fedsim.shift import Shift

if TYPE_CHECKING:
    from fedsim.models import RowModel
    from fedsim.trainer import Batches


class PooledData(Dataset):
    """The data of m members as one client's.

    Args:
        inner: whose data.
        members: m.
    """

    def __init__(self, inner: Dataset, members: int) -> None:
        if inner.stream and inner.natural_clients != members:
            raise ConfigError(f"clients={members}, but dataset={inner.name} was made for {inner.natural_clients}")
        if inner.weights is not None and np.ptp(inner.weights) > 1e-9:
            raise ConfigError("local=pg pools everybody alike, but the clients' weights differ; set weight_variance=0")
        fields = {f.name: getattr(inner, f.name) for f in dataclasses.fields(Dataset)}
        super().__init__(**fields | {"owners": None, "weights": None})
        self.inner, self.members = inner, members

    @property
    def stream(self) -> bool:
        return self.inner.stream

    @property
    def natural_clients(self) -> int | None:
        return 1 if self.stream else None

    def draw(self, clients: Tensor, keys: Tensor, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return {n: v[:, :size] for n, v in self._deal(self.inner.draw, keys, size, dtype).items()}

    def exact(self, clients: Tensor, keys: Tensor, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return self._deal(self.inner.exact, keys, size, dtype)

    def exact_size(self, size: int) -> int:
        return self.members * self.inner.exact_size(-(-size // self.members))

    def _deal(
        self, source: Callable[..., dict[str, Tensor]], keys: Tensor, size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Equal shares of all members, in turn: [c, m · share, …]."""
        everyone = torch.arange(self.members, device=keys.device)
        shares = source(
            everyone.repeat(len(keys)), rng.fold(keys[:, None], everyone).flatten(), -(-size // self.members), dtype
        )
        return {n: v.unflatten(0, (-1, self.members)).transpose(1, 2).flatten(1, 2) for n, v in shares.items()}


class PooledShift(Shift):
    """A shift of m members on batches of `PooledData`: each sample is moved as its member's.

    Args:
        inner: the members' shift.
        inner_data: the members' data.
        members: m.
    """

    def __init__(self, inner: Shift, inner_data: Dataset, members: int) -> None:
        super().__init__(inner.deploy, inner.inertia, inner.references, inner.box)
        self.inner, self.inner_data, self.members = inner, inner_data, members
        self.active = inner.active

    def setup(self, federation: Federation, batches: Batches, model: RowModel) -> None:
        fractions = federation.class_fractions
        everyone = dataclasses.replace(
            federation,
            clients=self.members,
            sizes=np.repeat(federation.sizes, self.members),
            class_fractions=None if fractions is None else np.repeat(fractions, self.members, axis=1),
            shares=None,
        )
        shared = copy.copy(batches)  # stored samples are everybody's
        shared.federation, shared.dataset = everyone, self.inner_data
        if not self.inner_data.stream:
            shared.offsets = batches.offsets.repeat_interleave(self.members)
        self.inner.setup(everyone, shared, model)
        self.estimator, self.moving, self.groups = self.inner.estimator, self.inner.moving, self.inner.groups

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        return self._each(self.inner, batch, theta)

    def smooth(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        return self._each(self.inner.smooth, batch, theta)

    def _each(
        self, move: Callable[..., dict[str, Tensor]], batch: dict[str, Tensor], theta: Tensor
    ) -> dict[str, Tensor]:
        """The samples one by one, as batches of their members."""
        member = torch.arange(len(batch["x"]), device=theta.device) % self.members
        samples = {name: value[:, None] for name, value in batch.items() if value.dim()}
        whole = {name: value for name, value in batch.items() if not value.dim()}
        row = whole["row"] * self.members

        def of_one(sample: dict[str, Tensor], member: Tensor) -> dict[str, Tensor]:
            moved = move(whole | sample | {"client": member, "row": row + member}, theta)
            return {name: value for name, value in moved.items() if name not in whole}

        moved = vmap(of_one)(samples, member)
        return whole | {name: value.flatten(0, 1) for name, value in moved.items()}
