"""The interface of an uplink stage: transforms the rows that clients send, and counts their bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core import rng
from fedsim.core.constraints import Validated
from fedsim.core.federation import Cohort, Federation
from fedsim.core.memory import Memory


@dataclass(frozen=True)
class Encoding:
    """The encoding of a row: so many `values` of so many `bits`, and further bytes.

    Attributes:
        values: numbers that are sent of a row.
        bits: of each of them.
        index_bytes: bytes that say which columns they belong to.
        extra_bytes: bytes of single numbers, such as a norm.
    """

    values: int
    bits: int
    index_bytes: int = 0
    extra_bytes: int = 0

    @property
    def bytes(self) -> int:
        """The bytes of the whole row; bits are packed, and the last byte is filled up."""
        return -(-self.values * self.bits // 8) + self.index_bytes + self.extra_bytes


class StageContext:
    """A stage's view of a round: the sending clients, random numbers, and its memory.

    Args:
        cohort: the clients that send, one for each row.
        memory: of the run.
        stage: the stage's number in its chain, from 0.
    """

    def __init__(self, cohort: Cohort, memory: Memory, stage: int) -> None:
        self.cohort, self._memory, self._stage = cohort, memory, stage

    @property
    def keys(self) -> Tensor:
        """[n] int64 the random key of each row: of its seed, its client, the round and the stage."""
        cohort = self.cohort
        return rng.row_keys(cohort.seed, rng.Purpose.UPLINK, cohort.client_index, cohort.round, self._stage)

    @property
    def server_keys(self) -> Tensor:
        """[R] int64 the random key of each replicate's server in this round and stage."""
        seeds = self.cohort.federation.seed_of_replicate
        no_client = torch.full_like(seeds, -1)
        return rng.row_keys(seeds, rng.Purpose.UPLINK, no_client, self.cohort.round, self._stage)

    @property
    def round_independent_keys(self) -> Tensor:
        """[R] int64 the random key of each replicate and stage, the same in every round."""
        seeds = self.cohort.federation.seed_of_replicate
        return rng.row_keys(seeds, rng.Purpose.UPLINK, torch.full_like(seeds, -1), -1, self._stage)

    def gather(self, name: str) -> Tensor:
        """Return [n, …], the memory of the cohort's clients under this name."""
        return self.cohort.gather(self._memory.uplink[f"{self._stage} {name}"])

    def scatter(self, name: str, rows: Tensor) -> None:
        """Write the memory of the cohort's clients, in place."""
        self.cohort.scatter(self._memory.uplink[f"{self._stage} {name}"], rows)

    def server(self, name: str) -> Tensor:
        """Return [R, …], the memory of each replicate under this name; it may be written to."""
        return self._memory.server[f"uplink {self._stage} {name}"]


class Stage(Validated, ABC):
    """A transformation of each client's row between local training and aggregation.

    A row is G_i = start − end of a client that takes part. Random numbers are functions of `StageContext.keys`; what is
    remembered is what `memory` and `initial_server_memory` name.
    """

    def setup(self, federation: Federation, availability: Availability, earlier_stages: Sequence[Stage]) -> None:
        """Set up the stage for the federation and for `earlier_stages`; refuse impossible settings."""

    def memory(self, federation: Federation, dimension: int) -> dict[str, Tensor]:
        """Return name → [R·m', …], the memory of all clients before round 0. Absent clients keep theirs."""
        return {}

    def initial_server_memory(self, federation: Federation, dimension: int) -> dict[str, Tensor]:
        """Return name → [R, …], the memory of all replicates before round 0."""
        return {}

    def code(self, code: Encoding, plain_encoding: Encoding) -> Encoding:
        """Return the encoding of a row after this stage, given that before it and that of an unchanged row; by
        default unchanged."""
        return code

    @abstractmethod
    def __call__(self, rows: Tensor, link: StageContext) -> Tensor:
        """Return the rows [n, d] that arrive; n may be 0, on this or another rank."""
