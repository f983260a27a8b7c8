"""The empirical audit: mechanisms that keep their claim pass, and those that do not are found.

A correct mechanism is flagged with a probability of at most 0.05 by design, and of far less where the accountant's ε is
above the true one. Seeds are fixed, so a case that passes once passes again.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from claims import CORRECT, MEAN, ROWS, SUM, Case, coins, noise
from scipy.stats import norm

from fedsim import Simulation
from fedsim.availability import Bernoulli, ClassCorrelated, Cyclic, UniformK
from fedsim.core import ConfigError, rng
from fedsim.data.datasets import Digits
from fedsim.models import Linear
from fedsim.uplink import GaussianNoise, TreeNoise, accounting, private
from fedsim.uplink.auditing import (
    PrivacyAuditResult,
    _auditing_federation,
    audit,
    epsilon_lower_bound,
    gaussian_epsilon_lower_bound,
)


def audited(case: Case, worlds: int = 2000, **options) -> PrivacyAuditResult:
    run = case.simulation()
    claim = run.privacy(case.rounds)
    return audit(run.uplink, run.availability, claim, case.rounds, worlds, **options)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_mechanism_is_not_flagged(name: str) -> None:
    found = audited(CORRECT[name], 800)
    assert not found.violated, found
    assert 2 <= len(found.findings) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_mechanism_is_not_flagged_by_many_worlds(name: str) -> None:
    found = audited(CORRECT[name], 20_000, seed=10_000)
    assert not found.violated, found
    if name.startswith("everybody"):  # and what can be shown is shown
        assert found.bound > 0.75 * found.claimed


@pytest.mark.slow
def test_flags_are_as_rare_as_the_confidence_says() -> None:
    """Of 200 audits whose claim is the true ε of the noise, with confidence 0.95, at most 5 % are flagged (19 with
    probability 0.006)."""
    from dp_accounting import get_epsilon_gaussian

    draw, flags = np.random.default_rng(0), 0
    true = get_epsilon_gaussian(1.0, 1e-5)
    for _ in range(200):
        first, second = draw.normal(0.5, 1, 1000), draw.normal(-0.5, 1, 1000)
        bounds = [
            method(first, second, 1e-5, 0.025)[0] for method in (gaussian_epsilon_lower_bound, epsilon_lower_bound)
        ]
        flags += max(bounds) > true
    assert flags <= 18


BROKEN = {
    "everybody": Case(noise(multiplier=2.0)),
    "everybody, an adaptive norm": Case(noise(multiplier=2.0, quantile=0.5, count_noise=2.0), rounds=2),
    "secret coins": Case(noise(multiplier=1.5), coins(0.8), SUM, rounds=2),
    "k of m": Case(noise(multiplier=2.0), lambda: UniformK(4), MEAN, rounds=2),
    "noise in each row": Case(noise(multiplier=3.0, per="client"), coins(0.5), ROWS, rounds=2),
    "a tree": Case(lambda: [TreeNoise(multiplier=2.0)], lambda: Cyclic(3), SUM, rounds=3),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BROKEN)
def test_half_of_the_noise_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = rng.normal
    assert not audited(BROKEN[name], 400).violated
    monkeypatch.setattr(private.rng, "normal", lambda *arguments: genuine(*arguments) / 2)
    assert audited(BROKEN[name]).violated


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BROKEN)
def test_rows_of_twice_the_norm_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = private.Clip.clip_rows
    monkeypatch.setattr(private.Clip, "clip_rows", lambda self, rows, link, bound: 2 * genuine(self, rows, link, bound))
    assert audited(BROKEN[name]).violated


HALF_A_BIT = {
    "everybody": Case(noise(multiplier=2.0, quantile=0.5, count_noise=1.01)),
    "much noise in rows": Case(noise(multiplier=1.0, quantile=0.5, count_noise=0.6)),
    "secret coins": Case(noise(multiplier=2.0, quantile=0.5, count_noise=1.01), coins(0.8), SUM, rounds=2),
    "several rounds": Case(noise(multiplier=2.0, quantile=0.5, count_noise=1.2), rounds=5),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", HALF_A_BIT)
def test_a_count_that_a_client_moves_by_one_and_not_by_half_is_found(name: str) -> None:
    """The claim is what z alone gives, as if bits were centred; `GaussianNoise` promises no more now."""
    case = HALF_A_BIT[name]
    run = case.simulation()
    claim = run.privacy(case.rounds)
    about = dataclasses.replace(
        claim.mechanism, count_multipliers=tuple(2 * noise for noise in claim.mechanism.count_multipliers)
    )
    old = accounting.epsilon_of(about, 1e-5, case.rounds)
    assert old < claim.epsilon
    wrong = dataclasses.replace(claim, epsilon=old, mechanism=about)
    assert audit(run.uplink, run.availability, wrong, case.rounds, 2000).violated
    assert not audit(run.uplink, run.availability, claim, case.rounds, 2000).violated


def test_the_same_noise_in_all_rounds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary that changes its sign from round to round sees noise that does not."""
    case = Case(noise(multiplier=2.0), rounds=4)
    genuine = rng.row_keys
    fixed = lambda seeds, purpose, clients, t, *more: genuine(seeds, purpose, clients, 0, *more)  # noqa: E731
    monkeypatch.setattr("fedsim.uplink.stage.rng.row_keys", fixed)
    assert audited(case, 1000).violated


