"""The shift of several clients (members), applied to batches of one client that holds all their data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.datasets import Dataset
from fedsim.data.samples import ClientData
from fedsim.models import RowModel
from fedsim.shift.shift import Shift


class PooledShift(Shift):
    """A shift of m members on batches of `fedsim.data.datasets.pooled.PooledData`: each sample is shifted as one of its
    member.

    Args:
        inner: the members' shift.
        inner_data: the members' data.
        members: m.
    """

    def __init__(self, inner: Shift, inner_data: Dataset, members: int) -> None:
        if inner.mixture is not None:
            raise ConfigError(
                "shift.mixture moves samples one by one, and local=pg deals them to members; leave one out"
            )
        shared = (inner.deploy, inner.inertia, inner.references, inner.box, inner.references_seconds, inner.redraw)
        super().__init__(*shared)
        self.inner, self.inner_data, self.members = inner, inner_data, members
        self.active = inner.active

    def setup(self, federation: Federation, data: ClientData, model: RowModel) -> None:
        fractions = federation.class_fractions
        member_federation = dataclasses.replace(
            federation,
            clients=self.members,
            sizes=np.repeat(federation.sizes, self.members),
            class_fractions=None if fractions is None else np.repeat(fractions, self.members, axis=1),
            shares=None,
        )
        self.inner.setup(member_federation, data.shared_by(member_federation, self.inner_data), model)
        inner = self.inner
        self.estimator, self.moving = inner.estimator, inner.moving
        self.groups, self.group_entry = inner.groups, inner.group_entry

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        return self._apply_to_each(self.inner, batch, theta)

    def respond_differentiably(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        return self._apply_to_each(self.inner.respond_differentiably, batch, theta)

    def _apply_to_each(
        self, move: Callable[..., dict[str, Tensor]], batch: dict[str, Tensor], theta: Tensor
    ) -> dict[str, Tensor]:
        """The samples one by one, as batches of their members."""
        member = batch.get("member", torch.arange(len(batch["x"]), device=theta.device) % self.members)
        samples = {name: value[:, None] for name, value in batch.items() if value.dim() and name != "member"}
        client_entries = {name: value for name, value in batch.items() if not value.dim()}
        row = client_entries["row"] * self.members

        def of_one(sample: dict[str, Tensor], member: Tensor) -> dict[str, Tensor]:
            shifted = move(client_entries | sample | {"client": member, "row": row + member}, theta)
            return {name: value for name, value in shifted.items() if name not in client_entries}

        shifted = vmap(of_one)(samples, member)
        return client_entries | {name: value.flatten(0, 1) for name, value in shifted.items()}
