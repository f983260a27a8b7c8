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
from fedsim.models import StatelessModel
from fedsim.shift.shift import Shift


class PooledShift(Shift):
    """A shift of m members on batches of `fedsim.data.datasets.pooled.PooledData`: each sample is shifted as one of its
    member.

    Args:
        inner_shift: the members' shift.
        inner_data: the members' data.
        members: m.
    """

    def __init__(self, inner_shift: Shift, inner_data: Dataset, members: int) -> None:
        if inner_shift.mixture is not None:
            raise ConfigError(
                "shift.mixture moves samples one by one, and local=pg deals them to members; leave one out"
            )
        inner_settings = (
            inner_shift.deploy,
            inner_shift.inertia,
            inner_shift.references,
            inner_shift.box,
            inner_shift.references_seconds,
            inner_shift.redraw,
        )
        super().__init__(*inner_settings)
        self.inner_shift, self.inner_data, self.members = inner_shift, inner_data, members
        self.active = inner_shift.active

    def setup(self, federation: Federation, data: ClientData, model: StatelessModel) -> None:
        fractions = federation.class_fractions
        member_federation = dataclasses.replace(
            federation,
            clients=self.members,
            num_samples=np.repeat(federation.num_samples, self.members),
            class_fractions=None if fractions is None else np.repeat(fractions, self.members, axis=1),
            client_shares=None,
        )
        self.inner_shift.setup(member_federation, data.data_for_members(member_federation, self.inner_data), model)
        inner_shift = self.inner_shift
        self.estimator, self.shifted_columns = inner_shift.estimator, inner_shift.shifted_columns
        self.groups, self.group_entry = inner_shift.groups, inner_shift.group_entry

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        return self._apply_to_each(self.inner_shift, batch, theta)

    def respond_differentiably(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        return self._apply_to_each(self.inner_shift.respond_differentiably, batch, theta)

    def _apply_to_each(
        self, shift_batch: Callable[..., dict[str, Tensor]], batch: dict[str, Tensor], theta: Tensor
    ) -> dict[str, Tensor]:
        """The samples one by one, as batches of their members."""
        member = batch.get("member", torch.arange(len(batch["x"]), device=theta.device) % self.members)
        samples = {name: value[:, None] for name, value in batch.items() if value.dim() and name != "member"}
        client_entries = {name: value for name, value in batch.items() if not value.dim()}
        row = client_entries["row"] * self.members

        def shift_one_sample(sample: dict[str, Tensor], member: Tensor) -> dict[str, Tensor]:
            shifted_samples = shift_batch(client_entries | sample | {"client": member, "row": row + member}, theta)
            return {name: value for name, value in shifted_samples.items() if name not in client_entries}

        shifted_samples = vmap(shift_one_sample)(samples, member)
        return client_entries | {name: value.flatten(0, 1) for name, value in shifted_samples.items()}
