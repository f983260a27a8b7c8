"""A virtual clock: computing and communication times, the duration of a round, and late clients.

It decides nothing else: every algorithm meets the same times for a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedsim.availability import Availability
from fedsim.availability.availability import by_group
from fedsim.core import rng
from fedsim.core.constraints import Count, NonNegative, OneOf, Positive, Validated
from fedsim.core.effects import Declarations, EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation

LATE_POLICIES = ("drop", "partial", "deliver")


@dataclass
class Times:
    """Durations of n clients in a round, in virtual seconds (host).

    Attributes:
        link: [n] for what is sent, down and up together.
        sample: [n] for a training sample.
    """

    link: np.ndarray
    sample: np.ndarray


class Clock(Validated):
    """The contract.

    Attributes:
        active: whether virtual time goes by at all.
        server: seconds that a round takes beside its clients.
        deadline: seconds after which the server waits for nobody; None: it waits for all.
        first: how many it waits for, of those it asked; None: all.
        late: what becomes of those who would not be done by the deadline.
    """

    active: bool = True
    server: float = 0.0
    deadline: float | None = None
    first: int | None = None
    late: str = "drop"

    @property
    def asynchronous(self) -> bool:
        """Does the server step after a number of arrivals, whichever clients they come from?"""
        return False

    @property
    def may_drop_clients(self) -> bool:
        """May somebody who was asked not count?"""
        return self.first is not None or (self.deadline is not None and not self.delivers_late_rows)

    @property
    def delivers_late_rows(self) -> bool:
        """Does what is late arrive in a later round?"""
        return self.late == "deliver" and self.deadline is not None

    def setup(self, federation: Federation) -> None:
        """Fix who exists."""

    def times(self, t: int, virtual: np.ndarray, down: int, up: int) -> Times:
        """What virtual clients take in round t, who get and send so many bytes each."""
        raise NotImplementedError

    def chance(self, times: Times, virtual: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """[n] the probability of being done with so many samples [n] by the deadline."""
        raise NotImplementedError


class NoClock(Clock):
    """Rounds take no time."""

    active = False


class Devices(Clock):
    """Client i takes T_i = bytes down / down_i + samples · compute_i · J_i^t + bytes up / up_i virtual seconds. Speeds
    are drawn once, log-normal around the given values; the jitter J_i^t is drawn in every round, log-normal with mean
    1.

    A round lasts until the slowest client that the server waits for has finished, or until the deadline if a client is
    late; a round without selected clients lasts until the deadline, or takes no time without one. Late clients received
    the model, send nothing, and are treated as absent. With `first`, only that number of fastest clients counts, and
    the round ends with the last of them: over-selection is `availability.k` above `clock.first`.

    A sample takes its time once in each local step, independent of the local rule: double `compute` for a rule that
    computes two gradients per sample. Computation that strategies request in addition to local training takes no time.

    Args:
        compute: seconds per training sample, forward and backward; a list has one value per group of clients, in order.
        compute_spread: coefficient of variation of the clients' speeds.
        jitter: coefficient of variation of the time for the same work from round to round.
        down, up: bytes per second to and from a client; lists as `compute`; null: no transfer time.
        link_spread: coefficient of variation of the clients' bandwidths, with the same factor in both directions.
        server: additional seconds per round at the server.
        deadline: seconds from the start of the round; null: the server waits for all.
        first: number of clients that the server waits for; null: all selected clients.
        late: 'drop': a client that would miss the deadline is absent; 'partial': it takes as many steps as there is
            time for (stragglers of FedProx and FedNova), and is absent if there is time for none; 'deliver': it
            continues, and its update arrives in the round in which it finishes; every round lasts as long as the
            deadline, which is then the clock tick of an asynchronous server.
    """

    effective_if: Declarations = (
        EffectiveIf("link_spread", lambda component, run: component.down or component.up, "{at}.down or {at}.up"),
        EffectiveIf("late", lambda component, run: component.deadline is not None, "{at}.deadline"),
    )

    def __init__(  # noqa: PLR0913 (the parameters are configuration keys)
        self,
        compute: Positive | list[Positive] = 0.001,
        compute_spread: NonNegative = 0.0,
        jitter: NonNegative = 0.0,
        down: Positive | list[Positive] | None = None,
        up: Positive | list[Positive] | None = None,
        link_spread: NonNegative = 0.0,
        server: NonNegative = 0.0,
        deadline: Positive | None = None,
        first: Count | None = None,
        late: Annotated[str, OneOf(*LATE_POLICIES)] = "drop",
    ) -> None:
        self.compute = _has_several_values(compute)
        self.down = None if down is None else _has_several_values(down)
        self.up = None if up is None else _has_several_values(up)
        self.compute_spread = compute_spread
        self.jitter = jitter
        self.link_spread = link_spread
        self.server = server
        self.deadline = deadline
        self.first = first
        self.late = late
        if self.delivers_late_rows and self.first is not None:
            raise ConfigError(
                "{first} and {late}=deliver exclude each other; give {first}=null",
                mentions=("first", "late"),
            )

    def setup(self, federation: Federation) -> None:
        seeds, m = federation.seeds, federation.clients
        self.seeds, self.clients = seeds, m
        if self.first is not None and self.first > m:
            raise ConfigError(f"clock.first={self.first} exceeds clients={m}; lower it, or give null")
        draws = rng.draws_by_seed(seeds, lambda draw: draw.standard_normal((2, m)), rng.Purpose.CLOCK)
        slow, fastest = (
            _lognormal_numbers(self.compute_spread, draws[:, 0]),
            _lognormal_numbers(self.link_spread, draws[:, 1]),
        )
        self.sample = (by_group("clock.compute", self.compute, m) * slow).reshape(-1)
        link_speeds = (("clock.down", self.down), ("clock.up", self.up))
        self.byte = [
            np.zeros(len(seeds) * m) if rate is None else (1 / (by_group(key, rate, m) * fastest)).reshape(-1)
            for key, rate in link_speeds
        ]

    def times(self, t: int, virtual: np.ndarray, down: int, up: int) -> Times:
        sample = self.sample[virtual]
        if self.jitter:
            normals = rng.draws_by_seed(
                self.seeds, lambda draw: draw.standard_normal(self.clients), rng.Purpose.CLOCK, t
            )
            sample = sample * _lognormal_numbers(self.jitter, normals.reshape(-1)[virtual])
        return Times(down * self.byte[0][virtual] + up * self.byte[1][virtual], sample)

    def chance(self, times: Times, virtual: np.ndarray, samples: np.ndarray) -> np.ndarray:
        if self.deadline is None:
            return np.ones(len(virtual))
        remaining_time, needed_time = self.deadline - times.link, samples * self.sample[virtual]
        if not self.jitter:
            return (needed_time <= remaining_time).astype(float)
        from scipy.special import ndtr  # here: other clocks need not wait for it

        sigma = _lognormal_sigma(self.jitter)
        with np.errstate(divide="ignore", invalid="ignore"):
            probability = ndtr(np.log(remaining_time / needed_time) / sigma + sigma / 2)
        return np.where(remaining_time > 0, probability, 0.0)


class DeadlineFilter(Availability):
    """The availability process that results from a clock that drops clients; for its probabilities, not for draws.

    Args:
        process: which clients are selected.
        clock: which of them are in time.
    """

    law = "in time"

    def __init__(self, process: Availability, clock: Clock) -> None:
        reason = f"counts the first clock.first={clock.first} that are done, so participation probabilities are unknown"
        self.process, self.unknown_reason = process, process.unknown_reason or (reason if clock.first else "")
        self.population, self.federation = process.population, process.federation

    @classmethod
    def unless_all_count(cls, process: Availability, clock: Clock | None) -> Availability:
        """The process itself where nobody is left out."""
        return cls(process, clock) if clock is not None and clock.may_drop_clients else process

    def probabilities(self, t: int) -> np.ndarray:
        return self.process.probabilities(t)

    def counts(self, t: int) -> np.ndarray:
        return self.process.counts(t)


def _has_several_values(value: float | list[float]) -> list[float]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _lognormal_sigma(spread: float) -> float:
    """Of a log-normal variable with this coefficient of variation."""
    return float(np.sqrt(np.log1p(spread**2)))


def _lognormal_numbers(spread: float, normal: np.ndarray) -> np.ndarray:
    """Of mean 1 and this coefficient of variation, from standard normal numbers."""
    sigma = _lognormal_sigma(spread)
    return np.asarray(np.exp(sigma * normal - sigma**2 / 2))
