"""Partial work: how many of a round's local steps each client completes."""

from __future__ import annotations

import math

import numpy as np

from fedsim.core import rng
from fedsim.core.constraints import Count, Fraction, Positive, Validated
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.samples import LocalWork, Workload

POWER_ROUNDING_TOLERANCE = 1e-9  # rounding error up to which a power counts as a whole number


class Work(Validated):
    """The interface: a number of steps for every row and round, a pure function of seeds, round and client."""

    active = True

    def setup(self, federation: Federation, local_work: LocalWork) -> None:
        """Set up the work for the federation and the planned steps of a round; refuse impossible settings."""

    def steps(self, t: int, virtual_clients: np.ndarray, load: Workload) -> np.ndarray:
        """Return [n] the steps that these virtual clients do in round t, out of `load.steps`; at least one."""
        return load.steps


class AllWork(Work):
    """All clients complete all steps."""

    active = False


class UniformWork(Work):
    """The number of steps (or of epochs, with `local_epochs`) is drawn uniformly from `least` to all, for each client
    and round. The stragglers of FedNova (Wang et al., NeurIPS 2020) do 2 to 5 epochs; of FedProx's clients (Li et al.,
    MLSys 2020) 0, 50 or 90 % are stragglers.

    Args:
        least: minimal number of steps, or of epochs.
        fraction: probability with which a client is a straggler in a round; the others do all of the work.
    """

    def __init__(self, least: Count = 1, fraction: Fraction = 1.0) -> None:
        self.least, self.fraction = least, fraction

    def setup(self, federation: Federation, local_work: LocalWork) -> None:
        self.federation, self.by_pass = federation, local_work.epochs is not None
        key, maximum = ("local_epochs", local_work.epochs) if self.by_pass else ("local_steps", local_work.steps)
        assert maximum is not None
        if self.least > maximum:
            raise ConfigError(f"work.least={self.least} exceeds {key}={maximum}; lower it")

    def steps(self, t: int, virtual_clients: np.ndarray, load: Workload) -> np.ndarray:
        seeds, m = self.federation.seeds, self.federation.clients
        draws = rng.draws_by_seed(seeds, lambda draw: draw.random((2, m)), rng.Purpose.WORK, t)
        u, is_straggler = draws.swapaxes(0, 1).reshape(2, -1)[:, virtual_clients]
        unit = load.per_pass if self.by_pass else np.ones_like(load.steps)
        drawn_units = self.least + np.floor(u * (load.steps // unit - self.least + 1)).astype(np.int64)
        return np.where(is_straggler < self.fraction, drawn_units * unit, load.steps)


class GeometricWork(Work):
    """All clients of a replicate do the same number of local steps, drawn anew in every round: those until a coin that
    falls so with probability 1/local_steps ends it. Scaffnew's rounds (Mishchenko et al., ICML 2022)."""

    def setup(self, federation: Federation, local_work: LocalWork) -> None:
        if local_work.steps is None:
            raise ConfigError(
                f"work=geometric counts local steps, and local_epochs={local_work.epochs}; give local_steps"
            )
        self.federation, self.stop_probability = federation, 1 / local_work.steps

    def steps(self, t: int, virtual_clients: np.ndarray, load: Workload) -> np.ndarray:
        seeds, m = self.federation.seeds, self.federation.clients
        drawn_units = rng.draws_by_seed(seeds, lambda draw: draw.geometric(self.stop_probability), rng.Purpose.WORK, t)
        return np.asarray(drawn_units[virtual_clients // m])


class GrowingWork(Work):
    """Round t, counted from 0, has ⌈(t + 1)^power⌉ local steps, at most local_steps. With shift.deploy=round this is
    lazy deployment (Mendler-Dünner et al., NeurIPS 2020): the k-th deployed model stays for n(k) = k^power steps.

    Args:
        power: exponent; 0.5, 1 and 2 in the paper's experiments.
    """

    def __init__(self, power: Positive = 1.0) -> None:
        self.power = power

    def setup(self, federation: Federation, local_work: LocalWork) -> None:
        if local_work.steps is None:
            raise ConfigError(
                f"work=growing counts local steps, and local_epochs={local_work.epochs}; give local_steps"
            )

    def steps(self, t: int, virtual_clients: np.ndarray, load: Workload) -> np.ndarray:
        growing_steps = math.ceil((t + 1) ** self.power - POWER_ROUNDING_TOLERANCE)
        return np.minimum(load.steps, growing_steps)
