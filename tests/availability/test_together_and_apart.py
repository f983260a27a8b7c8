"""Processes with a past or with company: chains, rests, shocks, factors, sessions, turns: what all of them must be.

The keys of all draws are fixed; statistical bounds are five standard errors. Many clients of one replicate stand for
many draws, since every client (or pair of clients, where they share something) is independent of the others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from told import Given, ready_for

from fedsim import Simulation
from fedsim.availability import (
    Arrivals,
    Availability,
    Bernoulli,
    CommonFactor,
    CommonShock,
    Cyclic,
    DeviceSessions,
    Groups,
    Markov,
    MinimumSeparation,
    Sine,
    Staircase,
    Uniform,
)
from fedsim.core import ConfigError
from fedsim.data.datasets import Quadratics
from fedsim.models import Mean
from fedsim.strategies import FedAvgKnown

NIGHT = {"period": 24, "low": 0.05, "share": 1 / 3}


def halves(m: int, first: float = 0.1, second: float = 0.9) -> Groups:
    """p_i of two halves, of which a single client is the first."""
    return Groups(p=[first, second][:m])


MADE: dict[str, Callable[[int], Availability]] = {
    "markov that stays": lambda m: Markov(halves(m), 0.7),
    "markov that changes": lambda m: Markov(halves(m, 0.4, 0.6), -0.5),
    "markov by group": lambda m: Markov(Uniform(0.5), [0.9, -0.9][:m]),
    "common_shock": lambda m: CommonShock(halves(m, 0.1, 0.6), Sine(), groups=-(-m // 2), shock=0.3, persistence=0.6),
    "common_factor": lambda m: CommonFactor(halves(m), Sine(), groups=-(-m // 2), correlation=0.6, persistence=0.5),
    "separation": lambda m: MinimumSeparation(halves(m), separation=3),
    "separation, moving": lambda m: MinimumSeparation(halves(m), Sine(period=7), 0.05, separation=2),
    "sessions": lambda m: DeviceSessions(halves(m, 0.2, 0.7), Staircase(**NIGHT, zones=6)),
    "sessions, lognormal": lambda m: DeviceSessions(halves(m, 0.2, 0.7), length=6, law="lognormal", shape=1.5),
    "sessions, weibull": lambda m: DeviceSessions(halves(m, 0.2, 0.7), length=3, law="weibull", shape=0.6),
}
TURNS: dict[str, Callable[[int], Availability]] = {
    "cyclic, new orders": lambda m: Cyclic(min(3, m), 2, "order"),
    "cyclic, new members": lambda m: Cyclic(min(3, m), 2, "members", k=1),
    "separation, drawn": lambda m: MinimumSeparation(halves(m), separation=min(2, m - 1), k=1),
}
OPEN = {  # whose probabilities depend on who is present, and so on the seed
    "arrivals": lambda m: Arrivals(halves(m), Sine(), initial=0.5, rate=0.3, lifetime=9.0, law="weibull", shape=0.7),
}
ALL = MADE | TURNS | OPEN


def seen(process: Availability, rounds: int) -> np.ndarray:
    """[T, R, m]"""
    return np.stack([process.counts(t) for t in range(rounds)]).astype(float)


@pytest.mark.parametrize("name", ALL)
def test_a_round_is_a_function_of_the_round_and_the_seed(name: str) -> None:
    """Asked out of order, twice, set up again, alone or in company; and what is returned belongs to the caller."""
    process = ready_for(ALL[name](7), (3,), 7)
    forward = [(process.counts(t), process.probabilities(t).copy()) for t in range(26)]
    for counts, _ in forward:
        assert counts.shape == (1, 7)
        assert set(np.unique(counts)) <= {0, 1}
    again = ready_for(ALL[name](7), (8,), 7)
    again.counts(12)
    again.setup(process.population)
    company = ready_for(ALL[name](7), (7, 3, 9), 7)
    for t in (25, 3, 3, 0, 17, 18):
        for fresh, row in ((process, 0), (again, 0), (company, 1)):
            counts, probabilities = fresh.counts(t), fresh.probabilities(t)
            assert np.array_equal(counts[row], forward[t][0][0])
            assert np.array_equal(probabilities[row], forward[t][1][0])
            counts[:] = 9
            probabilities[:] = 9
    assert any((company.counts(t)[0] != company.counts(t)[2]).any() for t in range(26))


@pytest.mark.parametrize("name", MADE)
def test_clients_come_as_often_as_their_probabilities_say_from_the_first_round_on(name: str) -> None:
    """Two of a pair are correlated at most fully, which doubles the variance of the mean over all."""
    m = 20_000
    process = ready_for(MADE[name](m), (0,), m)
    for t in (0, 1, 2, 5, 23):
        p = process.probabilities(t)[0]
        for half in (slice(0, m // 2), slice(m // 2, m)):
            error = (process.counts(t)[0] - p)[half].sum()
            assert abs(error) <= 5 * np.sqrt(2 * (p * (1 - p))[half].sum())


@pytest.mark.parametrize("name", TURNS)
def test_a_round_is_drawn_anew_by_every_seed(name: str) -> None:
    """Where orders are new in every cycle, the share of seeds in which a client comes is p_i^t."""
    process = ready_for(TURNS[name](5), tuple(range(600)), 5)
    if process.unknown_reason:
        return
    for t in (0, 3, 8):
        p, came = process.probabilities(t), process.counts(t)
        assert (np.abs(came.mean(0) - p[0]) <= 5 * np.sqrt(p[0] * (1 - p[0]) / 600)).all()


@pytest.mark.parametrize("name", ALL)
def test_a_single_client_is_a_population_too(name: str) -> None:
    process = ready_for(ALL[name](1), (0, 1), 1)
    assert seen(process, 5).shape == (5, 2, 1)
    assert process.probabilities(3).shape == (2, 1)


@pytest.mark.parametrize(
    "process",
    [
        Markov(Given(0.0, 1.0), 0.5),
        CommonShock(Given(0.0, 1.0), shock=0.0, persistence=0.5),
        CommonFactor(Given(0.0, 1.0), correlation=1.0),
        CommonFactor(Given(0.0, 1.0), correlation=0.5),
        DeviceSessions(Given(0.0, 1.0), law="lognormal"),
        MinimumSeparation(Given(0.0, 1.0), separation=0),
    ],
    ids=lambda process: type(process).__name__,
)
def test_who_never_comes_and_who_always_does(process: Availability) -> None:
    ready_for(process, (0, 1), 2)
    assert (seen(process, 60) == [0, 1]).all()
    assert (process.probabilities(7) == [0, 1]).all()


def test_in_turns_every_client_comes_once_a_cycle_in_a_new_order() -> None:
    """Groups stay what they are, or are dealt out anew."""
    m, groups, length = 10, 4, 3
    for reshuffle in ("order", "members"):
        came = seen(ready_for(Cyclic(groups, length, reshuffle), (0,), m), 40 * groups * length)[:, 0]
        cycles = came.reshape(40, groups, length, m)
        assert (cycles == cycles[:, :, :1]).all()  # a turn does not change within it
        assert (cycles[:, :, 0].sum(1) == 1).all()
        together = np.einsum("cgi,cgj->cij", cycles[:, :, 0], cycles[:, :, 0])
        assert ((together == together[0]).all()) == (reshuffle == "order")
        assert (cycles[1:] != cycles[:-1]).any(axis=(1, 2, 3)).mean() > 0.8


def test_of_the_group_whose_turn_it_is_so_many_are_drawn() -> None:
    process = ready_for(Cyclic(3, 5, k=2), (0, 1), 11)
    group = np.arange(11) * 3 // 11
    for t in range(30):
        came, p = process.counts(t), process.probabilities(t)
        assert (came.sum(1) == 2).all()
        assert (group[np.nonzero(came)[1]] == t // 5 % 3).all()
        np.testing.assert_allclose(p.sum(1), 2)
        assert (p[came == 1] > 0).all()


@pytest.mark.parametrize("zones", [1, 4, 24])
def test_time_zones_begin_their_period_one_after_the_other(zones: int) -> None:
    """In zone z it is z/zones of a period later than in zone 0."""
    m = 24
    zone = np.arange(m) * zones // m
    for make in (Staircase, Sine):
        one, many = (ready_for(Bernoulli(Uniform(0.8), make(period=24, zones=n)), (0,), m) for n in (1, zones))
        for t in (0, 5, 23, 100):
            expected = [one.probabilities(t + z * 24 // zones)[0, 0] for z in zone]
            np.testing.assert_allclose(many.probabilities(t)[0], expected, atol=1e-12)


def simulated(process: Availability, clients: int = 6) -> list[dict[str, float]]:
    data = Quadratics(clients=clients, dimension=2)
    return Simulation(data, Mean, clients, availability=process, strategy=FedAvgKnown(), rounds=3).run().history


def test_known_probabilities_are_there_for_who_asks() -> None:
    for make in (*MADE.values(), TURNS["cyclic, new orders"], TURNS["cyclic, new members"]):
        FedAvgKnown().check(make(6))
    assert np.isfinite([row["train_loss"] for row in simulated(MADE["separation, moving"](6))]).all()


def test_unknown_probabilities_are_refused_before_the_first_round() -> None:
    with pytest.raises(ConfigError, match=r"strategy=fedavg_known divides .*=MinimumSeparation with k draws clients"):
        simulated(MinimumSeparation(k=2))


IMPOSSIBLE = {
    "k=5 clients in each of separation": lambda: ready_for(MinimumSeparation(separation=1, k=5)),
    "separation=-1": lambda: MinimumSeparation(separation=-1),
    "separation=1.5": lambda: MinimumSeparation(separation=1.5),
    "shock=1 ": lambda: CommonShock(shock=1),
    "availability.shock=0.6 leaves a client at most": lambda: ready_for(CommonShock(Groups(0.1, 0.5), shock=0.6)),
    "availability.shock=0.5 leaves": lambda: ready_for(CommonShock(Uniform(0.1), floor=0.6, shock=0.5)),
    "persistence=1 ": lambda: CommonShock(persistence=1),
    "persistence=1 keeps": lambda: CommonFactor(persistence=1),
    "correlation=1.1": lambda: CommonFactor(correlation=1.1),
    "availability.groups=7 exceeds clients=6": lambda: ready_for(CommonFactor(groups=7)),
    "availability.groups=8 exceeds clients=6": lambda: ready_for(CommonShock(groups=8)),
    "availability.persistence=-0.9 is impossible for client 0, whose p is 0.3": lambda: ready_for(
        Markov(Uniform(0.3), -0.9)
    ),
    "availability.persistence has 7 groups": lambda: ready_for(Markov(persistence=[0.1] * 7)),
    "persistence=[]": lambda: Markov(persistence=[]),
    "persistence=nan": lambda: Markov(persistence=float("nan")),
    "length=0.5": lambda: DeviceSessions(length=0.5),
    "law='normal'": lambda: DeviceSessions(law="normal"),
    "shape=4": lambda: DeviceSessions(law="lognormal", shape=4.0),
    "shape=0.1": lambda: DeviceSessions(law="weibull", shape=0.1),
    "reshuffle='all'": lambda: Cyclic(reshuffle="all"),
    "availability.k=2 exceeds the 1 clients": lambda: ready_for(Cyclic(4, k=2)),
    "zones=0": lambda: Sine(zones=0),
    "share=2": lambda: Staircase(share=2.0),
}


@pytest.mark.parametrize("said", IMPOSSIBLE)
def test_impossible_settings_name_their_key(said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        IMPOSSIBLE[said]()
    assert said in str(refused.value)
