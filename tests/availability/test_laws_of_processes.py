"""The laws of shocks, factors, rests, chains and sessions are those that were worked out by hand.

The keys of all draws are fixed; statistical bounds are five standard errors. Many clients, or pairs of them, of one
replicate stand for many draws.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import gamma
from scipy.stats import multivariate_normal, norm
from told import Given, ready_for

from fedsim.availability import (
    Availability,
    Bernoulli,
    CommonFactor,
    CommonShock,
    DeviceSessions,
    Markov,
    MinimumSeparation,
    Sine,
    Staircase,
    Uniform,
)
from fedsim.availability.availability import draw_uniforms
from fedsim.availability.lengths import unit_mean_lengths
from fedsim.core import rng

PAIRS = 10_000
P, Q = 0.2, 0.5  # of the two clients of a pair


def paired(process: Availability, rounds: int) -> np.ndarray:
    """[T, pairs, 2] who was there; the clients of a pair are one group."""
    ready_for(process, (0,), 2 * PAIRS)
    return np.stack([process.counts(t)[0].reshape(PAIRS, 2) for t in range(rounds)]).astype(float)


def close(drawn: np.ndarray, expected: float) -> bool:
    """Is the mean of independent numbers within five standard errors?"""
    return bool(abs(drawn.mean() - expected) <= 5 * drawn.std() / np.sqrt(drawn.size))


@pytest.mark.parametrize(("shock", "persistence"), [(0.3, 0.0), (0.4, 0.7)])
def test_a_shock_takes_a_group_away_together(shock: float, persistence: float) -> None:
    """Cov = p_i p_j q/(1 − q) within a group, 0 across; ρ^k times that k rounds apart."""
    base = Given(*[P, Q] * PAIRS)
    there = paired(CommonShock(base, groups=PAIRS, shock=shock, persistence=persistence), 4)
    extra = shock / (1 - shock)
    for t in (0, 3):
        assert close(there[t, :, 0], P)
        assert close(there[t, :, 0] * there[t, :, 1], P * Q * (1 + extra))
        assert close(there[t, :-1, 0] * there[t, 1:, 1], P * Q)
    for lag in (1, 3):
        assert close(there[0, :, 0] * there[lag, :, 1], P * Q * (1 + extra * persistence**lag))
        assert close(there[0, :, 1] * there[lag, :, 1], Q * Q * (1 + extra * persistence**lag))


def test_outages_last_as_long_as_they_should() -> None:
    """Where nothing but the shock keeps a client away, its absences are the outages: geometric, mean 1/((1−ρ)(1−q))."""
    shock, persistence = 0.4, 0.8
    process = ready_for(CommonShock(Uniform(0.6), groups=4000, shock=shock, persistence=persistence), (0,), 4000)
    there = np.stack([process.counts(t)[0] for t in range(60)])
    assert close(1.0 - there[0], shock)
    ends = there[1:][there[:-1] == 0].astype(float)
    assert close(ends, (1 - persistence) * (1 - shock))


def test_without_a_shock_and_without_a_factor_they_are_coins() -> None:
    """The same clients in the same rounds as under `Bernoulli`."""
    coins = ready_for(Bernoulli(Uniform(0.3), Sine()), (0, 4), 500)
    for other in (CommonShock(Uniform(0.3), Sine(), shock=0.0), CommonFactor(Uniform(0.3), Sine(), correlation=0.0)):
        ready_for(other, (0, 4), 500)
        assert all(np.array_equal(coins.counts(t), other.counts(t)) for t in range(30))


@pytest.mark.parametrize("correlation", [0.3, 0.8])
def test_a_factor_joins_clients_as_the_bivariate_normal_law_says(correlation: float) -> None:
    base = Given(*[P, Q] * PAIRS)
    there = paired(CommonFactor(base, groups=PAIRS, correlation=correlation), 2)
    both = multivariate_normal(cov=[[1, correlation], [correlation, 1]]).cdf(norm.ppf([P, Q]))
    for t in (0, 1):
        assert close(there[t, :, 0], P)
        assert close(there[t, :, 1], Q)
        assert close(there[t, :, 0] * there[t, :, 1], both)
    assert close(there[0, :, 0] * there[1, :, 1], P * Q)
    assert close(there[0, :-1, 0] * there[0, 1:, 1], P * Q)


def test_a_factor_at_one_half_gives_one_third_and_full_correlation_nested_sets() -> None:
    there = paired(CommonFactor(Uniform(0.5), groups=PAIRS, correlation=0.5), 1)[0]
    assert close(there[:, 0] * there[:, 1], 1 / 3)
    p = np.linspace(0.01, 0.99, 50)
    process = ready_for(CommonFactor(Given(*p), correlation=1.0), (0, 1, 2), 50)
    for t in range(20):
        assert (np.diff(process.counts(t), axis=1) >= 0).all()  # who is likelier is there whenever another one is


def test_a_factor_lasts() -> None:
    """AR(1) from the stationary law: at ρ = 1 and p = ½ both rounds see it below 0 with ¼ + arcsin(φ^k)/2π."""
    there = paired(CommonFactor(Uniform(0.5), groups=PAIRS, correlation=1.0, persistence=0.7), 5)[:, :, 0]
    for lag in (1, 4):
        assert close(there[0] * there[lag], 0.25 + np.arcsin(0.7**lag) / (2 * np.pi))


def test_those_drawn_are_they_whose_exponential_times_end_first() -> None:
    """Efraimidis and Spirakis (2006): times of rates p_i, sorted by hand; who rests has none."""
    k, m, base = 150, 1000, np.linspace(0.1, 0.9, 1000)
    process = ready_for(MinimumSeparation(Given(*base), k=k, separation=1), (3, 5), m)
    rests = np.zeros((2, m), dtype=bool)
    for t in range(3):
        coins = draw_uniforms(process.population, rng.Purpose.AVAILABILITY, t)
        times = np.where(rests, np.inf, -np.log1p(-coins) / base)
        rests = process.counts(t).astype(bool)
        for r in range(2):
            assert set(np.flatnonzero(rests[r])) == set(np.argsort(times[r])[:k])


@pytest.mark.parametrize("separation", [0, 1, 4])
def test_who_rests_comes_with_p_over_one_plus_rp(separation: int) -> None:
    """From round 0 on; gaps are R + a geometric number of mean 1/p, and the chance of coming back after one is p."""
    p, rounds = 0.4, 40
    process = ready_for(MinimumSeparation(Uniform(p), separation=separation), (0,), 4000)
    came = np.stack([process.counts(t)[0] for t in range(rounds)]).astype(float)
    share = p / (1 + separation * p)
    for t in (0, 1, separation, rounds - 1):
        np.testing.assert_allclose(process.probabilities(t), share)
        assert close(came[t], share)
    gaps = np.concatenate([np.diff(np.flatnonzero(line)) for line in came.T[:, :] if line.sum() > 1])
    assert gaps.min() == separation + 1
    back = [came[t + separation + 1][came[t] == 1] for t in range(rounds - separation - 1)]
    assert close(np.concatenate(back), p)
    later = [came[t + separation + 2][(came[t] == 1) & (came[t + separation + 1] == 0)] for t in range(20)]
    assert close(np.concatenate(later), p)


def test_rest_under_a_moving_probability_follows_from_its_own_past() -> None:
    """m^t = p^t (1 − the sum of the last R), written as a loop; before round 0 all was as in round 0."""
    separation, rounds = 3, 25
    wanted = ready_for(Bernoulli(Given(0.2, 0.9), Sine(period=7), 0.1), (0,), 2)
    past = [[p / (1 + separation * p)] * separation for p in wanted.probabilities(0)[0]]
    process = ready_for(MinimumSeparation(Given(0.2, 0.9), Sine(period=7), 0.1, separation), (0,), 2)
    for t in range(rounds):
        for client, line in enumerate(past):
            line.append(wanted.probabilities(t)[0, client] * (1 - sum(line[-separation:])))
            assert process.probabilities(t)[0, client] == pytest.approx(line[-1])


def test_certain_clients_come_every_so_many_rounds() -> None:
    """p = 1: one round of R + 1, at a phase of one's own."""
    process = ready_for(MinimumSeparation(Uniform(1.0), separation=4), (0,), 300)
    came = np.stack([process.counts(t)[0] for t in range(20)])
    assert (came.reshape(4, 5, 300) == came[:5]).all()
    assert (came[:5].sum(0) == 1).all()
    assert (came[:5].sum(1) > 30).all()


