"""Players in one market: each client is a player who sets prices, and the model holds the decisions of all players."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedsim.core import rng
from fedsim.core.constraints import Count, NonNegative, Real
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.stream import StreamDataset


class Market(StreamDataset):
    """Base demands z_i ~ N(a_i, σ² I) for the d goods of player i, who decides the i-th block x_i of θ = (x_1, …, x_m)
    and loses ℓ_i = −x_iᵀz_i + λ/2 ‖x_i‖². With `shift=players` every player's demands depend on all decisions.

    A sample x is [m·d], zero outside its player's block, and y [m·d] is λ there and zero elsewhere; so each client's
    gradient is nonzero in its own block only, and the sum of their steps (strategy=fedavg_all strategy.server_lr=m)
    makes each player's own step.

    Args:
        clients: m.
        dimension: d.
        low, high: a_i is uniform on [low, high]^d.
        cost: λ.
        std: σ.
        seed: of the draw; all replicates have the same means.
    """

    uniforms = 0

    def __init__(
        self,
        clients: Count = 4,
        dimension: Count = 1,
        low: Real = 4.0,
        high: Real = 8.0,
        cost: NonNegative = 0.5,
        std: NonNegative = 1.0,
        seed: int = 0,
    ) -> None:
        if low > high:
            raise ConfigError(key="low", value=low, needs=f"exceeds {{high}}={high}; swap them", mentions=("high",))
        self.cost = cost
        self.noise_std = std
        self.players, self.goods = clients, dimension
        draws = rng.generator(seed, rng.Purpose.DATA).uniform(low, high, (clients, dimension))
        self.means = torch.as_tensor(draws)
        super().__init__("market", clients, (clients * dimension,), dimension, loss="costed_revenue")

    def compose_samples(self, clients: Tensor, normals: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
        z = self.means[clients].to(normals.dtype)[:, None] + self.noise_std * normals  # [c, B, d]
        block = one_hot(clients, self.players).to(normals.dtype)[:, None, :, None]  # [c, 1, m, 1]
        cost = (self.cost * block).expand(*z.shape[:2], -1, self.goods)
        return {"x": (block * z[:, :, None]).flatten(2), "y": cost.flatten(2)}
