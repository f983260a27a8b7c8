"""Partial work: how many of a round's local steps each client completes."""

from __future__ import annotations

import numpy as np

from fedsim.core import rng
from fedsim.core.constraints import Count, Validated
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.samples import LocalWork, Workload


class Work(Validated):
    """The interface: a number of steps for every row and round, a pure function of seeds, round and client."""

    active = True

    def setup(self, federation: Federation, work: LocalWork) -> None:
        """Fix who exists and what a round asks of them; refuse what makes no sense."""

    def steps(self, t: int, virtual: np.ndarray, load: Workload) -> np.ndarray:
        """[n] steps that these virtual clients do in round t, where `load.steps` are asked; at least one."""
        return load.steps


class AllWork(Work):
    """All clients complete all steps."""

    active = False


class UniformWork(Work):
    """The number of steps (or of epochs, with `local_epochs`) is drawn uniformly from `least` to all, for each client
    and round. The stragglers of FedNova (Wang et al., NeurIPS 2020) do 2 to 5 epochs.

    Args:
        least: minimal number of steps, or of epochs.
    """

    def __init__(self, least: Count = 1) -> None:
        self.least = least

    def setup(self, federation: Federation, work: LocalWork) -> None:
        self.federation, self.by_pass = federation, work.epochs is not None
        key, maximum = ("local_epochs", work.epochs) if self.by_pass else ("local_steps", work.steps)
        assert maximum is not None
        if self.least > maximum:
            raise ConfigError(f"work.least={self.least} exceeds {key}={maximum}; lower it")

    def steps(self, t: int, virtual: np.ndarray, load: Workload) -> np.ndarray:
        seeds, m = self.federation.seeds, self.federation.clients
        u = rng.draws_by_seed(seeds, lambda draw: draw.random(m), rng.Purpose.WORK, t).reshape(-1)[virtual]
        unit = load.per_pass if self.by_pass else np.ones_like(load.steps)
        drawn_units = self.least + np.floor(u * (load.steps // unit - self.least + 1)).astype(np.int64)
        return np.asarray(drawn_units * unit)


class GeometricWork(Work):
    """All clients of a replicate do the same number of local steps, drawn anew in every round: those until a coin that
    falls so with probability 1/local_steps ends it. Scaffnew's rounds (Mishchenko et al., ICML 2022)."""

    def setup(self, federation: Federation, work: LocalWork) -> None:
        if work.steps is None:
            raise ConfigError(f"work=geometric counts local steps, and local_epochs={work.epochs}; give local_steps")
        self.federation, self.chance = federation, 1 / work.steps

    def steps(self, t: int, virtual: np.ndarray, load: Workload) -> np.ndarray:
        seeds, m = self.federation.seeds, self.federation.clients
        drawn_units = rng.draws_by_seed(seeds, lambda draw: draw.geometric(self.chance), rng.Purpose.WORK, t)
        return np.asarray(drawn_units[virtual // m])