def test_a_draw_of_one_with_one_round_of_rest_has_the_shares_of_the_closed_form() -> None:
    """P(j | i) = p_j/(1 − p_i), hence π_i = p_i (1 − p_i)/Σ p_j (1 − p_j): .394, .331, .201, .075."""
    p = np.array([0.5, 0.3, 0.15, 0.05])
    process = ready_for(MinimumSeparation(Given(*p), separation=1, k=1), (0,), 4)
    drawn = np.array([process.counts(t)[0].argmax() for t in range(3000)])
    for i in range(4):
        after = drawn[1:][drawn[:-1] == i]
        for j in range(4):
            expected = 0 if i == j else p[j] / (1 - p[i])
            assert abs((after == j).mean() - expected) <= 5 * np.sqrt(expected * (1 - expected) / len(after))
    shares = p * (1 - p) / (p * (1 - p)).sum()
    np.testing.assert_allclose(shares, [0.394, 0.331, 0.201, 0.075], atol=5e-4)
    assert (np.abs(np.bincount(drawn) / 3000 - shares) <= 5 * np.sqrt(shares * (1 - shares) / 3000)).all()


def test_draws_rest_whoever_was_drawn_and_repeat_where_nobody_is_left_to_choose() -> None:
    """(R + 1) k = m: after the first pass the order is cyclic; else k of those who are not at rest."""
    process = ready_for(MinimumSeparation(Uniform(0.7), separation=2, k=3), (0, 1), 9)
    came = np.stack([process.counts(t) for t in range(12)])
    assert (came.sum(2) == 3).all()
    assert (came[3:] == came[:-3]).all()
    assert (came[:3].sum(0) == 1).all()
    some = ready_for(MinimumSeparation(Uniform(0.7), separation=2, k=2), (0,), 9)
    drawn = np.stack([some.counts(t)[0] for t in range(40)])
    assert (drawn.sum(1) == 2).all()
    assert all(drawn[t : t + 3].sum(0).max() == 1 for t in range(38))


