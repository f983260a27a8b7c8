"""The differential privacy that a run may claim: ε if an accountant supports its sampling, otherwise the reason.

The unit of privacy is a client, and the adversary sees the models of all rounds. A run is described as a `Mechanism`:
what is released in a round, how clients are sampled, and which two federations are compared. ε of it comes from the RDP
accountant of `dp_accounting` (extra `privacy`). Outside of the claim are hyperparameters chosen by results, what
evaluations show, and availability that depends on the data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsim.availability import Availability, Bernoulli, Groups, Lognormal, Stationary, Uniform, UniformK
from fedsim.availability.trajectories import InterleavedSine, Jitter, Sine, Staircase
from fedsim.uplink.private import Clip, GaussianNoise, TreeNoise
from fedsim.uplink.stage import Stage

# Neighbouring relation, by its name in dp_accounting → in words.
NEIGHBOURS_ADD_OR_REMOVE, NEIGHBOURS_REPLACE_ONE, NEIGHBOURS_ZERO_OUT = (
    "ADD_OR_REMOVE_ONE",
    "REPLACE_ONE",
    "REPLACE_SPECIAL",
)
RELATION_DESCRIPTIONS = {
    NEIGHBOURS_ADD_OR_REMOVE: "one client added or removed",
    NEIGHBOURS_REPLACE_ONE: "one client replaced by another",
    NEIGHBOURS_ZERO_OUT: "one client's rows replaced by zeros",
}
# What the adversary knows about participation.
KNOWN_SAMPLING, POISSON_SAMPLING, WITHOUT_REPLACEMENT = "known", "poisson", "without_replacement"

# Processes whose probabilities do not depend on the data; those of subclasses may.
INDEPENDENT_BASES = (Uniform, Groups, Lognormal)
INDEPENDENT_TRAJECTORIES = (Stationary, Staircase, Sine, InterleavedSine, Jitter)


@dataclass(frozen=True)
class Mechanism:
    """The quantities about a client that a round releases, in the form that an accountant needs.

    The count of rows within the clipping norm adds a bit, 0 or 1, for every client, so one client moves it by 1 under
    all three relations. One client moves the sum of rows by C, or by 2 C where it is replaced by another.

    Attributes:
        relation: a key of `RELATION_DESCRIPTIONS`.
        sampling: KNOWN, POISSON or WITHOUT_REPLACEMENT.
        sum_multiplier: noise of the released sum (or row) over what one client can move it.
        count_multipliers: the same of each released count of rows within a clipping norm.
        q: the largest probability of a client, under Poisson sampling.
        clients, num_drawn: m and k, without replacement.
        tree: the noise is a binary tree's; each client takes part once.
        by_row: each row has noise of its own and is released; otherwise the sum of a round's rows.
    """

    relation: str
    sampling: str
    sum_multiplier: float
    count_multipliers: tuple[float, ...] = ()
    q: float = 1.0
    clients: int = 0
    num_drawn: int = 0
    tree: bool = False
    by_row: bool = False


@dataclass(frozen=True)
class Privacy:
    """The privacy claim of a run.

    Attributes:
        statement: the claim as a sentence.
        epsilon, delta: of the claim; None where there is none, or the accountant is not installed.
        mechanism: what was accounted; None where nothing can be claimed.
    """

    statement: str
    epsilon: float | None = None
    delta: float | None = None
    mechanism: Mechanism | None = None

    def as_json(self) -> dict[str, Any]:
        mechanism = self.mechanism
        return {
            "said": self.statement,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "relation": None if mechanism is None else RELATION_DESCRIPTIONS[mechanism.relation],
            "sampling": None if mechanism is None else mechanism.sampling,
        }


def privacy(
    stages: Sequence[Stage],
    availability: Availability,
    server_sees: str,
    leaks: Iterable[str],
    rounds: int,
    has_client_memory: bool = False,
) -> Privacy | None:
    """Return the privacy claim after `rounds` rounds; None for an uplink without noise.

    Args:
        stages: of the uplink.
        availability: who takes part.
        server_sees: what the server makes of rows, see `fedsim.strategies.Strategy`.
        leaks: what else clients send, each in a few words.
        rounds: T.
        has_client_memory: whether a client's row depends on the earlier rounds in which it took part (local rule,
            shift).
    """
    noisy = [stage for stage in stages if isinstance(stage, (GaussianNoise, TreeNoise))]
    if not noisy or not rounds:
        return None
    reason = _no_claim_reason(stages, noisy, availability, server_sees, list(leaks), rounds)
    if reason:
        return Privacy(f"no ε is claimed: {reason}")
    stage, earlier_stages = noisy[0], stages[: stages.index(noisy[0])]
    counts = tuple(s.count_noise for s in (*earlier_stages, stage) if isinstance(s, Clip) and s.quantile is not None)
    if isinstance(stage, TreeNoise):
        mechanism = Mechanism(NEIGHBOURS_ZERO_OUT, KNOWN_SAMPLING, stage.multiplier, counts, tree=True)
        description = (
            "one client's rows replaced by zeros; each client participates at most once, in a round that the server "
            "knows; noise of a binary tree"
        )
        return _mechanism_privacy(mechanism, stage.delta, rounds, description)
    assert isinstance(stage, GaussianNoise)
    has_client_memory = has_client_memory or any(_has_client_memory(s, availability) for s in earlier_stages)
    return _claimed_epsilon(stage, counts, availability, server_sees, rounds, has_client_memory)


def _no_claim_reason(
    stages: Sequence[Stage],
    noisy: Sequence[Stage],
    availability: Availability,
    server_sees: str,
    leaks: list[str],
    rounds: int,
) -> str:
    """Return why nothing can be claimed; '' if something can."""
    stage, noise_index = noisy[0], stages.index(noisy[0])
    if leaks:
        return f"{', '.join(leaks)} without noise"
    if len(noisy) > 1:
        return "noise is added more than once, which is not accounted for"
    has_shared_noise = isinstance(stage, TreeNoise) or (isinstance(stage, GaussianNoise) and stage.per == "round")
    if has_shared_noise and noise_index + 1 < len(stages):
        next_stage_name = type(stages[noise_index + 1]).__name__
        return (
            f"{next_stage_name} comes after the noise and changes rows one at a time, so that their "
            "sum no longer has the same "
            "noise; put it before the noise"
        )
    for earlier_stage in (*stages[:noise_index], stage):
        if leak := _noiseless_memory_reason(earlier_stage):
            return leak
    if has_shared_noise and server_sees == "rows":
        remedy = "; set per=client" if isinstance(stage, GaussianNoise) else ""
        return f"the strategy uses more of the rows than their sum, and only the sum has the noise{remedy}"
    if availability.law == "multiset" or (
        _is_user_availability(availability) and _max_count_per_round(availability, rounds) > 1
    ):
        return "a client that is drawn twice in a round counts twice, and is clipped once"
    if isinstance(stage, TreeNoise) and _has_repeat_participation(availability, rounds):
        return (
            "the noise of a tree needs a bound on how often a client participates, which this availability does not "
            "give; where each client participates at most once, ε is that of ⌈log₂(T + 1)⌉ Gaussian mechanisms of this "
            "multiplier"
        )
    return ""


def _noiseless_memory_reason(stage: Stage) -> str:
    """Return what the server keeps between rounds that was computed from rows without noise; '' if nothing is."""
    if isinstance(stage, Clip):
        if stage.quantile is not None and not stage.count_noise:
            name = "clip" if type(stage) is Clip else "gaussian"
            return f"the clipping norm adapts to counts that have no noise; set uplink.{name}.count_noise"
    elif type(stage).initial_server_memory is not Stage.initial_server_memory:
        return f"the server state of {type(stage).__name__} depends on rows without noise"
    return ""


def _claimed_epsilon(
    stage: GaussianNoise,
    counts: tuple[float, ...],
    availability: Availability,
    server_sees: str,
    rounds: int,
    has_client_memory: bool,
) -> Privacy:
    """Return ε of the events that bound this sampling."""
    z, m = sum_noise_multiplier(stage), availability.population.clients
    if stage.per == "client":
        description = (
            "each row by itself, replaced by another; no amplification by sampling: every client is assumed to "
            "participate in every round"
        )
        if counts:
            description += "; the server is trusted with the counts of rows within the clipping norm"
        return _mechanism_privacy(
            Mechanism(NEIGHBOURS_REPLACE_ONE, KNOWN_SAMPLING, z / 2, counts, by_row=True),
            stage.delta,
            rounds,
            description,
        )
    if type(availability) is UniformK and not has_client_memory:
        mechanism = Mechanism(
            NEIGHBOURS_REPLACE_ONE, WITHOUT_REPLACEMENT, z / 2, counts, clients=m, num_drawn=availability.k
        )
        description = (
            f"one client replaced by another; {availability.k} of {m} clients are sampled without replacement, and the "
            "sample is kept secret"
        )
        return _mechanism_privacy(mechanism, stage.delta, rounds, description)
    if server_sees == "sum" and type(availability) is Bernoulli and _has_data_free_probabilities(availability):
        q, empty_round_probability = _sampling_rate_bounds(availability, rounds)
        description = (
            f"one client added or removed; each client participates independently with probability at most {q:g}, and "
            "the sample is kept secret"
        )
        return _mechanism_privacy(
            Mechanism(NEIGHBOURS_ADD_OR_REMOVE, POISSON_SAMPLING, z, counts, q=q),
            stage.delta,
            rounds,
            description,
            empty_round_probability,
        )
    description = (
        "one client's rows replaced by zeros; no amplification by sampling: the server knows which clients "
        "participate, and every client is assumed to participate in every round"
    )
    return _mechanism_privacy(
        Mechanism(NEIGHBOURS_ZERO_OUT, KNOWN_SAMPLING, z, counts), stage.delta, rounds, description
    )


def sum_noise_multiplier(stage: GaussianNoise | TreeNoise) -> float:
    """Return the noise multiplier of the sum, as the settings state it (not as the stage derived it from them)."""
    if isinstance(stage, TreeNoise) or stage.quantile is None or not stage.count_noise:
        return stage.multiplier
    return (stage.multiplier**-2 - (2 * stage.count_noise) ** -2) ** -0.5


def _has_data_free_probabilities(availability: Bernoulli) -> bool:
    """Return whether the probabilities are known not to depend on the data."""
    return type(availability.base) in INDEPENDENT_BASES and type(availability.trajectory) in INDEPENDENT_TRAJECTORIES


def _has_client_memory(stage: Stage, availability: Availability) -> bool:
    """Return whether a client's row depends on how the stage treated its earlier rows."""
    return availability.federation is not None and bool(stage.memory(availability.federation, 1))


