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
    """How a row is written: so many `values` of so many `bits`, and beside them bytes.

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
        """Of the whole row; bits are packed, and the last byte is filled up."""
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
    def lasting_keys(self) -> Tensor:
        """[R] int64 the random key of each replicate and stage, the same in every round."""
        seeds = self.cohort.federation.seed_of_replicate
        return rng.row_keys(seeds, rng.Purpose.UPLINK, torch.full_like(seeds, -1), -1, self._stage)

    def gather(self, name: str) -> Tensor:
        """[n, …] what the stage remembers of the cohort's clients under this name."""
        return self.cohort.gather(self._memory.uplink[f"{self._stage} {name}"])

    def scatter(self, name: str, rows: Tensor) -> None:
        """The same from now on, in place."""
        self.cohort.scatter(self._memory.uplink[f"{self._stage} {name}"], rows)

    def server(self, name: str) -> Tensor:
        """[R, …] what the stage remembers of each replicate under this name; written to in place."""
        return self._memory.server[f"uplink {self._stage} {name}"]


class Stage(Validated, ABC):
    """A transformation of each client's row between local training and aggregation.

    A row is G_i = start − end of a client that takes part. Random numbers are functions of `StageContext.keys`; what is
    remembered is what `memory` and `initial_server_memory` name.
    """

    def setup(self, federation: Federation, availability: Availability, earlier_stages: Sequence[Stage]) -> None:
        """Fix what depends on who exists and on the stages `earlier_stages` this one; refuse what makes no sense."""

    def memory(self, federation: Federation, dimension: int) -> dict[str, Tensor]:
        """Name → [R·m', …] what is remembered of every client, as before round 0. The absent keep theirs."""
        return {}

    def initial_server_memory(self, federation: Federation, dimension: int) -> dict[str, Tensor]:
        """Name → [R, …] what is remembered of every replicate, as before round 0."""
        return {}

    def code(self, code: Encoding, plain_encoding: Encoding) -> Encoding:
        """How a row is written after this stage, given how it was before, and how it is with nothing done to it; as
        before unless said."""
        return code

    @abstractmethod
    def __call__(self, rows: Tensor, link: StageContext) -> Tensor:
        """[n, d] what arrives of rows [n, d]; n may be 0, here or on another rank."""