def test_without_rest_draws_are_weighted_draws_without_replacement() -> None:
    """The first pair {i, j} of three: p_i p_j (1/(1 − p_i) + 1/(1 − p_j))."""
    p = np.array([0.6, 0.3, 0.1])
    process = ready_for(MinimumSeparation(Given(*p), separation=0, k=2), (0,), 3)
    away = np.array([process.counts(t)[0].argmin() for t in range(1500)])
    for i, j, left in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        expected = p[i] * p[j] * (1 / (1 - p[i]) + 1 / (1 - p[j]))
        assert abs((away == left).mean() - expected) <= 5 * np.sqrt(expected * (1 - expected) / 1500)


@pytest.mark.parametrize("correlation", [-0.4, 0.6])
def test_chains_stay_or_change_by_their_correlation(correlation: float) -> None:
    """P(on | on) = λ + (1 − λ) π, P(on | off) = (1 − λ) π, stays of 1/((1 − λ)(1 − π)) rounds, autocorrelation λ^k."""
    there = paired(Markov(Given(*[0.4, 0.5] * PAIRS), correlation), 4)
    for client, p in enumerate((0.4, 0.5)):
        line = there[:, :, client]
        for t in (0, 3):
            assert close(line[t], p)
        assert close(line[1][line[0] == 1], correlation + (1 - correlation) * p)
        assert close(line[1][line[0] == 0], (1 - correlation) * p)
        for lag in (1, 2, 3):
            assert close((line[0] - p) * (line[lag] - p), p * (1 - p) * correlation**lag)


