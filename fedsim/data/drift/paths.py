"""Paths of drifts: the displacement s(t) of the samples in round t."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.core import rng
from fedsim.core.constraints import CountOrZero, Fraction, NonNegativePerSeed, Positive, RealPerSeed
from fedsim.core.effects import EffectiveIf, RoundParameter
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.per_seed import as_per_seed
from fedsim.data.datasets import Dataset
from fedsim.data.drift.drift import Drift, of_replicates


class Linear(Drift):
    """s(t) = speed · t.

    Args:
        speed: displacement per round; a list: one number per seed.
        **options: of every drift.
    """

    def __init__(self, speed: RealPerSeed = 0.01, **options: Any) -> None:
        super().__init__(**options)
        self.speed = as_per_seed(speed)

    def path(self, t: np.ndarray, replicate: np.ndarray) -> np.ndarray:
        return of_replicates(self.speed, replicate) * t.astype(np.float64)


class Cyclic(Drift):
    """s(t) = amplitude · sin(2π (t / period + phase)).

    Args:
        amplitude: largest displacement; a list: one number per seed.
        period: rounds of a cycle.
        phase: fraction of a cycle at round 0; 0.25 starts at the largest displacement.
        **options: of every drift.
    """

    def __init__(
        self, amplitude: RealPerSeed = 1.0, period: Positive = 100.0, phase: Fraction = 0.0, **options: Any
    ) -> None:
        super().__init__(**options)
        self.amplitude, self.period, self.phase = as_per_seed(amplitude), period, phase

    def path(self, t: np.ndarray, replicate: np.ndarray) -> np.ndarray:
        num_cycles = t.astype(np.float64) / self.period + self.phase
        return of_replicates(self.amplitude, replicate) * np.sin(2 * np.pi * num_cycles)


class Abrupt(Drift):
    """s(t) = size · (number of changes up to round t), or size and 0 in turns.

    Args:
        size: displacement of a change; a list: one number per seed.
        at: rounds in which the data change.
        alternate: whether each second change undoes the one before it.
        **options: of every drift.
    """

    effective_if = (RoundParameter("at", measured=True),)

    def __init__(
        self,
        size: RealPerSeed = 1.0,
        at: Sequence[CountOrZero] = (50,),
        alternate: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.size, self.at, self.alternate = as_per_seed(size), at, alternate
        if not len(at):
            raise ConfigError(key="at", value=[], needs="names no round in which the data change; use drift=none")
        self._change_rounds = np.sort(np.asarray(at, dtype=np.int64))

    def path(self, t: np.ndarray, replicate: np.ndarray) -> np.ndarray:
        count = np.searchsorted(self._change_rounds, t, side="right")
        return of_replicates(self.size, replicate) * (count % 2 if self.alternate else count).astype(np.float64)


class RandomWalk(Drift):
    """s(t + 1) = (1 − reversion) s(t) + std · n_t with s(0) = 0 and standard normal n_t, which are drawn by the
    replicate's seed.

    Args:
        std: standard deviation of a step; a list: one number per seed.
        reversion: 0: a random walk; above 0, an autoregressive process, with variance std² / (1 − (1 − reversion)²) at
            rest.
        **options: of every drift.
    """

    def __init__(self, std: NonNegativePerSeed = 0.1, reversion: Fraction = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.std, self.reversion = as_per_seed(std), reversion
        self._positions = np.zeros((1, 1))  # [T, R] of std = 1

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        super().setup(federation, dataset)
        self._positions = np.zeros((1, len(federation.seeds)))

    def path(self, t: np.ndarray, replicate: np.ndarray) -> np.ndarray:
        self._walk_to(int(t.max(initial=0)))
        return of_replicates(self.std, replicate) * self._positions[t, replicate]

    def _walk_to(self, t: int) -> None:
        """Draw the steps up to round t, each by its own round, so that it does not matter which was asked for first."""
        num_known_positions = len(self._positions)
        if t < num_known_positions:
            return
        positions = np.concatenate(
            [
                self._positions,
                np.zeros((max(t + 1 - num_known_positions, num_known_positions), self._positions.shape[1])),
            ]
        )
        for step in range(num_known_positions, len(positions)):
            normal_draws = rng.draws_by_seed(self.seeds, lambda draws: draws.standard_normal(), rng.Purpose.DRIFT, step)
            positions[step] = (1 - self.reversion) * positions[step - 1] + normal_draws
        self._positions = positions


class ByClient(Drift):
    """Client i's samples are displaced by `size` from round t_i on: staggered drift, as in FedDrift (Jothimurugesan et
    al. 2023). The t_i are spread evenly from `first` to `last`, in an order that is drawn.

    Args:
        size: displacement; a list: one number per seed.
        first, last: rounds of the first and of the last client's change.
        rounds_of_clients: explicit t_i, one per client.
        **options: of every drift.
    """

    effective_if = (
        *(
            EffectiveIf(
                name,
                lambda component, run: component.rounds_of_clients is None,
                "{at}.rounds_of_clients=null, which gives all rounds",
            )
            for name in ("first", "last")
        ),
        RoundParameter("first", measured=True),
        RoundParameter("rounds_of_clients", measured=True, per_client=True),
    )

    def __init__(
        self,
        size: RealPerSeed = 1.0,
        first: CountOrZero = 25,
        last: CountOrZero = 75,
        rounds_of_clients: Sequence[CountOrZero] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.size, self.first, self.last, self.rounds_of_clients = as_per_seed(size), first, last, rounds_of_clients
        if last < first:
            raise ConfigError(key="last", value=last, needs=f"must not be before first={first}")
        self._change_rounds = np.zeros(0, dtype=np.int64)

    @property
    def has_seeded_draws(self) -> bool:
        return super().has_seeded_draws or (self.rounds_of_clients is None and self.last > self.first)

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        super().setup(federation, dataset)
        clients, given_rounds = federation.clients, self.rounds_of_clients
        if given_rounds is None:
            spread = np.rint(np.linspace(self.first, self.last, clients)).astype(np.int64)
            self._change_rounds = rng.generator(self.seed, rng.Purpose.ONSET).permutation(spread)
            return
        if len(given_rounds) != clients:
            raise ConfigError(
                f"drift.rounds_of_clients has {len(given_rounds)} entries, but clients={clients}; give one per client"
            )
        self._change_rounds = np.asarray(given_rounds, dtype=np.int64)

    def path(self, t: np.ndarray, replicate: np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.asarray(of_replicates(self.size, replicate), dtype=np.float64), t.shape)

    def displacement(self, t: np.ndarray, replicate: np.ndarray, client: np.ndarray) -> np.ndarray:
        return np.where(t >= self._change_rounds[client], super().displacement(t, replicate, client), 0.0)
