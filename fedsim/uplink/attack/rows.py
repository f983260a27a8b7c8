"""Attacks on rows, with knowledge of the client's own row or of all honest rows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import CountOrZero, Fraction, Positive, Real
from fedsim.uplink import StageContext
from fedsim.uplink.attack.attack import Attack, Omniscient


class SignFlip(Attack):
    """G ← −c G.

    Args:
        scale: c.
        fraction, clients, since: see `fedsim.uplink.attack.Attack`.
    """

    def __init__(
        self,
        scale: Positive = 1.0,
        fraction: Fraction = 0.2,
        clients: Sequence[CountOrZero] | None = None,
        since: CountOrZero = 0,
    ) -> None:
        super().__init__(fraction, clients, since)
        self.scale = scale

    def byzantine_rows(self, rows: Tensor, byzantine: Tensor, link: StageContext) -> Tensor:
        return -self.scale * rows


class Noise(Attack):
    """G ~ N(0, std² I), drawn for each client and round.

    Args:
        std: σ.
        fraction, clients, since: see `fedsim.uplink.attack.Attack`.
    """

    def __init__(
        self,
        std: Positive = 1.0,
        fraction: Fraction = 0.2,
        clients: Sequence[CountOrZero] | None = None,
        since: CountOrZero = 0,
    ) -> None:
        super().__init__(fraction, clients, since)
        self.std = std

    def byzantine_rows(self, rows: Tensor, byzantine: Tensor, link: StageContext) -> Tensor:
        return self.std * rng.normal(link.keys[:, None], torch.arange(rows.shape[1], device=rows.device), rows.dtype)


class ALIE(Omniscient):
    """'A little is enough': μ − z σ of the honest rows, column by column (Baruch, Baruch and Goldberg 2019).

    Args:
        z: None: Φ⁻¹((n − f − h) / (n − f)), h = ⌊n/2⌋ + 1 − f, for n rows in the round, f of them Byzantine.
        fraction, clients, since: see `fedsim.uplink.attack.Attack`.
    """

    def __init__(
        self,
        z: Real | None = None,
        fraction: Fraction = 0.2,
        clients: Sequence[CountOrZero] | None = None,
        since: CountOrZero = 0,
    ) -> None:
        super().__init__(fraction, clients, since)
        self.z = z

    def attack_vector(self, honest_rows: Tensor, n: int) -> Tensor:
        z = self.paper_z(n, n - len(honest_rows)) if self.z is None else self.z
        spread = honest_rows.std(0) if len(honest_rows) > 1 else torch.zeros_like(honest_rows[0])
        return honest_rows.mean(0) - z * spread

    @staticmethod
    def paper_z(n: int, num_byzantine: int) -> float:
        """Return z for n rows; 0 if the attackers are no fewer than the honest clients, whom they need not persuade."""
        share = (n - num_byzantine - (n // 2 + 1 - num_byzantine)) / (n - num_byzantine)
        return NormalDist().inv_cdf(share) if 0 < share < 1 else 0.0


class IPM(Omniscient):
    """Inner-product manipulation: −ε μ of the honest rows (Xie, Koyejo and Gupta 2019).

    Args:
        epsilon: ε; small ones pass robust rules, large ones turn a mean.
        fraction, clients, since: see `fedsim.uplink.attack.Attack`.
    """

    def __init__(
        self,
        epsilon: Positive = 0.1,
        fraction: Fraction = 0.2,
        clients: Sequence[CountOrZero] | None = None,
        since: CountOrZero = 0,
    ) -> None:
        super().__init__(fraction, clients, since)
        self.epsilon = epsilon

    def attack_vector(self, honest_rows: Tensor, n: int) -> Tensor:
        return -self.epsilon * honest_rows.mean(0)
