"""A virtual clock that events advance: clients start, finish and fail one by one, and the server acts on arrivals."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fedsim.availability.clock.clock import Devices, Times
from fedsim.core import rng
from fedsim.core.constraints import Count, Fraction, NonNegative, OneOf, Positive
from fedsim.core.effects import Declarations, EffectiveIf
from fedsim.core.errors import ConfigError

START_ORDER, FAILURE = 0, 1  # counters of Purpose.EVENT


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
        compute, compute_spread, jitter, down, up, link_spread, server: see `Devices`; the jitter is drawn for each
            client and server update.
        deadline: with `arrivals`, seconds after which the server steps with the updates that have arrived; synchronous:
            see `Devices`.
        first, late: of a synchronous server, see `Devices`.
        arrivals: updates per server step; null: 1 for fedasync, its buffer for fedbuff, all selected clients for
            synchronous strategies.
        concurrency: largest number of clients in flight; null: no limit.
        failure: probability that a client fails during a task, at a time uniform on its duration. Its work is lost, and
            it can start again from the next model.
    """

    effective_if: Declarations = (
        EffectiveIf("link_spread", lambda component, run: component.down or component.up, "{at}.down or {at}.up"),
        EffectiveIf("late", lambda component, run: component.deadline is not None, "{at}.deadline"),
        EffectiveIf("late", _is_synchronous, "a synchronous strategy"),
        EffectiveIf("first", _is_synchronous, "a synchronous strategy"),
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
    ) -> None:
        super().__init__(compute, compute_spread, jitter, down, up, link_spread, server, deadline, first, late)
        self.arrivals, self.concurrency, self.failure = arrivals, concurrency, failure
        self.target = arrivals

    @property
    def asynchronous(self) -> bool:
        return self.target is not None

    @property
    def may_drop_clients(self) -> bool:
        return not self.asynchronous and (super().may_drop_clients or self.failure > 0)

    def choose_target(self, strategy: str, arrivals: int | None, supports_stale: bool, clients: int) -> None:
        """Settle after how many arrivals the server steps.

        Args:
            strategy: its name, for messages.
            arrivals: how many the strategy takes by itself; None: all selected clients.
            supports_stale: whether it is defined for updates that began with an older model.
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
                f"clock.arrivals={self.arrivals}, but strategy={strategy} is not defined for updates that began with "
                "an older model; give clock.arrivals=null, or another strategy, such as fedbuff"
            )
        if self.deadline is not None and arrivals is not None:
            raise ConfigError(
                f"clock.deadline={self.deadline:g} ends the wait of a server, and strategy={strategy} steps when "
                f"{arrivals} updates have arrived, however long it takes; give clock.deadline=null"
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
                f"{self.target} arrivals; give clock.first=null"
            )

    def chance(self, times: Times, virtual: np.ndarray, samples: np.ndarray) -> np.ndarray:
        return super().chance(times, virtual, samples) * (1 - self.failure)

    def start_order(self, t: int, virtual: np.ndarray) -> np.ndarray:
        """Positions of these virtual clients in the random order in which they start from model t."""
        draws = rng.draws_by_seed(self.seeds, lambda draw: draw.random(self.clients), rng.Purpose.EVENT, t, START_ORDER)
        return np.argsort(draws.reshape(-1)[virtual], kind="stable")

    def failure_times(self, t: int, virtual: np.ndarray) -> np.ndarray:
        """[n] the fraction of its task after which each of these virtual clients fails; inf where it does not."""
        if not self.failure:
            return np.full(len(virtual), np.inf)
        draws = rng.draws_by_seed(
            self.seeds, lambda draw: draw.random((2, self.clients)), rng.Purpose.EVENT, t, FAILURE
        )
        fails_mask, fraction = (draws[:, k].reshape(-1)[virtual] for k in range(2))
        return np.where(fails_mask < self.failure, fraction, np.inf)
