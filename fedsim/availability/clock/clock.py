"""A virtual clock: computing and communication times, the duration of a round, and late clients.

It decides nothing else: every algorithm meets the same times for a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from fedsim.availability import Availability
from fedsim.availability.availability import expand_group_values
from fedsim.availability.clock.device_table import ENERGY_COLUMNS, OPTIONAL_COLUMNS, DeviceProfiles
from fedsim.core import rng
from fedsim.core.constraints import Count, NonNegative, OneOf, Positive, Validated
from fedsim.core.effects import EffectDeclarations, EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation

LATE_POLICIES = ("drop", "partial", "deliver")
SPEED_LAWS = ("lognormal", "pareto")


def _effective_without_column(parameter_name: str) -> EffectiveIf:
    """A setting has no effect where the table of devices has its column."""
    return EffectiveIf(
        parameter_name,
        lambda component, run: getattr(component.table, parameter_name, None) is None,
        "{at}.devices without such a column",
        f"{parameter_name}_setting",
    )


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

    @property
    def knows_energy_needs(self) -> bool:
        """Whether it is known what energy devices need."""
        return False

    def energy(self, virtual_clients: np.ndarray, seconds: np.ndarray, down: int, up: np.ndarray) -> np.ndarray:
        """[n] joules of virtual clients that compute for some seconds, receive `down` and send `up` bytes [n]."""
        raise NotImplementedError

    @property
    def unknown_reason(self) -> str:
        """Why the probability of being in time is unknown, as the rest of a sentence; '' where it is known."""
        reason = f"counts the first clock.first={self.first} that are done, so participation probabilities are unknown"
        return reason if self.first else ""

    def setup(self, federation: Federation) -> None:
        """Fix who exists."""

    def loaded_arrays(self) -> dict[str, np.ndarray]:
        """What was read from a file, by names of its own: a resumed run must meet the same."""
        return {}

    def times(self, t: int, virtual_clients: np.ndarray, down: int, up: int) -> Times:
        """What virtual clients take in round t, who get and send so many bytes each."""
        raise NotImplementedError

    def finish_probability(self, times: Times, virtual_clients: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """[n] the probability of being done with so many samples [n] by the deadline."""
        raise NotImplementedError


class NoClock(Clock):
    """Rounds take no time."""

    active = False


class Devices(Clock):
    """Client i takes T_i = bytes down / down_i + samples · compute_i · J_i^t + bytes up / up_i virtual seconds. Speeds
    are drawn once: compute_i by `compute_law`, bandwidths log-normal, around the given values or those of the client's
    device in a table. The jitter J_i^t is drawn in every round, log-normal with mean 1.

    A round lasts until the slowest client that the server waits for has finished, or until the deadline if a client is
    late; a round without selected clients lasts until the deadline, or takes no time without one. Late clients received
    the model, send nothing, and are treated as absent. With `first`, only that number of fastest clients counts, and
    the round ends with the last of them: over-selection is `availability.k` above `clock.first`.

    A sample takes its time once in each local step, independent of the local rule: double `compute` for a rule that
    computes two gradients per sample. Computation that strategies request in addition to local training takes no time.

    Args:
        compute: seconds per training sample, forward and backward; a list has one value per group of clients, in order.
        compute_spread: coefficient of variation of the clients' speeds.
        compute_law: distribution of compute_i over clients: 'lognormal', or 'pareto', which has a heavy tail:
            P(compute_i > x) ∝ x^−α with α = 1 + √(1 + 1/c²) for the coefficient of variation c, so that a few clients
            are much slower than the others.
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
        power: watts of a device while it computes; a list as `compute`. With it, or one of the next two, metrics.csv
            has a column `joules`. null: 0.
        joules_down, joules_up: joules per byte that a device receives and sends; lists as `compute`; null: 0.
        devices: table of measured devices, see `fedsim.availability.clock.device_table.DeviceProfiles`, or names of
            profiles, see `fedsim.availability.clock.device_profiles`; it replaces `compute`, and the settings for
            which it has columns. Spreads apply in addition. null: no table.
    """

    effective_if: EffectDeclarations = (
        EffectiveIf("link_spread", lambda component, run: component.links_take_time, "{at}.down or {at}.up"),
        EffectiveIf("late", lambda component, run: component.deadline is not None, "{at}.deadline"),
        EffectiveIf("compute", lambda component, run: component.table is None, "{at}.devices=null", "compute_setting"),
        *(_effective_without_column(name) for name in OPTIONAL_COLUMNS),
        EffectiveIf("compute_law", lambda component, run: component.compute_spread > 0, "{at}.compute_spread above 0"),
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
        compute_law: Annotated[str, OneOf(*SPEED_LAWS)] = "lognormal",
        devices: Any = None,
        power: NonNegative | list[NonNegative] | None = None,
        joules_down: NonNegative | list[NonNegative] | None = None,
        joules_up: NonNegative | list[NonNegative] | None = None,
    ) -> None:
        self.compute_law = compute_law
        self.table = None if devices is None else DeviceProfiles(devices)
        self.compute_setting, self.down_setting, self.up_setting = compute, down, up
        self.power_setting, self.joules_down_setting, self.joules_up_setting = power, joules_down, joules_up
        self.compute = _as_list(compute)
        self.down = None if down is None else _as_list(down)
        self.up = None if up is None else _as_list(up)
        self.compute_spread = compute_spread
        self.jitter = jitter
        self.link_spread = link_spread
        self.server = server
        self.deadline = deadline
        self.first = first
        self.late = late
        if self.delivers_late_rows and self.first is not None:
            raise ConfigError(
                "{first} and {late}=deliver exclude each other; set {first}=null",
                mentions=("first", "late"),
            )

    def setup(self, federation: Federation) -> None:
        seeds, m = federation.seeds, federation.clients
        self.seeds, self.clients = seeds, m
        if self.first is not None and self.first > m:
            raise ConfigError(f"clock.first={self.first} exceeds clients={m}; lower it, or give null")
        draws = rng.draws_by_seed(seeds, lambda draw: draw.standard_normal((2, m)), rng.Purpose.CLOCK)
        of_law = _pareto_factors if self.compute_law == "pareto" else _lognormal_from_normal
        slowdown_factors, link_speed_factors = (
            of_law(self.compute_spread, draws[:, 0]),
            _lognormal_from_normal(self.link_spread, draws[:, 1]),
        )
        self.sample = (self._device_numbers("compute", self.compute, federation) * slowdown_factors).reshape(-1)
        rates = (
            self._device_numbers(direction, rate, federation)
            for direction, rate in (("down", self.down), ("up", self.up))
        )
        self.byte = [
            np.zeros(len(seeds) * m) if rate is None else (1 / (rate * link_speed_factors)).reshape(-1)
            for rate in rates
        ]
        self.energy_numbers = {name: self._energy_rates_of_clients(name, federation) for name in ENERGY_COLUMNS}

    def _energy_rates_of_clients(self, name: str, federation: Federation) -> np.ndarray:
        """[R·m] the clients' watts or joules per byte."""
        setting = getattr(self, f"{name}_setting")
        numbers = self._device_numbers(name, None if setting is None else _as_list(setting), federation)
        shape = len(federation.seeds), federation.clients
        return np.broadcast_to(0.0 if numbers is None else numbers, shape).reshape(-1)

    @property
    def knows_energy_needs(self) -> bool:
        return any(
            getattr(self, f"{name}_setting") is not None or getattr(self.table, name, None) is not None
            for name in ENERGY_COLUMNS
        )

    def energy(self, virtual_clients: np.ndarray, seconds: np.ndarray, down: int, up: np.ndarray) -> np.ndarray:
        watts, joules_down, joules_up = (self.energy_numbers[name][virtual_clients] for name in ENERGY_COLUMNS)
        joules: np.ndarray = watts * seconds + joules_down * down + joules_up * up
        return joules

    def _device_numbers(self, name: str, setting: list[float] | None, federation: Federation) -> Any:
        """[R, m] or [m] the clients' numbers, of their devices or by the setting; None where neither has any."""
        of_devices = getattr(self.table, name, None)
        if self.table is None or of_devices is None:
            return None if setting is None else expand_group_values(f"clock.{name}", setting, federation.clients)
        rows = self.table.rows(federation.seeds, federation.clients)
        return of_devices[rows].reshape(len(federation.seeds), federation.clients)

    def loaded_arrays(self) -> dict[str, np.ndarray]:
        return {} if self.table is None else self.table.loaded_arrays()

    @property
    def links_take_time(self) -> bool:
        """Whether the transfer of models takes time."""
        has_configured_rate = self.down is not None or self.up is not None
        return has_configured_rate or (self.table is not None and self.table.down is not None)

    def times(self, t: int, virtual_clients: np.ndarray, down: int, up: int) -> Times:
        sample = self.sample[virtual_clients]
        if self.jitter:
            sample = sample * _lognormal_from_normal(self.jitter, self._jitter_normals(t, virtual_clients))
        return Times(down * self.byte[0][virtual_clients] + up * self.byte[1][virtual_clients], sample)

    def _jitter_normals(self, t: int, virtual_clients: np.ndarray) -> np.ndarray:
        """[n] standard normal numbers of these virtual clients in round t."""
        normals = rng.draws_by_seed(self.seeds, lambda draw: draw.standard_normal(self.clients), rng.Purpose.CLOCK, t)
        return normals.reshape(-1)[virtual_clients]

    def finish_probability(self, times: Times, virtual_clients: np.ndarray, samples: np.ndarray) -> np.ndarray:
        if self.deadline is None:
            return np.ones(len(virtual_clients))
        remaining_time, needed_time = self.deadline - times.link, samples * self.sample[virtual_clients]
        if not self.jitter:
            return (needed_time <= remaining_time).astype(float)
        from scipy.special import ndtr  # imported here: other clocks do not need it

        sigma = _lognormal_sigma(self.jitter)
        with np.errstate(divide="ignore", invalid="ignore"):
            probability = ndtr(np.log(remaining_time / needed_time) / sigma + sigma / 2)
        return np.where(remaining_time > 0, probability, 0.0)


