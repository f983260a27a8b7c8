"""What differential privacy a run may claim: ε where its sampling is what an accountant assumes, else why none.

The unit is a client, and the claim is against whoever sees the models of all rounds. The accountant is the RDP one of
`dp_accounting` (extra `privacy`). What is chosen by looking at results, what evaluations show, and availability that
follows from the data are outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsim.availability import Availability, Bernoulli, ClassCorrelated, LabelOrdered, Stationary, UniformK
from fedsim.uplink.base import Stage
from fedsim.uplink.private import GaussianNoise, TreeNoise


@dataclass(frozen=True)
class Privacy:
    """What may be said of a run.

    Attributes:
        said: in a sentence.
        epsilon, delta: of it; None where none may be said, or the accountant is not installed.
    """

    said: str
    epsilon: float | None = None
    delta: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {"said": self.said, "epsilon": self.epsilon, "delta": self.delta}


def privacy(
    stages: Sequence[Stage], availability: Availability, hears: str, leaks: Iterable[str], rounds: int
) -> Privacy | None:
    """What may be claimed after so many rounds; None of an uplink without noise.

    Args:
        stages: of the uplink.
        availability: who takes part.
        hears: what the server makes of rows, see `fedsim.strategies.Strategy`.
        leaks: what else clients send, each in a few words.
        rounds: T.
    """
    noisy = [stage for stage in stages if isinstance(stage, (GaussianNoise, TreeNoise))]
    if not noisy or not rounds:
        return None
    why = _forbidden(noisy, availability, hears, list(leaks))
    if why:
        return Privacy(f"no ε is said: {why}")
    stage = noisy[0]
    assert isinstance(stage, GaussianNoise)
    return _claimed(stage, availability, hears, rounds)


def _forbidden(noisy: Sequence[Stage], availability: Availability, hears: str, leaks: list[str]) -> str:
    """Why nothing can be claimed; empty where something can."""
    stage = noisy[0]
    if leaks:
        return f"{', '.join(leaks)} without noise"
    if len(noisy) > 1:
        return "noise is added more than once, and which of it counts is not looked at"
    if isinstance(stage, TreeNoise):
        return (
            "the tree's noise needs a bound on how often a client comes, which availability does not give; where each "
            "comes once it is that of ⌈log₂(T + 1)⌉ Gaussians of this multiplier"
        )
    assert isinstance(stage, GaussianNoise)
    if stage.quantile is not None and not stage.count_noise:
        return "the norm follows counts that have no noise; give uplink.gaussian.count_noise"
    if stage.per == "round" and hears == "rows":
        return "the strategy makes more of the rows than their sum, which alone has the noise; take per=client"
    if availability.law == "multiset":
        return "a client that is drawn twice counts twice, and is clipped once"
    return ""


def _claimed(stage: GaussianNoise, availability: Availability, hears: str, rounds: int) -> Privacy:
    """ε of the events that bound this sampling."""
    z, m = stage.multiplier, availability.population.clients
    if stage.per == "client":
        how = "each row by itself, replaced by another; no amplification, as if everybody came in every round"
        return _of(_Event("gaussian", z / 2, replace=True), stage.delta, rounds, how)
    if isinstance(availability, UniformK):
        how = f"one client replaced by another; {availability.k} of {m} drawn without replacement, in secret"
        return _of(_Event("without", z / 2, m, availability.k, replace=True), stage.delta, rounds, how)
    if hears == "sum" and type(availability) is Bernoulli and not _from_data(availability):
        q, empty = _coins(availability, rounds)
        how = f"one client added or removed; everybody by a secret coin of at most {q:g}"
        return _of(_Event("poisson", z, q=q), stage.delta, rounds, how, empty)
    how = "one client's rows replaced by zeros; no amplification, who comes being known, and as if in every round"
    return _of(_Event("gaussian", z), stage.delta, rounds, how)


def _from_data(availability: Bernoulli) -> bool:
    return isinstance(availability.base, (ClassCorrelated, LabelOrdered))


def _coins(availability: Bernoulli, rounds: int) -> tuple[float, float]:
    """The largest p_i^t, and a bound on the probability of any empty round: those add no noise, and are seen."""
    still = isinstance(availability.trajectory, Stationary)
    largest, empty = 0.0, 0.0
    for t in range(1 if still else rounds):
        p = availability.probabilities(t)
        largest = max(largest, float(p.max()))
        empty += float(np.prod(np.sort(1 - p, axis=1)[:, 1:], axis=1).max())  # the likeliest client left out
    return largest, min(1.0, empty * (rounds if still else 1))


@dataclass(frozen=True)
class _Event:
    """One round: the kind of its sampling, the multiplier, and what the sampling needs."""

    kind: str
    multiplier: float
    clients: int = 0
    drawn: int = 0
    q: float = 1.0
    replace: bool = False


def _of(event: _Event, delta: float, rounds: int, how: str, empty: float = 0.0) -> Privacy:
    try:
        epsilon = _epsilon(event, delta, rounds)
    except ImportError:
        return Privacy(f"ε is not computed without dp-accounting: install fedsim-torch[privacy] ({how})")
    whole = delta + (1 + math.exp(min(epsilon, 700.0))) * empty
    if not whole < 1:
        return Privacy(f"no ε is said: a round without anybody has no noise, and comes with probability {empty:.2g}")
    said = f"ε = {epsilon:.4g} at δ = {whole:.3g} after {rounds} rounds (RDP): {how}"
    return Privacy(said, epsilon, whole)


def _epsilon(event: _Event, delta: float, rounds: int) -> float:
    """By the library.

    Raises:
        ImportError: it is not installed.
    """
    import dp_accounting as dp
    from dp_accounting import rdp

    relation = dp.NeighboringRelation.REPLACE_ONE if event.replace else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    one = dp.GaussianDpEvent(event.multiplier)
    if event.kind == "poisson":
        one = dp.PoissonSampledDpEvent(event.q, one)
    elif event.kind == "without":
        one = dp.SampledWithoutReplacementDpEvent(event.clients, event.drawn, one)
    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    accountant.compose(one, rounds)
    return float(accountant.get_epsilon(delta))
