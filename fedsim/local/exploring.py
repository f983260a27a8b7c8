"""Random models that exploring rules deploy, the same for all clients of a replicate."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.federation import Federation
from fedsim.local.rule import Carry

SEED_MEMORY_NAME = "seed_of_points"


def replicate_seed_memory(federation: Federation) -> Carry:
    """The memory that `noise` needs: [R·m'] the seed of each client's replicate."""
    return {SEED_MEMORY_NAME: federation.broadcast(federation.seed_of_replicate)}


def exploration_noise(carry: Carry, point_index: Tensor, num_trained: int) -> Tensor:
    """[d] standard normal numbers of one client, zero in columns of statistics: a function of seed, round and number.

    Args:
        carry: with the client's `seeds`, 'round' and 'params'.
        point_index: [] of the point in its round.
        num_trained: how many columns are trained.
    """
    params = carry["params"]
    key = rng.row_keys(carry[SEED_MEMORY_NAME], rng.Purpose.POINT, carry["round"])
    normals = rng.normal(rng.fold_in(key, point_index), torch.arange(num_trained, device=params.device), params.dtype)
    return torch.cat([normals, normals.new_zeros(len(params) - num_trained)])
