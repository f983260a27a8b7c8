"""ε of what is released: beside dp_accounting with compositions written out here, by RDP and by PLD."""

from __future__ import annotations

import math

import dp_accounting as dp
import numpy as np
import pytest
from claims import CORRECT, MEAN, SUM, Case, coins, noise
from dp_accounting import pld, rdp

from fedsim.availability import Bernoulli, Cyclic, Full, Probability, Trajectory, UniformK
from fedsim.availability.availability import Availability
from fedsim.local import Momentum
from fedsim.uplink import QSGD, Clip, GaussianNoise, TopK, TreeNoise
from fedsim.uplink.accounting import (
    KNOWN_SAMPLING,
    NEIGHBOURS_ADD_OR_REMOVE,
    NEIGHBOURS_REPLACE_ONE,
    NEIGHBOURS_ZERO_OUT,
    POISSON_SAMPLING,
    RELATION_DESCRIPTIONS,
    WITHOUT_REPLACEMENT,
    privacy,
)
from fedsim.uplink.stage import Stage

DELTA = 1e-5
RELATION = {
    "add": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace": dp.NeighboringRelation.REPLACE_ONE,
    "zero": dp.NeighboringRelation.REPLACE_SPECIAL,
}


def by_rdp(event: dp.DpEvent, rounds: int, relation: str = "zero", delta: float = DELTA) -> float:
    accountant = rdp.RdpAccountant(neighboring_relation=RELATION[relation])
    return accountant.compose(event, rounds).get_epsilon(delta)


def by_pld(event: dp.DpEvent, rounds: int, relation: str = "zero", delta: float = DELTA) -> float:
    accountant = pld.PLDAccountant(RELATION[relation], value_discretization_interval=1e-3)
    return accountant.compose(event, rounds).get_epsilon(delta)


def joint(z: float, count_noise: float = math.inf, moved: float = 1.0) -> float:
    """The multiplier of sum and count together, from sensitivities `moved` · C and 1."""
    of_rows = (z**-2 - (2 * count_noise) ** -2) ** -0.5
    return ((moved / of_rows) ** 2 + (1 / count_noise) ** 2) ** -0.5


@pytest.mark.parametrize(
    ("z", "count_noise", "rounds", "epsilon"),
    [(2.0, 1.01, 1, 4.69), (1.0, 0.6, 1, 9.16), (1.0, 1.0, 20, 44.3), (2.0, 1.2, 50, 47.5)],
)
def test_a_client_moves_the_count_by_one(z: float, count_noise: float, rounds: int, epsilon: float) -> None:
    """Bits are released as 0 or 1. Centred at 1/2 they would give 2.17, 4.73, 30.1 and 22.0."""
    case = Case(noise(multiplier=z, quantile=0.5, count_noise=count_noise), rounds=rounds)
    said = case.simulation().privacy(rounds)
    assert said.epsilon == pytest.approx(epsilon, rel=2e-3)
    assert said.epsilon == pytest.approx(by_rdp(dp.GaussianDpEvent(joint(z, count_noise)), rounds), rel=1e-9)
    assert by_pld(dp.GaussianDpEvent(joint(z, count_noise)), rounds) <= said.epsilon


@pytest.mark.parametrize(
    ("q", "count_noise", "rounds"), [(0.9, 1.2, 1), (0.2, None, 12), (0.5, 1.2, 1), (0.5, None, 1), (0.9, 1.2, 12)]
)
def test_secret_coins(q: float, count_noise: float | None, rounds: int) -> None:
    options = {} if count_noise is None else {"quantile": 0.5, "count_noise": count_noise}
    said = Case(noise(multiplier=2.0, **options), coins(q), SUM, rounds).simulation().privacy(rounds)
    z = joint(2.0, count_noise or math.inf)
    event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z))
    wanted = by_rdp(event, rounds, "add")
    empty = rounds * (1 - q) ** 9
    if DELTA + (1 + math.exp(wanted)) * empty >= 1:
        assert said.epsilon is None
        return
    assert said.epsilon == pytest.approx(wanted, rel=1e-9)
    assert said.delta == pytest.approx(DELTA + (1 + math.exp(wanted)) * empty)
    assert 0.6 * wanted < by_pld(event, rounds, "add") <= wanted
    assert (said.mechanism.relation, said.mechanism.sampling) == (NEIGHBOURS_ADD_OR_REMOVE, POISSON_SAMPLING)


