"""The pooled data of all clients as one client, for centralised baselines (profl Table 1, PG).

Sample j of every batch is member j mod m's: a stream draws it from that member's law, and `fedsim.shift.pooled` moves
it with that member's sensitivity. Stored data are pooled without regard to the partition, which gives the mixture of an
iid partition. With `one_at_a_time`, each batch comes from one member, drawn at random.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.dataset import Dataset


class PooledData(Dataset):
    """The data of m members as those of one client.

    Args:
        inner_dataset: the members' data.
        members: m.
        one_at_a_time: each batch comes from one member, whose number is in the entry 'member' [c, B].
    """

    def __init__(self, inner_dataset: Dataset, members: int, one_at_a_time: bool = False) -> None:
        if one_at_a_time and not inner_dataset.stream:
            raise ConfigError(
                "local.deals=one draws samples of one client, but those of "
                f"dataset={inner_dataset.name} belong to no client "
                "before they are partitioned; use a stream such as house_prices, or local.deals=everybody"
            )
        if inner_dataset.stream and inner_dataset.natural_clients != members:
            raise ConfigError(
                f"clients={members}, but dataset={inner_dataset.name} was made for {inner_dataset.natural_clients}"
            )
        if inner_dataset.weights is not None and np.ptp(inner_dataset.weights) > 1e-9:
            raise ConfigError(
                "local=pg pools all clients with equal weight, but the clients' weights differ; set weight_variance=0"
            )
        fields = {f.name: getattr(inner_dataset, f.name) for f in dataclasses.fields(Dataset)}
        super().__init__(**fields | {"owners": None, "test_owners": None, "weights": None, "client_names": None})
        self.inner_dataset, self.members, self.one_at_a_time = inner_dataset, members, one_at_a_time

    @property
    def stream(self) -> bool:
        return self.inner_dataset.stream

    @property
    def natural_clients(self) -> int | None:
        return 1 if self.stream else None

    def draw(self, clients: Tensor, keys: Tensor, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        if self.one_at_a_time:
            member = rng.integers(rng.fold_in(keys, self.members), torch.zeros_like(keys), self.members)
            member_samples = self.inner_dataset.draw(member, keys, size, dtype)
            return member_samples | {"member": member[:, None].expand(-1, size)}
        return {
            n: v[:, :size] for n, v in self._draw_member_samples(self.inner_dataset.draw, keys, size, dtype).items()
        }

    def exact(self, clients: Tensor, keys: Tensor, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return self._draw_member_samples(self.inner_dataset.exact, keys, size, dtype)

    def num_exact_samples(self, size: int) -> int:
        return self.members * self.inner_dataset.num_exact_samples(-(-size // self.members))

    def _draw_member_samples(
        self, source: Callable[..., dict[str, Tensor]], keys: Tensor, size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Equal shares of all members, in turn: [c, m · share, …]."""
        member_numbers = torch.arange(self.members, device=keys.device)
        shares = source(
            member_numbers.repeat(len(keys)),
            rng.fold_in(keys[:, None], member_numbers).flatten(),
            -(-size // self.members),
            dtype,
        )
        return {n: v.unflatten(0, (-1, self.members)).transpose(1, 2).flatten(1, 2) for n, v in shares.items()}
