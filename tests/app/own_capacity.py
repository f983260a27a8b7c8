"""Somebody's own capacities, for `capacity=custom`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.core.constraints import PositiveFraction
from fedsim.core.federation import Cohort
from fedsim.models.capacity import Capacity


class EvenClients(Capacity):
    """Clients of even numbers hold the first share of each layer's channels, the others the whole model."""

    def __init__(self, share: PositiveFraction = 0.5) -> None:
        self.share = share

    def held_channels(self, cohort: Cohort, widths: Sequence[int], t: int) -> tuple[list[Tensor], Tensor]:
        sets = [
            torch.stack([torch.ones(width, dtype=torch.bool), torch.arange(width) < self.share * width])
            for width in widths
        ]
        return sets, 1 - cohort.client_index % 2


class Drawn(EvenClients):
    """Draws from a global stream."""

    def held_channels(self, cohort: Cohort, widths: Sequence[int], t: int) -> tuple[list[Tensor], Tensor]:
        sets, index = super().held_channels(cohort, widths, t)
        return [channels & (torch.rand(channels.shape) < 0.5) for channels in sets], index


class Counted(EvenClients):
    """Holds other channels at each call."""

    calls = 0

    def held_channels(self, cohort: Cohort, widths: Sequence[int], t: int) -> tuple[list[Tensor], Tensor]:
        self.calls += 1
        sets, index = super().held_channels(cohort, widths, t)
        return [channels.roll(self.calls, 1) for channels in sets], index


class OneSet(EvenClients):
    """Returns the sets alone."""

    def held_channels(self, cohort: Cohort, widths: Sequence[int], t: int) -> tuple[list[Tensor], Tensor]:
        return super().held_channels(cohort, widths, t)[0]  # type: ignore[return-value]