@pytest.mark.parametrize(("k", "count_noise"), [(2, 1.2), (5, None), (5, 1.2), (10, None)])
def test_k_of_m(k: int, count_noise: float | None) -> None:
    """One client replaced by another moves the sum by 2 C and the count by 1."""
    options = {} if count_noise is None else {"quantile": 0.5, "count_noise": count_noise}
    said = Case(noise(multiplier=2.0, **options), lambda: UniformK(k), MEAN, 6).simulation().privacy(6)
    z = joint(2.0, count_noise or math.inf, moved=2.0)
    assert z == pytest.approx(1.0)
    event = dp.SampledWithoutReplacementDpEvent(10, k, dp.GaussianDpEvent(z))
    assert said.epsilon == pytest.approx(by_rdp(event, 6, "replace"), rel=1e-9)
    assert (said.mechanism.relation, said.mechanism.sampling) == (NEIGHBOURS_REPLACE_ONE, WITHOUT_REPLACEMENT)


def test_noise_in_each_row() -> None:
    options = {"multiplier": 3.0, "quantile": 0.4, "count_noise": 2.0, "per": "client"}
    said = Case(noise(**options), coins(0.3), SUM, 5).simulation().privacy(5)
    assert said.epsilon == pytest.approx(by_rdp(dp.GaussianDpEvent(1.5), 5, "replace"), rel=1e-9)
    assert 0.9 * said.epsilon < by_pld(dp.GaussianDpEvent(3.0), 5, "replace") <= said.epsilon  # it doubles by itself
    assert (said.mechanism.relation, said.mechanism.sampling) == (NEIGHBOURS_REPLACE_ONE, KNOWN_SAMPLING)
    assert "the server is trusted with the counts" in said.statement


@pytest.mark.parametrize("groups", [1, 4, 7])
def test_a_tree_in_which_each_client_takes_part_once(groups: int) -> None:
    """As many Gaussians as a leaf has nodes that are ever used, ⌈log₂(T + 1)⌉."""
    said = Case(lambda: [TreeNoise(multiplier=3.0)], lambda: Cyclic(groups), SUM, groups).simulation()
    said = said.privacy(groups)
    nodes = math.ceil(math.log2(groups + 1))
    assert said.epsilon == pytest.approx(by_rdp(dp.GaussianDpEvent(3.0), nodes), rel=1e-9)
    assert by_pld(dp.GaussianDpEvent(3.0), nodes) <= said.epsilon
    assert said.mechanism.relation == NEIGHBOURS_ZERO_OUT


def test_a_tree_in_which_somebody_comes_again_claims_nothing() -> None:
    run = Case(lambda: [TreeNoise(multiplier=3.0)], lambda: Cyclic(3), SUM, 4).simulation()
    assert run.privacy(3).epsilon is not None
    assert "a bound on how often a client participates" in run.privacy(4).statement
    after = Case(lambda: [Clip(quantile=0.5, count_noise=1.5), TreeNoise(multiplier=3.0)], lambda: Cyclic(3), MEAN, 3)
    events = [dp.GaussianDpEvent(3.0), dp.GaussianDpEvent(3.0), dp.GaussianDpEvent(1.5)]
    wanted = by_rdp(dp.ComposedDpEvent(events), 1)  # counts show one round's bit of a client that comes once
    assert after.simulation().privacy(3).epsilon == pytest.approx(wanted, rel=1e-9)


def test_a_norm_before_the_noise_that_follows_counts_is_released_too() -> None:
    stages = lambda: [Clip(quantile=0.5, count_noise=1.5), GaussianNoise(multiplier=3.0)]  # noqa: E731
    event = dp.ComposedDpEvent([dp.GaussianDpEvent(3.0), dp.GaussianDpEvent(1.5)])
    assert Case(stages).simulation().privacy(4).epsilon == pytest.approx(by_rdp(event, 4), rel=1e-9)