def test_less_noise_than_is_promised_by_a_class_of_ones_own_is_found() -> None:
    class Careless(GaussianNoise):
        def __call__(self, rows, link):
            clipped = self.clip_rows(rows, link, self.bound(link))
            return clipped + (super().__call__(rows, link) - clipped) / 2

    assert audited(Case(lambda: [Careless(multiplier=2.0)])).violated


def test_bounds_approach_the_epsilon_of_a_gaussian() -> None:
    """Of exact quantiles of N(±μ/2, 1) with μ = 1: below ε = 4.38 at δ = 1e-5, and near it with many worlds."""
    middle = norm.ppf((np.arange(100_000) + 0.5) / 100_000)
    bound, ceiling = gaussian_epsilon_lower_bound(middle + 0.5, middle - 0.5, 1e-5, 0.05)
    assert 4.25 < bound < 4.377 < ceiling
    draw = np.random.default_rng(0)
    first, second = draw.permutation(middle + 0.5), draw.permutation(middle - 0.5)
    plain, most = epsilon_lower_bound(first, second, 0.0, 0.05)
    assert 2.5 < plain < 4.377 < most
    back, _ = epsilon_lower_bound(-second, -first, 0.0, 0.05)
    assert back == pytest.approx(plain, abs=0.3)
    assert (
        epsilon_lower_bound(first, first, 0.0, 0.05)[0]
        == gaussian_epsilon_lower_bound(first, first, 1e-5, 0.05)[0]
        == 0.0
    )


def test_scores_that_do_not_overlap_show_as_much_as_so_many_worlds_can() -> None:
    """At δ = 0: the ceiling is what one is left with who is never wrong about either neighbour."""
    bound, ceiling = epsilon_lower_bound(np.ones(200), np.zeros(200), 0.0, 0.05)
    assert bound == pytest.approx(ceiling)


def test_an_audit_is_the_same_again_and_leaves_the_run_as_it_is() -> None:
    case = CORRECT["everybody, an adaptive norm"]
    run = case.simulation()
    claim, process = run.privacy(1), run.availability
    found = audit(run.uplink, process, claim, 1, 300, seed=3)
    assert found == audit(run.uplink, process, claim, 1, 300, seed=3)
    assert found != audit(run.uplink, process, claim, 1, 300, seed=400)
    assert process.federation is run.federation
    assert process.population.seeds == run.federation.seeds
    assert run.uplink.stages[0].expected.shape == (1,)
    torch.testing.assert_close(run.run().state.model, case.simulation().run().state.model, rtol=0, atol=0)


def test_what_cannot_be_audited_is_refused() -> None:
    run = Case(noise(quantile=0.5)).simulation()
    with pytest.raises(ConfigError, match=r"nothing is claimed .*: no ε is claimed: the clipping norm adapts"):
        audit(run.uplink, run.availability, run.privacy(1), 1)
    run = Case(noise()).simulation()
    with pytest.raises(ConfigError, match="--worlds 199 is too few"):
        audit(run.uplink, run.availability, run.privacy(1), 1, worlds=199)


def test_every_world_is_like_the_runs_first_replicate() -> None:
    run = Simulation(Digits(), Linear, clients=4, seeds=(3, 5), availability=Bernoulli(ClassCorrelated()))
    classes = run.federation.class_fractions
    assert (classes[0] != classes[1]).any()
    federation, process = _auditing_federation(run.availability, np.arange(7, 10))
    assert np.array_equal(federation.class_fractions, np.stack([classes[0]] * 3))
    assert process.probabilities(0).shape == (3, 4)
