"""The contract of a contamination: it sees a gathered batch before the shift and replaces some of its samples."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from fedsim.federation import Federation


class Contamination(ABC):
    """Replaces samples of the clients' batches."""

    active = True

    def setup(self, federation: Federation) -> None:
        """Fix which clients are contaminated, and how much."""

    @abstractmethod
    def __call__(self, batch: dict[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        """Contaminate a batch of c clients.

        Args:
            batch: 'x' [c, B, …], 'y' [c, B, …], 'client' [c].
            keys: [c] int64, one per client and step.
        """


class NoContamination(Contamination):
    """Every sample is genuine."""

    active = False

    def __call__(self, batch: dict[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        return batch
