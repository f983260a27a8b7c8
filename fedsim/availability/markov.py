"""Availability that is correlated over rounds: a two-state Markov chain for each client."""

from __future__ import annotations

import numpy as np

from fedsim.availability.availability import Availability, Population, draw_uniforms, expand_group_values
from fedsim.availability.probabilities import Probability, Uniform
from fedsim.availability.processes import RoundStates
from fedsim.core import checks, rng
from fedsim.core.errors import ConfigError


class Markov(Availability):
    """A homogeneous chain per client with stationary probability p_i and correlation λ between rounds, λ^k over k.

    P(on | on) = p_i + λ (1 − p_i), P(on | off) = p_i (1 − λ) (Rodio et al. 2023, CA-Fed): with probability λ a client
    keeps its state, otherwise the state is drawn anew. With λ < 0 it changes more often than under independence.
    Availability lasts 1/((1 − λ)(1 − p_i)) rounds and absence 1/((1 − λ) p_i) rounds on average; a chain that switches
    on with probability a and off with b has p = a / (a + b), λ = 1 − a − b. It starts in its stationary distribution,
    so that p_i holds from round 0.

    Args:
        base: p_i.
        persistence: λ in (−1, 1), 0: independent rounds; a list has one value per group of clients, in order. For λ < 0
            it requires 1/(1 − λ) ≥ p_i ≥ −λ/(1 − λ).

    Attributes:
        base_probabilities: [R, m] p_i.
        correlations: [m] λ_i.
    """

    law = "markov"

    def __init__(self, base: Probability | None = None, persistence: float | list[float] = 0.8) -> None:
        self.base = base or Uniform()
        persistence_values = persistence if isinstance(persistence, (list, tuple)) else [persistence]
        if not persistence_values:
            raise ConfigError(key="persistence", value=[], needs="must hold one number per group of clients")
        for persistence_value in persistence_values:
            if abs(checks.check_finite("persistence", persistence_value)) >= 1:
                raise ConfigError(
                    f"{{persistence}}={persistence_value!r} must lie above -1 and below 1, which freezes the first "
                    "round forever",
                    mentions=("persistence",),
                )
        self.persistence = [float(persistence_value) for persistence_value in persistence_values]

    def setup(self, population: Population) -> None:
        super().setup(population)
        self.base_probabilities = self.base.base(population)
        self.correlations = expand_group_values("availability.persistence", self.persistence, population.clients)
        self._refuse_impossible()
        self._walk = RoundStates(self._next_state)

    def _refuse_impossible(self) -> None:
        """Refuse a correlation that is impossible with these probabilities: a chain that changes more often than it
        stays needs room on both sides."""
        base_probabilities, lag_correlation = self.base_probabilities, self.correlations
        interior_mask = (base_probabilities > 0) & (
            base_probabilities < 1
        )  # at 0 and 1 a chain never moves, whatever λ
        impossible_indices = np.argwhere(
            interior_mask
            & (
                (lag_correlation + (1 - lag_correlation) * base_probabilities < 0)
                | ((1 - lag_correlation) * base_probabilities > 1)
            )
        )
        if len(impossible_indices):
            replicate, client = impossible_indices[0]
            probability = base_probabilities[replicate, client]
            raise ConfigError(
                f"availability.persistence={lag_correlation[client]:g} is impossible for client {client}, "
                f"whose p is {probability:g}; "
                "give "
                f"{-min(probability / (1 - probability), (1 - probability) / probability):.4g} or more"
            )

    def probabilities(self, t: int) -> np.ndarray:
        """[R, m] the marginal p_i."""
        return self.base_probabilities.copy()

    def counts(self, t: int) -> np.ndarray:
        return self._walk.at(t).astype(np.int8)

    def _next_state(self, previous_state: np.ndarray | None, t: int) -> np.ndarray:
        uniform_draws = draw_uniforms(self.population, rng.Purpose.AVAILABILITY, t, size=(2, self.population.clients))
        p, correlation = self.base_probabilities, self.correlations
        if previous_state is None:
            return uniform_draws[:, 0] < p
        activation_probability = (1 - correlation) * p + np.where(previous_state, correlation, 0.0)
        becomes_available = uniform_draws[:, 0] < np.where(correlation < 0, activation_probability, p)
        return np.where(uniform_draws[:, 1] < correlation, previous_state, becomes_available)
