"""Client selection among the available clients; clients that are not selected do not compute.

A selection is what `Strategy.cohort` returns: the available clients with the largest values (`Cohort.select_largest`),
some drawn at random, or those that a function of each replicate's values picks. All ranks choose the same clients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.federation import Cohort


def draw_rows(cohort: Cohort, k: int, weights: Tensor) -> Cohort:
    """k rows of each replicate, or all, drawn one after another with probabilities in proportion to weights [n]; a
    function of seed and round (Efraimidis and Spirakis 2006). The host waits."""
    keys = rng.row_keys(cohort.seed, rng.Purpose.STRATEGY, cohort.client_index, cohort.round)
    draw = rng.uniform(keys, torch.zeros_like(keys), torch.float64) + 0.5 / (1 << 24)
    return cohort.select_largest(draw.log() / weights, k, exact_count=True)


def choose_rows(cohort: Cohort, choose_positions: Callable[..., np.ndarray], *values: Tensor) -> Cohort:
    """The rows of each replicate at those of its positions which `choose_positions` returns. The host waits.

    Args:
        choose_positions: sees a generator of the replicate's seed and the round, and of each of the values the
            replicate's [k]; called where k > 0.
        values: [n] each.
    """
    host, virtual_clients, bounds = cohort.all_gather_host(np.stack([value.double().cpu().numpy() for value in values]))
    selected = [np.zeros(0, dtype=np.int64)]
    for seed, (a, b) in zip(cohort.federation.seeds, itertools.pairwise(bounds), strict=True):
        if a < b:
            generator = rng.generator(seed, rng.Purpose.STRATEGY, cohort.round)
            selected.append(virtual_clients[a:b][choose_positions(generator, *host[:, a:b])])
    return cohort.subset(np.flatnonzero(np.isin(cohort.host_index.virtual_clients, np.concatenate(selected))))
