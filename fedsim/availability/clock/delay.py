"""Delays of updates in rounds: distributions, drawn when an update starts."""

from __future__ import annotations

import numpy as np

from fedsim.availability.availability import expand_group_values
from fedsim.core import rng
from fedsim.core.constraints import CountOrZero, NonNegative, Positive, Validated
from fedsim.core.effects import StopsTraining
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation


class Delay(Validated):
    """The interface: an integer number of rounds for every client and round, a pure function of seed, round and
    client.
    """

    active = True
    federation: Federation

    def setup(self, federation: Federation) -> None:
        """Set up the delay for the federation; refuse impossible settings."""
        self.federation = federation

    def rounds(self, t: int, virtual_clients: np.ndarray) -> np.ndarray:
        """Return [n] int64, by how many rounds the updates of these virtual clients that start in round t are late;
        0: not late."""
        raise NotImplementedError

    def uniforms(self, t: int, virtual_clients: np.ndarray) -> np.ndarray:
        """Return uniform numbers in [0, 1) of these clients in round t, [n]."""
        m = self.federation.clients
        draws = rng.draws_by_seed(self.federation.seeds, lambda draw: draw.random(m), rng.Purpose.DELAY, t)
        return draws.reshape(-1)[virtual_clients]

    def values_per_client(self, key: str, values: list[float], virtual_clients: np.ndarray) -> np.ndarray:
        """Return [n] the values of a setting that is given for all clients, or for groups of them."""
        m = self.federation.clients
        return expand_group_values(key, values, m)[virtual_clients % m]


class NoDelay(Delay):
    """Updates arrive in the round in which they started."""

    active = False


class ConstantDelay(Delay):
    """A constant delay.

    Args:
        rounds: number of rounds; a list has one value per group of clients, in order.
    """

    stops_training = (
        StopsTraining(
            "rounds",
            lambda component, run: min(component.delay_values) >= run.rounds,
            "what clients begin arrives after the run's last round; give fewer, or more rounds",
            attribute="settings.rounds",
        ),
    )

    def __init__(self, rounds: CountOrZero | list[CountOrZero] = 1) -> None:
        delays = rounds if isinstance(rounds, (list, tuple)) else [rounds]
        self.settings = {"rounds": rounds}
        self.delay_values = [float(delay) for delay in delays]

    def setup(self, federation: Federation) -> None:
        super().setup(federation)
        expand_group_values("delay.rounds", self.delay_values, federation.clients)

    def rounds(self, t: int, virtual_clients: np.ndarray) -> np.ndarray:
        return self.values_per_client("delay.rounds", self.delay_values, virtual_clients).astype(np.int64)


class _DelayWithMean(Delay):
    def __init__(self, mean: Positive | list[Positive] = 2.0) -> None:
        self.mean = list(mean) if isinstance(mean, (list, tuple)) else [mean]

    def setup(self, federation: Federation) -> None:
        super().setup(federation)
        expand_group_values("delay.mean", self.mean, federation.clients)


class GeometricDelay(_DelayWithMean):
    """P(k) = (1 − q) q^k for k = 0, 1, …, with mean q / (1 − q): in each round an update in flight arrives with
    probability 1 − q.

    Args:
        mean: in rounds; a list has one value per group of clients, in order.
    """

    def rounds(self, t: int, virtual_clients: np.ndarray) -> np.ndarray:
        mean = self.values_per_client("delay.mean", self.mean, virtual_clients)
        return np.floor(np.log1p(-self.uniforms(t, virtual_clients)) / np.log(mean / (1 + mean))).astype(np.int64)


class UniformDelay(Delay):
    """Uniform on least, …, most.

    Args:
        least, most: in rounds.
    """

    stops_training = (
        StopsTraining(
            "least",
            lambda component, run: component.least >= run.rounds,
            "what clients begin arrives after the run's last round; give fewer, or more rounds",
        ),
    )

    def __init__(self, least: CountOrZero = 0, most: CountOrZero = 4) -> None:
        self.least, self.most = least, most
        if self.least > self.most:
            raise ConfigError(key="least", value=least, needs=f"exceeds {{most}}={most}; swap them", mentions=("most",))

    def rounds(self, t: int, virtual_clients: np.ndarray) -> np.ndarray:
        return self.least + np.floor(self.uniforms(t, virtual_clients) * (self.most - self.least + 1)).astype(np.int64)


class LognormalDelay(_DelayWithMean):
    """⌊X⌋ of a log-normal X.

    Args:
        mean: mean of X, in rounds; a list has one value per group of clients, in order.
        spread: its coefficient of variation.
    """

    def __init__(self, mean: Positive | list[Positive] = 2.0, spread: NonNegative = 1.0) -> None:
        super().__init__(mean)
        self.spread = spread

    def rounds(self, t: int, virtual_clients: np.ndarray) -> np.ndarray:
        from scipy.special import ndtri  # imported here: other distributions do not need it

        sigma = np.sqrt(np.log1p(self.spread**2))
        normal = ndtri(np.clip(self.uniforms(t, virtual_clients), 1e-300, None))
        draws = self.values_per_client("delay.mean", self.mean, virtual_clients) * np.exp(sigma * normal - sigma**2 / 2)
        return np.floor(draws).astype(np.int64)
