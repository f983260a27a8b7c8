"""Clients that rest: after participating, a client is unavailable for some rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsim.availability.availability import Population, uniforms
from fedsim.availability.probabilities import Probability
from fedsim.availability.processes import Bernoulli, Walk
from fedsim.availability.trajectories import Stationary, Trajectory
from fedsim.core import rng
from fedsim.core.constraints import Count, CountOrZero, Fraction
from fedsim.core.errors import ClientCountError


@dataclass
class _SeparationState:
    """After a round: who took part in it [R, m], the last round of each [R, m], and the probabilities of the last R
    rounds [separation, R, m] with their place for the next one, where they are needed."""

    active: np.ndarray
    last: np.ndarray
    marginal: np.ndarray
    recent: np.ndarray | None = None


class MinimumSeparation(Bernoulli):
    """A client that participated is unavailable for R rounds; other clients are available with p_i^t (Sun et al. 2025).

    With independent draws (`k` null) the probability of participating is m_i^t = p_i^t (1 − Σ_{s=t−R}^{t−1} m_i^s),
    since a client rests if it participated in one of the last R rounds; this is the probability reported to strategies.
    For constant p_i it is p_i / (1 + R p_i) from round 0 on: the run starts in the stationary state, with some clients
    at rest. Gaps between participations are R plus a geometric number with mean 1/p_i.

    With `k`, k clients are drawn in every round among those not at rest, without replacement with probabilities ∝
    p_i^t, and no client rests in round 0. With k = R = 1 the participation frequencies converge to p_i (1 − p_i) / Σ_j
    p_j (1 − p_j), Σ p_j = 1; with (R + 1) k = m the first m/k rounds repeat. In this case the p_i^t are not available
    to strategies.

    Args:
        base: p_i of a client that does not rest.
        trajectory: f_i(t).
        floor: least p_i^t of a client that does not rest.
        separation: R, number of rounds of rest.
        k: number of clients drawn; null: independent draws.
    """

    law = "separation"

    def __init__(
        self,
        base: Probability | None = None,
        trajectory: Trajectory | None = None,
        floor: Fraction = 0.0,
        separation: CountOrZero = 1,
        k: Count | None = None,
    ) -> None:
        super().__init__(base, trajectory, floor)
        self.separation = separation
        self.k = k
        if self.k is not None:
            self.unknown_reason = "with k draws clients by who came before, so that nobody knows these"

    def setup(self, population: Population) -> None:
        if self.k is not None and self.k * (self.separation + 1) > population.clients:
            raise ClientCountError(
                f"availability.k={self.k} clients in each of separation + 1 = {self.separation + 1} rounds are more "
                "than {clients}; lower k or separation",
                clients=population.clients,
            )
        super().setup(population)
        self._walk = Walk(self._next)

    def conditional_probability(self, t: int) -> np.ndarray:
        """[R, m] p_i^t of clients that do not rest."""
        return super().probabilities(t)

    def probabilities(self, t: int) -> np.ndarray:
        """[R, m] the probability of taking part; with `k` its bound p_i^t, for want of it."""
        return self.conditional_probability(t).copy() if self.k is not None else self._walk.at(t).marginal.copy()

    def counts(self, t: int) -> np.ndarray:
        return self._walk.at(t).active.astype(np.int8)

    def _next(self, previous: _SeparationState | None, t: int) -> _SeparationState:
        p = self.conditional_probability(t)
        previous = previous or self._initial_state(p)
        rested_mask = t - previous.last > self.separation
        coins = uniforms(self.population, rng.Purpose.AVAILABILITY, t)
        if self.k is not None:
            active = self._drawn_clients(np.where(rested_mask, p, 0.0), coins)
            return _SeparationState(active, np.where(active, t, previous.last), p)
        active = rested_mask & (coins < p)
        last = np.where(active, t, previous.last)
        if previous.recent is None:
            return _SeparationState(active, last, previous.marginal)
        marginal = p * (1 - previous.recent.sum(0))
        recent = np.concatenate([previous.recent[1:], marginal[None]])
        return _SeparationState(active, last, marginal, recent)

    def _initial_state(self, p: np.ndarray) -> _SeparationState:
        """Before round 0: with coins as if p had been that of round 0 for ever, else nobody rests."""
        last = np.full(p.shape, -self.separation - 1)
        marginal = p / (1 + self.separation * p)
        if self.k is None:
            uniform_numbers = uniforms(self.population, rng.Purpose.SPELL)
            rounds_since = 1 + np.floor(uniform_numbers / np.where(marginal > 0, marginal, 1.0))
            rests = uniform_numbers < self.separation * marginal
            last = np.where(rests, -np.minimum(rounds_since, self.separation), last).astype(np.int64)
        needs_no_history = isinstance(self.trajectory, Stationary) or not self.separation
        recent = (
            None if self.k is not None or needs_no_history else np.broadcast_to(marginal, (self.separation, *p.shape))
        )
        return _SeparationState(np.zeros(p.shape, dtype=bool), last, marginal, recent)

    def _drawn_clients(self, p: np.ndarray, coins: np.ndarray) -> np.ndarray:
        """[R, m] k of each replicate, ∝ p without replacement: those whose exponential times of rate p end first."""
        assert self.k is not None
        times = np.where(p > 0, -np.log1p(-coins) / np.where(p > 0, p, 1.0), np.inf)
        first = np.argpartition(times, self.k - 1, axis=1)[:, : self.k]
        drawn_mask = np.zeros(p.shape, dtype=bool)
        np.put_along_axis(drawn_mask, first, True, axis=1)
        return drawn_mask & (p > 0)