class DeadlineAvailability(Availability):
    """The availability process that results from a clock that drops clients; for its probabilities, not for draws.

    Args:
        process: which clients are selected.
        clock: which of them are in time.
    """

    law = "in time"

    def __init__(self, process: Availability, clock: Clock) -> None:
        self.process, self.unknown_reason = process, process.unknown_reason or clock.unknown_reason
        self.population, self.federation = process.population, process.federation

    @classmethod
    def wrap_if_dropping(cls, process: Availability, clock: Clock | None) -> Availability:
        """The process itself where nobody is left out."""
        return cls(process, clock) if clock is not None and clock.may_drop_clients else process

    def probabilities(self, t: int) -> np.ndarray:
        return self.process.probabilities(t)

    def counts(self, t: int) -> np.ndarray:
        return self.process.counts(t)


def _as_list(value: float | list[float]) -> list[float]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _lognormal_sigma(spread: float) -> float:
    """Of a log-normal variable with this coefficient of variation."""
    return float(np.sqrt(np.log1p(spread**2)))


def _lognormal_from_normal(spread: float, normal: np.ndarray) -> np.ndarray:
    """Of mean 1 and this coefficient of variation, from standard normal numbers."""
    sigma = _lognormal_sigma(spread)
    return np.asarray(np.exp(sigma * normal - sigma**2 / 2))


def _pareto_factors(relative_spread: float, normal_draws: np.ndarray) -> np.ndarray:
    """Of mean 1 and this coefficient of variation, from standard normal numbers, the larger the larger."""
    if not relative_spread:
        return np.ones_like(normal_draws)
    from scipy.special import ndtr  # imported here: other clocks do not need it

    alpha = 1 + np.sqrt(1 + relative_spread**-2)
    return np.asarray((alpha - 1) / alpha * ndtr(-normal_draws) ** (-1 / alpha))
