"""Devices with sessions and absences of random length, in several time zones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedsim.availability.availability import Availability, Population, uniforms
from fedsim.availability.probabilities import Probability, Uniform
from fedsim.availability.processes import Walk
from fedsim.availability.trajectories import Stationary, Trajectory
from fedsim.core import rng
from fedsim.core.constraints import NonNegative, OneOf, Positive
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError

SHAPE_RANGE_BY_LAW = {
    "exponential": (1.0, 1.0),
    "lognormal": (0.0, 3.0),
    "weibull": (0.3, 20.0),
}  # and what `shape` may be


@dataclass
class _SessionState:
    """Where every device stands, [R, m] each: whether it has a session, when that or its absence ends, and the level
    of the session."""

    in_session: np.ndarray
    stretch_end: np.ndarray
    level: np.ndarray


class DeviceSessions(Availability):
    """Sessions and absences alternate as in an alternating renewal process, observed at the start of each round.

    Sessions last `length` rounds on average; the mean length of absences is such that p_i is the fraction of time with
    a session. The run starts in the stationary state (the residual of the first period has its equilibrium
    distribution), so that p_i holds from round 0. With exponential lengths the process is `Markov` with λ = exp(−1/L_on
    − 1/L_off).

    The trajectory determines which sessions are available to the server: each session has a level u ~ U(0, 1), constant
    while it lasts, and is available in the rounds in which u < p_i^t / p_i. Hence p_i^t is the probability of
    participating, and a client stays available while p_i^t is constant: with `trajectory: night` nearly all sessions
    are available at night in the device's time zone, and few during the day.

    Args:
        base: p_i, the fraction of time with a session.
        trajectory: f_i(t), at most 1.
        length: mean length of a session in rounds, L_on ≥ 1; absences last L_off = L_on (1 − p_i) / p_i.
        law: distribution of both lengths: exponential, lognormal or weibull.
        shape: σ of lognormal (0 to 3), k of weibull (0.3 to 20); exponential has none.

    Attributes:
        base_probabilities: [R, m] p_i.
    """

    effective_if = (
        EffectiveIf(
            "shape", lambda component, run: component.lengths != "exponential", "{at}.law=lognormal or weibull"
        ),
    )

    law = "sessions"

    def __init__(
        self,
        base: Probability | None = None,
        trajectory: Trajectory | None = None,
        length: Positive = 4.0,
        law: Annotated[str, OneOf(*SHAPE_RANGE_BY_LAW)] = "exponential",
        shape: NonNegative = 1.0,
    ) -> None:
        self.base, self.trajectory = base or Uniform(), trajectory or Stationary()
        self.length = length
        if self.length < 1:
            raise ConfigError(key="length", value=length, needs="must be 1 or more rounds; toss coins for shorter ones")
        self.lengths = law
        self.shape = shape
        minimum, maximum = SHAPE_RANGE_BY_LAW[self.lengths]
        if self.lengths != "exponential" and not minimum <= self.shape <= maximum:
            raise ConfigError(key="shape", value=shape, needs=f"must lie between {minimum:g} and {maximum:g} for {law}")

    def setup(self, population: Population) -> None:
        super().setup(population)
        self.base_probabilities = p = self.base.base(population)
        self._mean_absence = np.divide(self.length * (1 - p), p, out=np.full(p.shape, np.inf), where=p > 0)
        self._walk = Walk(self._next)

    def probabilities(self, t: int) -> np.ndarray:
        probabilities = self.trajectory.at(t, self.base_probabilities, self.population)
        return np.clip(probabilities, 0.0, self.base_probabilities)

    def counts(self, t: int) -> np.ndarray:
        session_state, p = self._walk.at(t), self.base_probabilities
        return (session_state.in_session & (session_state.level * p < self.probabilities(t))).astype(np.int8)

    def _next(self, previous: _SessionState | None, t: int) -> _SessionState:
        if previous is None:
            return self._initial_state()
        on, until, level = previous.in_session.copy(), previous.stretch_end.copy(), previous.level.copy()
        for replicate, seed in enumerate(self.population.seeds):
            num_changes = 0
            while (end_mask := until[replicate] <= t).any():
                draws = rng.generator(seed, rng.Purpose.SPELL, t, num_changes).random((2, self.population.clients))
                on[replicate] ^= end_mask
                mean = np.where(on[replicate], self.length, self._mean_absence[replicate])
                until[replicate] += np.where(end_mask, self._session_lengths(mean, draws[0]), 0.0)
                level[replicate] = np.where(end_mask, draws[1], level[replicate])
                num_changes += 1
        return _SessionState(on, until, level)

    def _initial_state(self) -> _SessionState:
        draws = uniforms(self.population, rng.Purpose.SPELL, size=(4, self.population.clients))
        on = draws[:, 0] < self.base_probabilities
        mean = np.where(on, self.length, self._mean_absence)
        # the stretch that covers round 0 is a long one; of it, what comes after is uniform
        remaining_length = draws[:, 1] * self._session_lengths(mean, draws[:, 2], biased=True)
        remaining_length = np.where(self.base_probabilities == 1, np.inf, remaining_length)
        return _SessionState(on, remaining_length, draws[:, 3])

    def _session_lengths(self, mean: np.ndarray, u: np.ndarray, biased: bool = False) -> np.ndarray:
        """Lengths of these means; `biased`: of the stretch that covers a given moment, of density ∝ x f(x)."""
        with np.errstate(invalid="ignore"):  # ∞ · 0
            lengths = mean * self._standard_lengths(u, biased)
        return np.where(np.isinf(mean), np.inf, lengths)

    def _standard_lengths(self, u: np.ndarray, biased: bool) -> np.ndarray:
        """Lengths of mean 1, by inversion."""
        from scipy.special import gamma, gammaincinv, ndtri  # here: other processes need not wait for it

        if self.lengths == "lognormal":
            normal = ndtri(np.clip(u, 1e-300, None))
            return np.exp(self.shape * normal + (self.shape**2 / 2 if biased else -(self.shape**2) / 2))
        k = self.shape if self.lengths == "weibull" else 1.0
        power = gammaincinv(1 + 1 / k, u) if biased else -np.log1p(-u)
        return power ** (1 / k) / gamma(1 + 1 / k)
