"""Groups of clients that are available in turn, in a fixed order or in a new one in every cycle."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fedsim.availability.availability import Availability, Population, client_groups
from fedsim.core import rng
from fedsim.core.constraints import Count, OneOf
from fedsim.core.errors import ClientCountError, ConfigError

RESHUFFLE_MODES = ("none", "order", "members")


class Cyclic(Availability):
    """Groups of clients take turns: group (t // length) mod groups is available, all others are not.

    With `k`, k clients of the available group participate, drawn uniformly without replacement in each round (Cho et
    al. 2023, CyCP). A cycle has length · groups rounds; if the order is redrawn in every cycle, p_i^t is the
    probability over orders: 1/groups, times k over the size of the group.

    Args:
        groups: number of groups; client i belongs to group ⌊i · groups / m⌋.
        length: rounds per turn.
        reshuffle: none: the same order in every cycle; order: a new order of groups in every cycle; members: clients
            are also assigned to groups anew in every cycle.
        k: number of clients of the group that participate in a round; null: all.
    """

    law = "cyclic"

    def __init__(
        self,
        groups: Count = 5,
        length: Count = 1,
        reshuffle: Annotated[str, OneOf(*RESHUFFLE_MODES)] = "none",
        k: Count | None = None,
    ) -> None:
        self.groups = groups
        self.length = length
        self.reshuffle = reshuffle
        self.k = k

    def setup(self, population: Population) -> None:
        m = population.clients
        if self.groups > m:
            raise ClientCountError(f"availability.groups={self.groups} exceeds {{clients}}", clients=m)
        if self.k is not None and self.k > m // self.groups:
            raise ConfigError(
                f"availability.k={self.k} exceeds the {m // self.groups} clients of the smallest of "
                f"availability.groups={self.groups}"
            )
        super().setup(population)
        self._group = client_groups(m, self.groups)

    def probabilities(self, t: int) -> np.ndarray:
        if self.reshuffle == "members":  # by symmetry, since groups of unequal size are in random order as well
            mean = self.population.clients / self.groups if self.k is None else self.k
            return np.full(self.population.shape, mean / self.population.clients)
        group_probability = (
            self._availability_mask(t) if self.reshuffle == "none" else np.full(self.population.shape, 1 / self.groups)
        )
        sizes = np.bincount(self._group)
        return group_probability * (1.0 if self.k is None else self.k / sizes[self._group])

    def counts(self, t: int) -> np.ndarray:
        present_mask = self._availability_mask(t)
        if self.k is None:
            return present_mask.astype(np.int8)
        counts = np.zeros(present_mask.shape, dtype=np.int8)
        for replicate, seed in enumerate(self.population.seeds):
            draw = rng.generator(seed, rng.Purpose.AVAILABILITY, t)
            counts[
                replicate, draw.choice(np.flatnonzero(present_mask[replicate]), self.k, replace=False, shuffle=False)
            ] = 1
        return counts

    def _availability_mask(self, t: int) -> np.ndarray:
        """Return [R, m], which clients are available."""
        cycle_index, group_turn = divmod(t // self.length, self.groups)
        if self.reshuffle == "none":
            return np.broadcast_to(self._group == group_turn, self.population.shape)

        def draw_present_mask(draw: np.random.Generator) -> np.ndarray:
            group = draw.permutation(self.groups)[group_turn]
            members = draw.permutation(self._group) if self.reshuffle == "members" else self._group
            return np.asarray(members == group)

        return rng.draws_by_seed(self.population.seeds, draw_present_mask, rng.Purpose.TURNS, cycle_index)