class Own(Availability):
    """Everybody, as often as one says."""

    def __init__(self, count: int) -> None:
        self.count = count

    def probabilities(self, t: int) -> np.ndarray:
        return np.ones(self.population.shape)

    def counts(self, t: int) -> np.ndarray:
        return np.full(self.population.shape, self.count)


class OwnBase(Probability):
    def base(self, population):
        return np.full(population.shape, 0.9)


class OwnTrajectory(Trajectory):
    def at(self, t, base, population):
        return base


NO_CLAIM = {
    "compressed after the noise": (lambda: [GaussianNoise(), TopK(k=1)], Full, "TopK comes after the noise"),
    "clipped after the noise": (lambda: [GaussianNoise(), Clip()], Full, "Clip comes after the noise"),
    "quantized after a tree": (lambda: [TreeNoise(), QSGD(4)], lambda: Cyclic(2), "QSGD comes after the noise"),
    "a norm of its own without noise": (
        lambda: [Clip(quantile=0.5), GaussianNoise()], Full, "set uplink.clip.count_noise"
    ),
    "twice a round": (lambda: [GaussianNoise()], lambda: Own(2), "drawn twice in a round counts twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_CLAIM)
def test_nothing_is_claimed_where_the_sum_has_not_the_noise(name: str) -> None:
    stages, availability, why = NO_CLAIM[name]
    said = Case(stages, availability, MEAN, 2).simulation().privacy(2)
    assert said.epsilon is None
    assert why in said.statement
    assert said.as_json()["relation"] is None


@pytest.mark.parametrize(
    ("availability", "sampling"),
    [
        (coins(0.9), POISSON_SAMPLING),
        (lambda: Bernoulli(OwnBase()), KNOWN_SAMPLING),
        (lambda: Bernoulli(trajectory=OwnTrajectory()), KNOWN_SAMPLING),
        (lambda: Own(1), KNOWN_SAMPLING),
    ],
)
def test_coins_of_ones_own_may_follow_the_data_and_amplify_nothing(availability, sampling) -> None:
    said = Case(noise(), availability, SUM).simulation().privacy(1)
    assert said.mechanism.sampling == sampling


def test_clients_that_remember_are_not_amplified_without_replacement() -> None:
    """What a later row shows of earlier rounds shows who took part in them."""
    plain = Case(noise(multiplier=2.0), lambda: UniformK(4), MEAN, 3)
    feedback = Case(lambda: [TopK(k=1, feedback="ef14"), GaussianNoise(multiplier=2.0)], lambda: UniformK(4), MEAN, 3)
    assert plain.simulation().privacy(3).mechanism.sampling == WITHOUT_REPLACEMENT
    assert feedback.simulation().privacy(3).mechanism.sampling == KNOWN_SAMPLING
    run = plain.simulation()
    run.trainer.local_rule = Momentum(lr=0.1, state="client")
    assert run.privacy(3).mechanism.sampling == KNOWN_SAMPLING


@pytest.mark.parametrize("name", CORRECT)
def test_a_claim_names_its_relation(name: str) -> None:
    case = CORRECT[name]
    said = case.simulation().privacy(case.rounds)
    assert said.epsilon > 0
    told = said.as_json()
    assert told["relation"] in RELATION_DESCRIPTIONS.values()
    assert told["relation"] in said.statement or said.statement.count("each row by itself, replaced by another") == 1


@pytest.mark.parametrize(
    ("stage", "end"), [(GaussianNoise(), "the noise; set per=client"), (TreeNoise(), "the noise")], ids=["each", "tree"]
)
def test_where_rows_are_seen_noise_of_their_sum_claims_nothing(stage: Stage, end: str) -> None:
    """The remedy is named where there is one: a tree has no noise of single rows."""
    claim = privacy([stage], Full(), "rows", leaks=[], rounds=1)
    assert claim is not None
    assert claim.epsilon is None
    assert claim.statement.endswith(f"only the sum has {end}")