def _is_user_availability(availability: Availability) -> bool:
    """Return whether an availability process is user-defined, so that its counts may be above 1."""
    return not type(availability).__module__.startswith("fedsim.")


def _max_count_per_round(availability: Availability, rounds: int) -> float:
    """Return the largest count of a client in a round."""
    return max(float(availability.counts(t).max(initial=0)) for t in range(rounds))


def _has_repeat_participation(availability: Availability, rounds: int) -> bool:
    """Return whether some client takes part more than once in these rounds."""
    times = np.zeros(availability.population.shape)
    for t in range(rounds):
        times += availability.counts(t)
        if times.max(initial=0) > 1:
            return True
    return False


def _sampling_rate_bounds(availability: Bernoulli, rounds: int) -> tuple[float, float]:
    """Return the largest p_i^t, and a bound on the probability of an empty round, which adds no noise and is
    visible."""
    is_stationary = isinstance(availability.trajectory, Stationary)
    max_sampling_rate, empty_round_probability = 0.0, 0.0
    for t in range(1 if is_stationary else rounds):
        p = availability.probabilities(t)
        max_sampling_rate = max(max_sampling_rate, float(p.max()))
        empty_round_probability += float(
            np.prod(np.sort(1 - p, axis=1)[:, 1:], axis=1).max()
        )  # without the client that is most likely to participate
    return max_sampling_rate, min(1.0, empty_round_probability * (rounds if is_stationary else 1))


