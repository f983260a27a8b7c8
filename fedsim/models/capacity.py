"""Capacities: how much of the model each client holds. Clients with weaker devices train narrower networks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import OneOf, Positive, PositiveFraction, Validated
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation

CHANNEL_SELECTIONS = ("first", "rolling", "random")
WIDTH_ASSIGNMENTS = ("random", "size")


class Capacity(Validated, ABC):
    """Chooses channels of the hidden layers for each client and round, as a pure function of seed, client and round."""

    active = True

    def setup(self, federation: Federation) -> None:
        """Determine how much each client can hold."""

    @abstractmethod
    def held_channels(self, cohort: Cohort, widths: Sequence[int], t: int) -> tuple[list[Tensor], Tensor]:
        """Return the channels that a cohort's clients hold in round t.

        Args:
            cohort: n rows.
            widths: number of channels of each hidden layer.
            t: round.

        Returns:
            Sets of channels, [k, channels] bool of each hidden layer, and [n] int64 which of the k each row holds.
        """


class FullCapacity(Capacity):
    """All clients hold the whole model."""

    active = False

    def held_channels(self, cohort: Cohort, widths: Sequence[int], t: int) -> tuple[list[Tensor], Tensor]:
        return [torch.ones(1, width, dtype=torch.bool) for width in widths], torch.zeros_like(cohort.rows)


class Widths(Capacity):
    """A client of width r holds ⌈r·C⌉ of the C channels of each hidden layer.

    Args:
        widths: the widths that occur, in (0, 1].
        shares: how common each is, up to a factor; None: equally.
        assign: 'random': clients draw their widths, by seed; 'size': those with more samples have larger ones.
        channels: 'first': the first ones (HeteroFL: Diao et al., ICLR 2021); 'rolling': a window that moves on by one
            channel a round (FedRolex: Alam et al., NeurIPS 2022); 'random': drawn for each client and round (federated
            dropout: Caldas et al., 2018).
        redraw: in each round a client trains one of the widths up to its own, drawn uniformly (FjORD: Horváth et al.,
            NeurIPS 2021, who draw for each step).
    """

    effective_if = (
        EffectiveIf("shares", lambda component, run: len(component.widths) > 1, "several {at}.widths"),
        EffectiveIf("assign", lambda component, run: len(component.widths) > 1, "several {at}.widths"),
        EffectiveIf("redraw", lambda component, run: len(component.widths) > 1, "several {at}.widths"),
        EffectiveIf("channels", lambda component, run: min(component.widths) < 1, "{at}.widths below 1"),
    )

    def __init__(
        self,
        widths: Sequence[PositiveFraction] = (1.0, 0.5, 0.25),
        shares: Sequence[Positive] | None = None,
        assign: Annotated[str, OneOf(*WIDTH_ASSIGNMENTS)] = "random",
        channels: Annotated[str, OneOf(*CHANNEL_SELECTIONS)] = "first",
        redraw: bool = False,
    ) -> None:
        if not len(widths):
            raise ConfigError("{widths}=[] must name at least one width, such as [1, 0.5]", mentions=("widths",))
        if shares is not None and len(shares) != len(widths):
            raise ConfigError(
                f"{{shares}} has {len(shares)} entries, but there are {len(widths)} {{widths}}; give one for each",
                mentions=("shares", "widths"),
            )
        self.widths, self.shares = tuple(widths), shares
        self.assign, self.channels, self.redraw = assign, channels, redraw

    def setup(self, federation: Federation) -> None:
        order = np.argsort(self.widths, kind="stable")
        self.ascending = np.asarray(self.widths, dtype=np.float64)[order]
        shares = [1.0] * len(order) if self.shares is None else [self.shares[k] for k in order]
        self.level = levels_of_clients(federation, shares, self.assign, rng.Purpose.CAPACITY)

    def held_channels(self, cohort: Cohort, widths: Sequence[int], t: int) -> tuple[list[Tensor], Tensor]:
        level = self.level[cohort.virtual_client_index]
        if self.redraw:
            keys = rng.row_keys(cohort.seed, rng.Purpose.WIDTH, cohort.client_index, t)
            level = rng.integers(keys, torch.zeros_like(level), level + 1)
        if self.channels == "random":
            return [
                self._random_channels(cohort, level, width, (t, layer)) for layer, width in enumerate(widths)
            ], torch.arange(len(level), device=level.device)
        first_channel = t if self.channels == "rolling" else 0
        return [self._channel_windows(width, first_channel).to(level.device) for width in widths], level

    def _held_channel_counts(self, width: int) -> list[int]:
        """Return how many of so many channels a client of each width holds."""
        return [math.ceil(round(share * width, 9)) for share in self.ascending]

    def _channel_windows(self, width: int, first_channel: int) -> Tensor:
        """Return [k, width]: for each width the channels from `first_channel` on, cyclically."""
        position = (torch.arange(width) - first_channel) % width
        return position[None] < torch.tensor(self._held_channel_counts(width))[:, None]

    def _random_channels(self, cohort: Cohort, level: Tensor, width: int, counters: tuple[int, int]) -> Tensor:
        """Return [n, width]: for each row as many channels as it holds, drawn without replacement."""
        keys = rng.row_keys(cohort.seed, rng.Purpose.CHANNEL, cohort.client_index, *counters)
        uniform_numbers = rng.uniform(keys[:, None], torch.arange(width, device=keys.device))
        ranks = uniform_numbers.argsort(dim=1, stable=True).argsort(dim=1)
        return ranks < torch.tensor(self._held_channel_counts(width), device=keys.device)[level][:, None]


def levels_of_clients(federation: Federation, shares: Sequence[float], assign: str, purpose: rng.Purpose) -> Tensor:
    """Return the level of each client, [R·m] int64, for levels with these shares of the clients, up to a factor.

    Args:
        federation: the clients.
        shares: of each level, in ascending order.
        assign: 'random': levels are drawn, by seed; 'size': clients with more samples have higher ones.
        purpose: of the draws.
    """
    m, relative = federation.clients, np.asarray(shares, dtype=np.float64)
    # the k-th of m clients in ascending order has the level in whose share (k + ½)/m lies
    levels = np.searchsorted(np.cumsum(relative / relative.sum())[:-1], (np.arange(m) + 0.5) / m, side="right")
    if assign == "size":
        sizes = federation.num_samples.reshape(federation.num_replicates, m)
        ascending_rank = np.argsort(np.argsort(sizes, axis=1, kind="stable"), axis=1, kind="stable")
    else:
        ascending_rank = rng.draws_by_seed(federation.seeds, lambda draw: draw.permutation(m), purpose)
    return torch.as_tensor(levels[ascending_rank].reshape(-1)).to(federation.device)