def test_every_group_has_its_own_correlation() -> None:
    process = ready_for(Markov(Uniform(0.5), [0.9, -0.9]), (0,), 5000)
    stays = process.counts(0)[0] == process.counts(1)[0]
    assert close(stays[:2500].astype(float), 0.95)
    assert close(stays[2500:].astype(float), 0.05)


LAWS = [("exponential", 1.0), ("lognormal", 1.2), ("weibull", 0.5), ("weibull", 3.0)]


@pytest.mark.parametrize(("law", "shape"), LAWS)
def test_stretches_have_mean_one_and_those_that_cover_a_moment_are_longer(law: str, shape: float) -> None:
    """E X = 1; the stretch that covers a given moment has mean E X²."""
    u = (np.arange(100_000) + 0.5) / 100_000
    square = {"exponential": 2.0, "lognormal": np.exp(shape**2)}.get(law) or gamma(1 + 2 / shape) / gamma(
        1 + 1 / shape
    ) ** 2
    assert unit_mean_lengths(law, shape, u).mean() == pytest.approx(1, rel=5e-3)
    assert unit_mean_lengths(law, shape, u, length_biased=True).mean() == pytest.approx(square, rel=5e-3)


@pytest.mark.parametrize(("law", "shape"), LAWS)
def test_sessions_are_stationary_from_round_0(law: str, shape: float) -> None:
    process = ready_for(DeviceSessions(Uniform(0.3), length=3, law=law, shape=shape), (0,), 20_000)
    for t in (0, 1, 2, 9, 30):
        assert close(process.counts(t)[0].astype(float), 0.3)


def test_exponential_sessions_are_the_two_state_chain() -> None:
    """λ = exp(−1/L_on − 1/L_off) between rounds; and so at three rounds' distance."""
    p, length = 0.3, 5.0
    process = ready_for(DeviceSessions(Uniform(p), length=length), (0,), 20_000)
    there = np.stack([process.counts(t)[0] for t in range(4)])
    for lag in (1, 3):
        correlation = np.exp(-lag * (1 / length + p / (length * (1 - p))))
        after = there[lag].astype(float)
        assert close(after[there[0] == 1], correlation + (1 - correlation) * p)
        assert close(after[there[0] == 0], (1 - correlation) * p)
    history = there[:3].T @ [4, 2, 1]
    chain = np.exp(-(1 / length + p / (length * (1 - p))))
    for past in range(8):  # what matters of the past is the last round
        expected = (1 - chain) * p + chain * (past & 1)
        assert close(there[3][history == past].astype(float), expected)


def test_devices_charge_at_night_in_their_own_zone_and_stay_while_the_hour_lets_them() -> None:
    """p_i f_i(t) in every hour; at a steady hour whoever is there leaves with its session alone, night and day."""
    p, length, zones, m = 0.5, 6.0, 4, 20_000
    night = Staircase(period=24, low=0.1, share=1 / 3, zones=zones)
    process = ready_for(DeviceSessions(Uniform(p), night, length), (0,), m)
    same = np.exp(-1 / length)  # the session goes on
    on = p + (1 - p) * np.exp(-2 / length)  # or there is another
    there = np.stack([process.counts(t)[0] for t in range(15)]).astype(float)
    for zone in range(zones):
        of = slice(zone * m // zones, (zone + 1) * m // zones)
        level = [1.0 if (t + zone * 6) % 24 < 8 else 0.1 for t in range(15)]
        for t in (0, 3, 9, 14):
            assert close(there[t, of], p * level[t])
            if t and level[t] == level[t - 1]:
                assert close(there[t, of][there[t - 1, of] == 1], same + (on - same) * level[t])