def _mechanism_privacy(
    mechanism: Mechanism, delta: float, rounds: int, reason: str, empty_round_probability: float = 0.0
) -> Privacy:
    try:
        epsilon = epsilon_of(mechanism, delta, rounds)
    except ImportError:
        return Privacy(f"ε is not computed without dp-accounting: install fedsim-torch[privacy] ({reason})")
    total_privacy_delta = delta + (1 + math.exp(min(epsilon, 700.0))) * empty_round_probability
    if not total_privacy_delta < 1:
        return Privacy(
            "no ε is claimed: a round without clients has no noise, and its probability is "
            f"{empty_round_probability:.2g}"
        )
    statement = f"ε = {epsilon:.4g} at δ = {total_privacy_delta:.3g} after {rounds} rounds (RDP): {reason}"
    return Privacy(statement, epsilon, total_privacy_delta, mechanism)


def epsilon_of(mechanism: Mechanism, delta: float, rounds: int) -> float:
    """Return ε at δ after `rounds` rounds, by dp_accounting.

    Raises:
        ImportError: it is not installed.
    """
    import dp_accounting as dp
    from dp_accounting import rdp

    counts = [dp.GaussianDpEvent(multiplier) for multiplier in mechanism.count_multipliers]
    if mechanism.tree:  # a client that participates once changes the counts of one round
        tree = dp.SingleEpochTreeAggregationDpEvent(mechanism.sum_multiplier, rounds)
        event, rounds = dp.ComposedDpEvent([tree, *counts]), 1
    else:
        event = dp.GaussianDpEvent(mechanism.sum_multiplier)
        event = dp.ComposedDpEvent([event, *counts]) if counts else event
    if mechanism.sampling == POISSON_SAMPLING:
        event = dp.PoissonSampledDpEvent(mechanism.q, event)
    elif mechanism.sampling == WITHOUT_REPLACEMENT:
        event = dp.SampledWithoutReplacementDpEvent(mechanism.clients, mechanism.num_drawn, event)
    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation[mechanism.relation])
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about orders that it leaves out, which does not make ε smaller
    try:
        accountant.compose(event, rounds)
        return float(accountant.get_epsilon(delta))
    finally:
        logger.setLevel(level)
