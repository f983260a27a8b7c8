"""A virtual clock that events advance: clients start, finish and fail one by one, and the server acts on arrivals."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from fedsim.availability.clock.clock import SPEED_LAWS, Devices, Times
from fedsim.core import rng
from fedsim.core.constraints import Count, Fraction, NonNegative, OneOf, Positive
from fedsim.core.effects import EffectDeclarations, EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation

START_ORDER_COUNTER, FAILURE_COUNTER, FAILURE_TIME_COUNTER, PAUSE_COUNTER = 0, 1, 2, 5  # counters of Purpose.EVENT
JITTER_COUNTERS = 3, 4


def _is_asynchronous(component: Events, run: object) -> bool:
    return component.asynchronous


def _is_synchronous(component: Events, run: object) -> bool:
    return not component.asynchronous


class Events(Devices):
    """Durations of `Devices`, in an event-driven run: a heap holds the times at which clients in flight finish, and a
    round is one server update.

    An asynchronous server updates its model after `arrivals` updates, which wait in a buffer until then. Clients that
    are available start from the newest model, at most `concurrency` at a time, in random order; when one finishes or
    fails, the next one starts, and the client itself can start again from the server's next model. An update that is
    not there when the server steps arrives in a later round, with its staleness in rounds. Where too few clients are
    available to fill the buffer, a round ends without a step when nobody is in flight, and the buffer waits.

    A synchronous server (strategies without `arrivals`) waits for all selected clients, for the `first` of them, or
    until the deadline; the results are those of `Devices`.

    Args:
        compute, compute_spread, compute_law, devices: see `Devices`.
        jitter: see `Devices`; drawn for each client and server update.
        down, up, link_spread, server, power, joules_down, joules_up: see `Devices`.
        deadline: with `arrivals`, seconds after which the server steps with the updates that have arrived; synchronous:
            see `Devices`.
        first, late: of a synchronous server, see `Devices`.
        arrivals: updates per server step; null: 1 for fedasync, its buffer for fedbuff, all selected clients for
            synchronous strategies.
        concurrency: largest number of clients in flight; null: no limit.
        shared_down, shared_up: bytes per second of the server's link to and from the clients, which simultaneous
            transfers share: each gets the same rate, unless its client's own link is slower, and what such clients
            leave is divided among the others (max–min fairness, processor sharing). null: transfers do not slow each
            other down.
        failure: probability that a client fails during a task, at a time uniform on its duration.
        rejoin: mean seconds of the exponential pause after which a client that failed resumes its task where it
            stopped; null: its work is lost, and it can start again from the next model.
    """

    effective_if: EffectDeclarations = (
        *Devices.effective_if,
        EffectiveIf("late", _is_synchronous, "a synchronous strategy"),
        EffectiveIf("first", _is_synchronous, "a synchronous strategy"),
        EffectiveIf("rejoin", lambda component, run: component.failure > 0, "{at}.failure above 0"),
        EffectiveIf("concurrency", _is_asynchronous, "{at}.arrivals, or an asynchronous strategy"),
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
        late: Annotated[str, OneOf("drop", "partial")] = "drop",
        arrivals: Count | None = None,
        concurrency: Count | None = None,
        failure: Fraction = 0.0,
        compute_law: Annotated[str, OneOf(*SPEED_LAWS)] = "lognormal",
        devices: Any = None,
        shared_down: Positive | None = None,
        shared_up: Positive | None = None,
        rejoin: Positive | None = None,
        power: NonNegative | list[NonNegative] | None = None,
        joules_down: NonNegative | list[NonNegative] | None = None,
        joules_up: NonNegative | list[NonNegative] | None = None,
    ) -> None:
        super().__init__(
            compute, compute_spread, jitter, down, up, link_spread, server, deadline, first, late, compute_law, devices,
            power, joules_down, joules_up,
        )  # fmt: skip
        self.arrivals, self.concurrency, self.failure = arrivals, concurrency, failure
        self.shared_down, self.shared_up, self.rejoin = shared_down, shared_up, rejoin
        self.target = arrivals
        if self.shares_links and late == "partial" and deadline is not None:
            raise ConfigError(
                "{late}=partial plans steps before a client starts, but with {shared_down} or {shared_up} the "
                "duration of its transfers is not known then; set {late}=drop",
                mentions=("late", "shared_down", "shared_up"),
            )

    @property
    def shares_links(self) -> bool:
        """Whether transfers slow each other down."""
        return self.shared_down is not None or self.shared_up is not None

    @property
    def loses_work(self) -> bool:
        """Whether the work of a client may be lost."""
        return self.failure > 0 and self.rejoin is None

    @property
    def unknown_reason(self) -> str:
        if self.rejoin is not None and self.failure and self.deadline is not None:
            return "has a deadline and clients that pause, so participation probabilities are unknown"
        if self.shares_links and self.deadline is not None:
            return "has a deadline and a shared link of the server, so participation probabilities are unknown"
        return super().unknown_reason

    def setup(self, federation: Federation) -> None:
        super().setup(federation)
        for k, capacity in enumerate((self.shared_down, self.shared_up)):
            if capacity is not None:
                self.byte[k] = np.maximum(self.byte[k], 1 / capacity)

    @property
    def asynchronous(self) -> bool:
        return self.target is not None

    @property
    def may_drop_clients(self) -> bool:
        return not self.asynchronous and (super().may_drop_clients or self.loses_work)

    def set_arrival_target(self, strategy: str, arrivals: int | None, supports_stale: bool, clients: int) -> None:
        """Determine after how many arrivals the server updates the model.

        Args:
            strategy: its name, for messages.
            arrivals: how many the strategy takes by itself; None: all selected clients.
            supports_stale: whether it is defined for updates that started from an older model.
            clients: m.

        Raises:
            ConfigError: the strategy does not go with these settings.
        """
        if self.arrivals is not None and arrivals is not None and self.arrivals != arrivals:
            raise ConfigError(
                f"clock.arrivals={self.arrivals}, but strategy={strategy} steps after {arrivals}; give "
                "clock.arrivals=null, and set strategy.buffer of fedbuff"
            )
        if self.arrivals is not None and not supports_stale:
            raise ConfigError(
                f"clock.arrivals={self.arrivals}, but strategy={strategy} is not defined for updates that started from "
                "an older model; set clock.arrivals=null, or another strategy, such as fedbuff"
            )
        if self.deadline is not None and arrivals is not None:
            raise ConfigError(
                f"clock.deadline={self.deadline:g} ends the wait of a server, and strategy={strategy} steps when "
                f"{arrivals} updates have arrived, however long it takes; set clock.deadline=null"
            )
        self.target = arrivals if self.arrivals is None else self.arrivals
        if self.target is not None and self.target > clients:
            raise ConfigError(
                f"the server steps after {self.target} arrivals (clock.arrivals, or strategy.buffer), but each of "
                f"clients={clients} sends one update before it does; lower it"
            )
        if self.asynchronous and self.first is not None:
            raise ConfigError(
                f"clock.first={self.first} is for a server that waits for selected clients, and this one steps after "
                f"{self.target} arrivals; set clock.first=null"
            )

    def finish_probability(self, times: Times, virtual_clients: np.ndarray, samples: np.ndarray) -> np.ndarray:
        return super().finish_probability(times, virtual_clients, samples) * (1 - self.failure * self.loses_work)

    def start_order(self, t: int, virtual_clients: np.ndarray) -> np.ndarray:
        """Positions of these virtual clients in the random order in which they start from model t."""
        return np.argsort(rng.uniform_host(self._keys(t, virtual_clients, START_ORDER_COUNTER)), kind="stable")

    def failure_fractions(self, t: int, virtual_clients: np.ndarray) -> np.ndarray:
        """[n] the fraction of its task after which the work of each of these virtual clients is lost; inf where it is
        not."""
        if not self.loses_work:
            return np.full(len(virtual_clients), np.inf)
        failure_draws, fraction = (
            rng.uniform_host(self._keys(t, virtual_clients, counter))
            for counter in (FAILURE_COUNTER, FAILURE_TIME_COUNTER)
        )
        return np.where(failure_draws < self.failure, fraction, np.inf)

    def pause_seconds(self, t: int, virtual_clients: np.ndarray) -> np.ndarray:
        """[n] seconds for which each of these virtual clients interrupts its task; 0 for most."""
        if self.rejoin is None or not self.failure:
            return np.zeros(len(virtual_clients))
        failure_draws, length_draws = (
            rng.uniform_host(self._keys(t, virtual_clients, counter)) for counter in (FAILURE_COUNTER, PAUSE_COUNTER)
        )
        return np.where(failure_draws < self.failure, -self.rejoin * np.log1p(-length_draws), 0.0)

    def _jitter_normals(self, t: int, virtual_clients: np.ndarray) -> np.ndarray:
        if not self.asynchronous:
            return super()._jitter_normals(t, virtual_clients)
        return rng.normal_on_host(*(self._keys(t, virtual_clients, counter) for counter in JITTER_COUNTERS))

    def _keys(self, t: int, virtual_clients: np.ndarray, counter: int) -> np.ndarray:
        """[n] keys of these virtual clients: what a server update draws costs nothing for the others."""
        seeds = np.asarray(self.seeds, dtype=np.int64)[virtual_clients // self.clients]
        return rng.row_keys_host(seeds, rng.Purpose.EVENT, virtual_clients % self.clients, t, counter)
