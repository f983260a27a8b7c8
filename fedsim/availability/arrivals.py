"""An open population: clients join during the run, take part for a while, and leave for good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from fedsim.availability.availability import Population
from fedsim.availability.lengths import SHAPE_RANGE_BY_LAW, check_shape_parameter, unit_mean_lengths
from fedsim.availability.probabilities import Probability
from fedsim.availability.processes import Bernoulli
from fedsim.availability.trajectories import Trajectory
from fedsim.core import rng
from fedsim.core.constraints import Count, CountOrZero, Fraction, NonNegative, OneOf, Positive
from fedsim.core.effects import EffectiveIf, RoundParameter
from fedsim.core.errors import ClientCountError, ConfigError

JOINING_ORDERS = ("random", "number")
LIFETIMES = ("exponential", "lognormal", "weibull", "constant")


def _are_arrivals_drawn(component: Arrivals, run: object) -> bool:
    return component.joins is None


def _are_lifetimes_drawn(component: Arrivals, run: object) -> bool:
    return component.lifetime is not None and component.leaves is None


class Arrivals(Bernoulli):
    """Client i is present from round A_i on and leaves for good after a lifetime L_i, in round A_i + L_i; while it is
    present, it is available with p_i^t as under `Bernoulli`.

    A fraction `initial` of the clients is present in round 0. The others join in batches that arrive as a Poisson
    process, until all clients have joined. While there are clients left to join, the number of clients of an initially
    empty population that are present in round t is Poisson with mean λ L (1 − e^{−t/L}) for arrivals of single clients
    at rate λ with exponential lifetimes of mean L, as in an M/M/∞ queue.

    The server knows who is present: the probability that strategies may read is p_i^t of a client that is present and
    0 of others. Strategies with client memory keep what they store of clients that have left.

    Args:
        base: p_i of a client that is present.
        trajectory: f_i(t).
        floor: least p_i^t of a client that is present.
        initial: fraction of the clients that are present in round 0.
        rate: λ, mean number of batches that arrive per round; 0: no client joins later.
        batch: clients of a batch.
        joins: explicit A_i, one round per client, instead of drawing them.
        lifetime: mean of L_i in rounds; null: no client leaves.
        law: distribution of the lifetimes: exponential, lognormal, weibull or constant.
        shape: σ of lognormal (0 to 3), k of weibull (0.3 to 20).
        leaves: explicit rounds in which clients leave, one per client, instead of drawing lifetimes.
        order: 'random': clients join in random order; 'number': in the order of their numbers.
    """

    effective_if = (
        EffectiveIf("initial", _are_arrivals_drawn, "{at}.joins=null, which gives all rounds"),
        EffectiveIf("rate", _are_arrivals_drawn, "{at}.joins=null, which gives all rounds"),
        EffectiveIf(
            "batch", lambda component, run: component.joins is None and component.rate > 0, "{at}.rate above 0"
        ),
        EffectiveIf("order", _are_arrivals_drawn, "{at}.joins=null, which gives all rounds"),
        RoundParameter("leaves", measured=True, per_client=True),
        EffectiveIf("lifetime", lambda component, run: component.leaves is None, "{at}.leaves=null"),
        EffectiveIf("law", _are_lifetimes_drawn, "{at}.lifetime", attribute="lifetimes"),
        EffectiveIf(
            "shape",
            lambda component, run: component.lifetimes in ("lognormal", "weibull") and component.lifetime is not None,
            "{at}.law=lognormal or weibull, and {at}.lifetime",
        ),
    )

    law = "arrivals"
    changes_population = True

    def __init__(  # noqa: PLR0913 (the parameters are configuration keys)
        self,
        base: Probability | None = None,
        trajectory: Trajectory | None = None,
        floor: Fraction = 0.0,
        initial: Fraction = 0.5,
        rate: NonNegative = 1.0,
        batch: Count = 1,
        joins: Sequence[CountOrZero] | None = None,
        lifetime: Positive | None = None,
        law: Annotated[str, OneOf(*LIFETIMES)] = "exponential",
        shape: NonNegative = 1.0,
        leaves: Sequence[CountOrZero] | None = None,
        order: Annotated[str, OneOf(*JOINING_ORDERS)] = "random",
    ) -> None:
        super().__init__(base, trajectory, floor)
        self.initial, self.rate, self.batch, self.joins, self.order = initial, rate, batch, joins, order
        self.lifetime, self.lifetimes, self.shape, self.leaves = lifetime, law, shape, leaves
        if law in SHAPE_RANGE_BY_LAW:
            check_shape_parameter(law, shape)
        if joins is None and initial == 0 and rate == 0:
            raise ConfigError(key="rate", value=0, needs="lets no client join a population that is empty; raise it")

    def setup(self, population: Population) -> None:
        super().setup(population)
        draws = rng.draws_by_seed(population.seeds, self._join_times_and_lifetimes, rng.Purpose.ARRIVAL)  # [R, 2, m]
        self._join_rounds = self._configured_or_drawn_rounds("joins", self.joins, draws[:, 0])
        self._leave_rounds = self._configured_or_drawn_rounds("leaves", self.leaves, self._join_rounds + draws[:, 1])

    def _join_times_and_lifetimes(self, draw: np.random.Generator) -> np.ndarray:
        """[2, m] rounds in which the clients of a replicate join, and their lifetimes."""
        clients = self.population.clients
        join_order = np.arange(clients) if self.order == "number" else draw.permutation(clients)
        join_gaps, u = draw.standard_exponential(clients), draw.random(clients)
        count = int(np.rint(self.initial * clients))
        number = np.arange(clients - count) // self.batch  # of the batch
        join_times = np.full(clients, np.inf)
        join_times[join_order[:count]] = 0.0
        if self.rate:
            join_times[join_order[count:]] = (np.cumsum(join_gaps) / self.rate)[number]
        if self.lifetime is None:
            return np.stack([join_times, np.full(clients, np.inf)])
        lengths = np.ones(clients) if self.lifetimes == "constant" else self._standard_lifetimes(u)
        return np.stack([join_times, self.lifetime * lengths])

    def _standard_lifetimes(self, u: np.ndarray) -> np.ndarray:
        return unit_mean_lengths(self.lifetimes, self.shape, u)

    def _configured_or_drawn_rounds(
        self, parameter_name: str, rounds: Sequence[int] | None, drawn_rounds: np.ndarray
    ) -> np.ndarray:
        """[R, m] the rounds of a setting, or those that were drawn."""
        if rounds is None:
            return drawn_rounds
        if len(rounds) != self.population.clients:
            raise ClientCountError(
                f"availability.{parameter_name} has {len(rounds)} entries, but {{clients}}; give one round per client",
                clients=self.population.clients,
            )
        return np.broadcast_to(np.asarray(rounds, dtype=np.float64), drawn_rounds.shape)

    def present(self, t: int) -> np.ndarray:
        return np.asarray((self._join_rounds <= t) & (t < self._leave_rounds))

    def departed(self, t: int) -> np.ndarray:
        return np.asarray((self._join_rounds <= t) & (self._leave_rounds <= t))

    def probabilities(self, t: int) -> np.ndarray:
        return super().probabilities(t) * self.present(t)
