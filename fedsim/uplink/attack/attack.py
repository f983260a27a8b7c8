"""The interface of an attack: which clients are Byzantine, from which round on, and what they send."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core import rng
from fedsim.core.constraints import CountOrZero, Fraction
from fedsim.core.effects import EffectDeclarations, EffectiveIf, RoundParameter
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.contamination import Contamination
from fedsim.uplink import Stage, StageContext


class Attack(Stage):
    """Some clients are Byzantine, the same ones in all rounds; attacks are applied before the uplink.

    Args:
        fraction: fraction of Byzantine clients, rounded; drawn from the replicate's seed.
        clients: indices of the Byzantine clients instead, for all replicates.
        since: first round of the attack.
    """

    effective_if: EffectDeclarations = (
        EffectiveIf(
            "fraction",
            lambda component, run: component.clients is None,
            "{at}.clients=null, which names the attackers itself",
        ),
        RoundParameter("since"),
    )

    active = True

    def __init__(
        self, fraction: Fraction = 0.2, clients: Sequence[CountOrZero] | None = None, since: CountOrZero = 0
    ) -> None:
        self.fraction = fraction
        self.clients, self.since = clients, since

    def setup(self, federation: Federation, availability: Availability, earlier_stages: Sequence[Stage]) -> None:
        byzantine_mask = np.zeros((federation.num_replicates, federation.clients), dtype=bool)
        for replicate, seed in enumerate(federation.seeds):
            numbers = np.asarray(self.byzantine_clients(seed, federation.clients))
            invalid_clients = numbers[(numbers < 0) | (numbers >= federation.clients)]
            if len(invalid_clients):
                raise ConfigError(
                    f"attack={type(self).__name__}: byzantine_clients names client "
                    f"{invalid_clients[0]}, but clients are "
                    f"numbered 0 to {federation.clients - 1}"
                )
            byzantine_mask[replicate, numbers] = True
        self.byzantine_mask = torch.as_tensor(byzantine_mask.reshape(-1)).to(federation.device)

    def byzantine_clients(self, seed: int, clients: int) -> np.ndarray:
        """Return the numbers of the Byzantine clients of a replicate."""
        if self.clients is None:
            draw = rng.generator(seed, rng.Purpose.ATTACK)
            return np.sort(draw.choice(clients, round(self.fraction * clients), replace=False))
        for client in self.clients:
            if client >= clients:
                raise ConfigError(f"attack.clients names client {client}, but clients={clients} end at {clients - 1}")
        return np.array(self.clients, dtype=np.int64)

    def __call__(self, rows: Tensor, link: StageContext) -> Tensor:
        if link.cohort.round < self.since:
            return rows
        byzantine = self.byzantine_mask[link.cohort.virtual_client_index]
        return torch.where(byzantine[:, None], self.byzantine_rows(rows, byzantine, link), rows)

    def with_label_attack(self, contamination: Contamination) -> Contamination:
        """Return the contamination of the samples that clients train on, given the one without the attack; after
        `setup`."""
        return contamination

    @abstractmethod
    def byzantine_rows(self, rows: Tensor, byzantine: Tensor, link: StageContext) -> Tensor:
        """Return [n, d], what each row would be if its client were Byzantine; `byzantine` [n] says which clients
        are."""


class NoAttack(Attack):
    """No client deviates from the protocol."""

    active = False

    def __init__(self) -> None:
        super().__init__(0.0)

    def byzantine_rows(self, rows: Tensor, byzantine: Tensor, link: StageContext) -> Tensor:
        return rows


class Omniscient(Attack):
    """Byzantine clients know the rows of all honest clients of the round, and all send the same row; without honest
    clients in the round they send their own.

    Args:
        fraction, clients, since: see `fedsim.uplink.attack.Attack`.
    """

    def byzantine_rows(self, rows: Tensor, byzantine: Tensor, link: StageContext) -> Tensor:
        cohort = link.cohort
        attack_vectors, is_attackable = [], []
        for replicate_rows, lying_mask in zip(
            cohort.split_by_replicate(rows), cohort.split_by_replicate(byzantine.to(rows.dtype)), strict=True
        ):
            honest_rows = replicate_rows[lying_mask == 0]
            is_attackable.append(0 < len(honest_rows) < len(replicate_rows))
            attack_vectors.append(
                self.attack_vector(honest_rows, len(replicate_rows))
                if is_attackable[-1]
                else rows.new_zeros(rows.shape[1])
            )
        crafted_rows = cohort.broadcast(torch.stack(attack_vectors))
        attackable_mask = torch.tensor(is_attackable, device=rows.device)[cohort.replicate_index]
        return torch.where(attackable_mask[:, None], crafted_rows, rows)

    @abstractmethod
    def attack_vector(self, honest_rows: Tensor, n: int) -> Tensor:
        """Return the row [d] that is sent, given the honest rows [k, d], 0 < k < n, of a round of n."""
