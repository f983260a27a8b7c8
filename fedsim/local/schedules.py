"""Learning-rate schedules: the factor on `lr` at a round and local step, on the host.

Whose clock: rounds t are the federation's, whoever took part in them. Steps and epochs are counted as if the client had
taken part in all of them: steps t·s + k with *its own* s local steps a round, epochs by its own passes. With
`local_steps` the steps, with `local_epochs` the epochs are one clock for everybody. The other way round clients of
unequal size differ: with `local_epochs` a client with a hundred times the samples is a hundred times as far on a
schedule that counts steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated

from fedsim.core.constraints import Count, CountOrZero, Fraction, OneOf, Positive, PositiveFraction, Validated
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError


class Schedule(Validated, ABC):
    """The factor on the base learning rate.

    Attributes:
        steady: is it the same for all steps of a round, whoever takes them? Then it is asked for once a round.
    """

    steady: bool = False

    @abstractmethod
    def factor(self, t: int, k: int, steps: int, per_pass: int = 1) -> float:
        """Factor at round t and local step k, both from 0; `steps` local steps make a round of the client asked for,
        `per_pass` of them a pass through its data."""


class Constant(Schedule):
    """η."""

    steady = True

    def factor(self, t: int, k: int, steps: int, per_pass: int = 1) -> float:
        return 1.0


class InverseSqrt(Schedule):
    """η / √(t / period + 1), constant within a round (fedawe Table 6: period 10)."""

    steady = True

    def __init__(self, period: Positive = 10.0) -> None:
        self.period = period

    def factor(self, t: int, k: int, steps: int, per_pass: int = 1) -> float:
        return (t / self.period + 1.0) ** -0.5


SCHEDULE_UNITS = ("step", "epoch", "round", "local_step")


def elapsed_units(unit: str, t: int, k: int, steps: int, per_pass: int) -> int:
    """How many local steps, passes through the data, rounds, or local steps of this round have gone by."""
    if unit in ("round", "local_step"):
        return t if unit == "round" else k
    return t * steps + k if unit == "step" else (t * steps + k) // per_pass


class PerStep(Schedule):
    """η · decay^n, n = local steps so far over all rounds (apfl §5: 1 % per iteration, decay 0.99), or passes through a
    client's data with `unit: epoch` (its authors' program), or rounds with `unit: round`, or local steps of the round
    with `unit: local_step`, so that each round begins anew."""

    def __init__(self, decay: PositiveFraction = 0.99, unit: Annotated[str, OneOf(*SCHEDULE_UNITS)] = "step") -> None:
        self.decay = decay
        self.unit = unit
        self.steady = unit == "round"

    def factor(self, t: int, k: int, steps: int, per_pass: int = 1) -> float:
        return self.decay ** elapsed_units(self.unit, t, k, steps, per_pass)


class Cosine(Schedule):
    """From η down to η·floor along half a cosine over `rounds` rounds, constant within a round and after them; the
    first `warmup` rounds rise to η in equal steps (Loshchilov and Hutter, ICLR 2017, eq. 5, without restarts)."""

    steady = True
    effective_if = (
        EffectiveIf("floor", lambda component, run: component.warmup < run.rounds, "more rounds than {at}.warmup"),
    )

    def __init__(self, rounds: Count = 100, warmup: CountOrZero = 0, floor: Fraction = 0.0) -> None:
        self.rounds = rounds
        self.warmup = warmup
        self.floor = floor
        if self.warmup >= self.rounds:
            raise ConfigError(
                key="warmup", value=warmup, needs=f"must be below {{rounds}}={rounds}", mentions=("rounds",)
            )

    def factor(self, t: int, k: int, steps: int, per_pass: int = 1) -> float:
        if t < self.warmup:
            return (t + 1) / (self.warmup + 1)
        progress = min(1.0, (t - self.warmup) / (self.rounds - self.warmup))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2


class Inverse(Schedule):
    """η / (n + offset), n = local steps so far, or as `PerStep` counts (p-fedavg's a / (t + b): lr is a).

    With `unit: local_step` it is the rate of lazy deployment, a / (k + b) with k steps since the last deployment.
    """

    def __init__(self, offset: Positive = 1.0, unit: Annotated[str, OneOf(*SCHEDULE_UNITS)] = "step") -> None:
        self.offset = offset
        self.unit = unit
        self.steady = unit == "round"

    def factor(self, t: int, k: int, steps: int, per_pass: int = 1) -> float:
        return 1.0 / (elapsed_units(self.unit, t, k, steps, per_pass) + self.offset)
