"""Devices with sessions and absences of random length, in several time zones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedsim.availability.availability import Availability, Population, draw_uniforms
from fedsim.availability.lengths import SHAPE_RANGE_BY_LAW, check_shape_parameter, unit_mean_lengths
from fedsim.availability.probabilities import Probability, Uniform
from fedsim.availability.processes import RoundStates
from fedsim.availability.trajectories import Stationary, Trajectory
from fedsim.core import rng
from fedsim.core.constraints import NonNegative, OneOf, Positive
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError


@dataclass
class _DeviceSessions:
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
            raise ConfigError(
                key="length",
                value=length,
                needs="must be at least 1 round; for shorter sessions use availability=bernoulli",
            )
        self.lengths = law
        self.shape = shape
        check_shape_parameter(law, shape)

    def setup(self, population: Population) -> None:
        super().setup(population)
        self.base_probabilities = p = self.base.base(population)
        self._mean_absence = np.divide(self.length * (1 - p), p, out=np.full(p.shape, np.inf), where=p > 0)
        self._walk = RoundStates(self._next_state)

    def probabilities(self, t: int) -> np.ndarray:
        probabilities = self.trajectory.at(t, self.base_probabilities, self.population)
        return np.clip(probabilities, 0.0, self.base_probabilities)

    def counts(self, t: int) -> np.ndarray:
        session_state, p = self._walk.at(t), self.base_probabilities
        return (session_state.in_session & (session_state.level * p < self.probabilities(t))).astype(np.int8)

    def _next_state(self, previous_state: _DeviceSessions | None, t: int) -> _DeviceSessions:
        if previous_state is None:
            return self._initial_state()
        in_session, stretch_end, activity_level = (
            previous_state.in_session.copy(),
            previous_state.stretch_end.copy(),
            previous_state.level.copy(),
        )
        for replicate, seed in enumerate(self.population.seeds):
            num_changes = 0
            while (end_mask := stretch_end[replicate] <= t).any():
                draws = rng.generator(seed, rng.Purpose.SPELL, t, num_changes).random((2, self.population.clients))
                in_session[replicate] ^= end_mask
                mean = np.where(in_session[replicate], self.length, self._mean_absence[replicate])
                stretch_end[replicate] += np.where(end_mask, self._session_lengths(mean, draws[0]), 0.0)
                activity_level[replicate] = np.where(end_mask, draws[1], activity_level[replicate])
                num_changes += 1
        return _DeviceSessions(in_session, stretch_end, activity_level)

    def _initial_state(self) -> _DeviceSessions:
        uniform_draws = draw_uniforms(self.population, rng.Purpose.SPELL, size=(4, self.population.clients))
        in_session = uniform_draws[:, 0] < self.base_probabilities
        mean = np.where(in_session, self.length, self._mean_absence)
        # the session that covers round 0 is length-biased, and its remaining time is uniform
        remaining_length = uniform_draws[:, 1] * self._session_lengths(mean, uniform_draws[:, 2], length_biased=True)
        remaining_length = np.where(self.base_probabilities == 1, np.inf, remaining_length)
        return _DeviceSessions(in_session, remaining_length, uniform_draws[:, 3])

    def _session_lengths(self, mean: np.ndarray, u: np.ndarray, length_biased: bool = False) -> np.ndarray:
        """Lengths of these means; `length_biased`: of the stretch that covers a given moment, of density ∝ x f(x)."""
        with np.errstate(invalid="ignore"):  # ∞ · 0
            lengths = mean * unit_mean_lengths(self.lengths, self.shape, u, length_biased)
        return np.where(np.isinf(mean), np.inf, lengths)
