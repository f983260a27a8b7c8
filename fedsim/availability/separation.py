"""Clients that rest: after participating, a client is unavailable for some rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsim.availability.availability import Population, draw_uniforms
from fedsim.availability.probabilities import Probability
from fedsim.availability.processes import Bernoulli, RoundStates
from fedsim.availability.trajectories import Stationary, Trajectory
from fedsim.core import rng
from fedsim.core.constraints import Count, CountOrZero, Fraction
from fedsim.core.errors import ClientCountError


@dataclass
class _SeparationState:
    """After a round: who took part in it [R, m], the last round of each [R, m], and the probabilities of the last R
    rounds [separation, R, m] with their place for the next one, where they are needed."""

    active: np.ndarray
    last_active_round: np.ndarray
    marginal: np.ndarray
    recent_probabilities: np.ndarray | None = None


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
            self.unknown_reason = "with k draws clients by their past participation, so that these are unknown"

    def setup(self, population: Population) -> None:
        if self.k is not None and self.k * (self.separation + 1) > population.clients:
            raise ClientCountError(
                f"availability.k={self.k} clients in each of separation + 1 = {self.separation + 1} rounds are more "
                "than {clients}; lower k or separation",
                clients=population.clients,
            )
        super().setup(population)
        self._walk = RoundStates(self._next_state)

    def conditional_probability(self, t: int) -> np.ndarray:
        """[R, m] p_i^t of clients that do not rest."""
        return super().probabilities(t)

    def probabilities(self, t: int) -> np.ndarray:
        """[R, m] the probability of taking part; with `k` its bound p_i^t, for want of it."""
        return self.conditional_probability(t).copy() if self.k is not None else self._walk.at(t).marginal.copy()

    def counts(self, t: int) -> np.ndarray:
        return self._walk.at(t).active.astype(np.int8)

    def _next_state(self, previous_state: _SeparationState | None, t: int) -> _SeparationState:
        participation_probabilities = self.conditional_probability(t)
        previous_state = previous_state or self._initial_state(participation_probabilities)
        rested_mask = t - previous_state.last_active_round > self.separation
        uniform_numbers = draw_uniforms(self.population, rng.Purpose.AVAILABILITY, t)
        if self.k is not None:
            active = self._drawn_clients(np.where(rested_mask, participation_probabilities, 0.0), uniform_numbers)
            return _SeparationState(
                active, np.where(active, t, previous_state.last_active_round), participation_probabilities
            )
        active = rested_mask & (uniform_numbers < participation_probabilities)
        last_active_round = np.where(active, t, previous_state.last_active_round)
        if previous_state.recent_probabilities is None:
            return _SeparationState(active, last_active_round, previous_state.marginal)
        marginal = participation_probabilities * (1 - previous_state.recent_probabilities.sum(0))
        recent_probabilities = np.concatenate([previous_state.recent_probabilities[1:], marginal[None]])
        return _SeparationState(active, last_active_round, marginal, recent_probabilities)

    def _initial_state(self, participation_probabilities: np.ndarray) -> _SeparationState:
        """Return the state before round 0: with draws as if p had always been that of round 0, or nobody resting."""
        last_active_round = np.full(participation_probabilities.shape, -self.separation - 1)
        marginal_probabilities = participation_probabilities / (1 + self.separation * participation_probabilities)
        if self.k is None:
            uniform_numbers = draw_uniforms(self.population, rng.Purpose.SPELL)
            rounds_since = 1 + np.floor(
                uniform_numbers / np.where(marginal_probabilities > 0, marginal_probabilities, 1.0)
            )
            is_resting = uniform_numbers < self.separation * marginal_probabilities
            last_active_round = np.where(
                is_resting, -np.minimum(rounds_since, self.separation), last_active_round
            ).astype(np.int64)
        needs_no_history = isinstance(self.trajectory, Stationary) or not self.separation
        recent_probabilities = (
            None
            if self.k is not None or needs_no_history
            else np.broadcast_to(marginal_probabilities, (self.separation, *participation_probabilities.shape))
        )
        return _SeparationState(
            np.zeros(participation_probabilities.shape, dtype=bool),
            last_active_round,
            marginal_probabilities,
            recent_probabilities,
        )

    def _drawn_clients(self, participation_probabilities: np.ndarray, uniform_numbers: np.ndarray) -> np.ndarray:
        """Return [R, m] k clients of each replicate, ∝ p without replacement: those with the smallest exponential
        times of rate p."""
        assert self.k is not None
        times = np.where(
            participation_probabilities > 0,
            -np.log1p(-uniform_numbers) / np.where(participation_probabilities > 0, participation_probabilities, 1.0),
            np.inf,
        )
        first_clients = np.argpartition(times, self.k - 1, axis=1)[:, : self.k]
        drawn_mask = np.zeros(participation_probabilities.shape, dtype=bool)
        np.put_along_axis(drawn_mask, first_clients, True, axis=1)
        return drawn_mask & (participation_probabilities > 0)
