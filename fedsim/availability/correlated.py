"""Availability that is correlated between clients: outages of groups, and factors shared by groups."""

from __future__ import annotations

import math

import numpy as np

from fedsim.availability.availability import Population, client_groups, draw_uniforms
from fedsim.availability.probabilities import Probability
from fedsim.availability.processes import Bernoulli, RoundStates, bernoulli
from fedsim.availability.trajectories import Trajectory
from fedsim.core import rng
from fedsim.core.constraints import Count, Fraction
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ClientCountError, ConfigError


class _GroupCorrelatedAvailability(Bernoulli):
    """Clients have p_i^t as under `Bernoulli`, but are not independent within a group."""

    def __init__(self, base: Probability | None, trajectory: Trajectory | None, floor: Fraction, groups: Count) -> None:
        super().__init__(base, trajectory, floor)
        self.groups = groups

    def setup(self, population: Population) -> None:
        if self.groups > population.clients:
            raise ClientCountError(f"availability.groups={self.groups} exceeds {{clients}}", clients=population.clients)
        super().setup(population)
        self._group = client_groups(population.clients, self.groups)


class CommonShock(_GroupCorrelatedAvailability):
    """Groups of clients fail together: a client is available iff its group has no outage and its independent draw
    succeeds.

    The independent draw has probability p_i^t / (1 − q), so that p_i^t remains the probability of being available. In a
    round the covariance of two clients is p_i p_j q / (1 − q) within a group and 0 across groups. Outages follow chains
    as in `Markov`, with correlation ρ between rounds, a fraction q of the time, and mean length 1/((1 − ρ)(1 − q))
    rounds.

    Args:
        base: p_i, at most 1 − q.
        trajectory: f_i(t); probabilities are limited to 1 − q.
        floor: least probability of any client in any round.
        groups: number of groups; client i belongs to group ⌊i · groups / m⌋.
        shock: q in [0, 1), the fraction of rounds in which a group has an outage.
        persistence: ρ in [0, 1); 0: outages of different rounds are independent.
    """

    effective_if = (
        EffectiveIf("groups", lambda component, run: component.shock > 0, "{at}.shock above 0"),
        EffectiveIf("persistence", lambda component, run: component.shock > 0, "{at}.shock above 0"),
    )

    law = "common_shock"

    def __init__(
        self,
        base: Probability | None = None,
        trajectory: Trajectory | None = None,
        floor: Fraction = 0.0,
        groups: Count = 1,
        shock: Fraction = 0.2,
        persistence: Fraction = 0.0,
    ) -> None:
        super().__init__(base, trajectory, floor, groups)
        self.shock = shock
        self.persistence = persistence
        if self.shock == 1:
            raise ConfigError(key="shock", value=1, needs="makes no client available in any round; lower it")
        if self.persistence == 1:
            raise ConfigError(
                key="persistence", value=1, needs="keeps the outages of the first round forever; lower it"
            )

    def setup(self, population: Population) -> None:
        super().setup(population)
        upper_bound = 1 - self.shock
        exceeding_entries = np.argwhere(self.base_probabilities > upper_bound + 1e-12)
        if len(exceeding_entries) or self.floor > upper_bound:
            replicate, client = exceeding_entries[0] if len(exceeding_entries) else (0, 0)
            probability = max(float(self.base_probabilities[replicate, client]), self.floor)
            raise ConfigError(
                f"availability.shock={self.shock:g} leaves a client at most the probability {upper_bound:g}, and "
                f"client {client} is to have {probability:.4g}; lower shock, or availability.base (and floor)"
            )
        self._walk = RoundStates(self._next_state)

    def probabilities(self, t: int) -> np.ndarray:
        return np.minimum(super().probabilities(t), 1 - self.shock)

    def counts(self, t: int) -> np.ndarray:
        unshocked_mask = ~self._walk.at(t)[:, self._group]
        return bernoulli(self.probabilities(t) / (1 - self.shock) * unshocked_mask, self.population, t)

    def _next_state(self, outage: np.ndarray | None, t: int) -> np.ndarray:
        """Return [R, groups], which groups have an outage."""
        draws = draw_uniforms(self.population, rng.Purpose.COMMON, t, size=(2, self.groups))
        new_outage = draws[:, 0] < self.shock
        return new_outage if outage is None else np.where(draws[:, 1] < self.persistence, outage, new_outage)


class CommonFactor(_GroupCorrelatedAvailability):
    """A Gaussian copula: z_i = √ρ f_t + √(1 − ρ) e_i, and client i is available iff Φ(z_i) < p_i^t.

    f_t is the factor that a group shares; e_i is independent for each client and round. p_i^t remains the probability
    of being available. With ρ = 0 clients are independent, with ρ = 1 the sets of available clients are nested. Two
    clients of a group are both available with probability Φ₂(Φ⁻¹(p_i), Φ⁻¹(p_j); ρ) of the bivariate normal
    distribution; at ρ = ½ and p = ½ that is ⅓. The factor is a stationary AR(1), f_t = φ f_{t−1} + √(1 − φ²) ξ.

    Args:
        base: p_i.
        trajectory: f_i(t).
        floor: least probability of any client in any round.
        groups: how many factors; client i belongs to group ⌊i · groups / m⌋.
        correlation: ρ in [0, 1], of the z_i of a group.
        persistence: φ in [0, 1), the factor's correlation between rounds.
    """

    effective_if = (
        EffectiveIf("groups", lambda component, run: component.correlation > 0, "{at}.correlation above 0"),
        EffectiveIf("persistence", lambda component, run: component.correlation > 0, "{at}.correlation above 0"),
    )

    law = "common_factor"

    def __init__(
        self,
        base: Probability | None = None,
        trajectory: Trajectory | None = None,
        floor: Fraction = 0.0,
        groups: Count = 1,
        correlation: Fraction = 0.5,
        persistence: Fraction = 0.0,
    ) -> None:
        super().__init__(base, trajectory, floor, groups)
        self.correlation = correlation
        self.persistence = persistence
        if self.persistence == 1:
            raise ConfigError(key="persistence", value=1, needs="keeps the factor of the first round forever; lower it")

    def setup(self, population: Population) -> None:
        super().setup(population)
        self._walk = RoundStates(self._next_state)

    def counts(self, t: int) -> np.ndarray:
        """Given the factor all draws are independent: Φ((Φ⁻¹(p) − √ρ f) / √(1 − ρ))."""
        from scipy.special import ndtr, ndtri  # imported here: other processes do not need it

        threshold = ndtri(self.probabilities(t)) - math.sqrt(self.correlation) * self._walk.at(t)[:, self._group]
        if self.correlation == 1:
            return (threshold > 0).astype(np.int8)
        return bernoulli(ndtr(threshold / math.sqrt(1 - self.correlation)), self.population, t)

    def _next_state(self, common_factor: np.ndarray | None, t: int) -> np.ndarray:
        """[R, groups] f_t."""
        seeds = self.population.seeds
        new_factor = rng.draws_by_seed(seeds, lambda draw: draw.standard_normal(self.groups), rng.Purpose.COMMON, t)
        if common_factor is None:
            return new_factor
        return self.persistence * common_factor + math.sqrt(1 - self.persistence**2) * new_factor
