"""Robust aggregation: each rule against a plain function of NumPy, what one wild row can do, and what all must hold."""

from __future__ import annotations

import functools
import itertools
import logging

import numpy as np
import pytest
import torch
from library import Naive, with_
from naive_strategies import CLIENTS, SEEDS

from fedsim.availability import Full, Population
from fedsim.core import ConfigError, rng
from fedsim.strategies import (
    RFA,
    Bulyan,
    CentredClipping,
    FedAvg,
    Krum,
    Median,
    MultiKrum,
    NormBound,
    TrimmedMean,
)


@pytest.mark.parametrize("f", range(4))
def test_how_many_rows_a_rule_needs(f):
    """Blanchard et al. 2017 for Krum, El Mhamdi et al. 2018 for Bulyan; the others need a majority of honest rows."""
    needed = {Krum: 2 * f + 3, MultiKrum: 2 * f + 3, Bulyan: 4 * f + 3, Median: 2 * f + 1, TrimmedMean: 2 * f + 1}
    assert {rule: rule().min_aggregated_rows(f) for rule in needed} == needed


def median(rows, f):
    columns = []
    for column in zip(*rows, strict=True):
        ordered, n = sorted(column), len(rows)
        columns.append(ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2)
    return np.array(columns)


def trimmed(rows, f):
    return np.array([np.mean(sorted(column)[f : len(rows) - f]) for column in zip(*rows, strict=True)])


def krum_scores(rows, f):
    found = []
    for i, row in enumerate(rows):
        apart = sorted(sum((row - other) ** 2) for j, other in enumerate(rows) if j != i)
        found.append(sum(apart[: max(0, len(rows) - f - 2)]))
    return found


def krum(rows, f):
    return rows[int(np.argmin(krum_scores(rows, f)))]


def multi_krum(rows, f):
    return np.mean([rows[i] for i in np.argsort(krum_scores(rows, f), kind="stable")[: len(rows) - f]], axis=0)


def bulyan(rows, f):
    left, chosen = list(rows), []
    for _ in range(len(rows) - 2 * f):
        chosen.append(left.pop(int(np.argmin(krum_scores(left, f)))))
    centre, found = median(chosen, f), []
    for column, m in zip(zip(*chosen, strict=True), centre, strict=True):
        found.append(np.mean(sorted(column, key=lambda value, m=m: abs(value - m))[: len(chosen) - 2 * f]))
    return np.array(found)


def rfa(rows, f, nu=1e-6, iterations=4):
    z = np.mean(rows, axis=0)
    for _ in range(iterations):
        beta = [1 / max(nu, np.sqrt(sum((z - row) ** 2))) for row in rows]
        z = sum(b * row for b, row in zip(beta, rows, strict=True)) / sum(beta)
    return z


def cut(row, length):
    return row * min(1.0, length / max(1e-300, np.sqrt(sum(row**2))))


def bounded(rows, f, norm=2.0):
    return np.mean([cut(row, norm) for row in rows], axis=0)


RULES = {
    "median": (Median(), median, 0),
    "trimmed_mean": (TrimmedMean(bad=2), trimmed, 2),
    "krum": (Krum(bad=2), krum, 2),
    "multi_krum": (MultiKrum(bad=0.15), multi_krum, 2),  # two of eleven, rounded up
    "bulyan": (Bulyan(bad=2), bulyan, 2),
    "rfa": (RFA(), rfa, 0),
    "norm_bound": (NormBound(norm=2.0), bounded, 0),
}


def sent(n: int = 11, d: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d)) + np.arange(d)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_formula_whatever_the_order(name):
    rule, naive, f = RULES[name]
    for seed, n in ((0, 11), (1, 12)):
        rows = sent(n, seed=seed)
        assert rule.byzantine_count(n) == f
        found = rule.combine(torch.as_tensor(rows), f, {})
        np.testing.assert_allclose(found, naive(rows, f), atol=1e-10)
        if name == "bulyan":  # the last scores are single distances, which two rows share
            continue
        turned = rule.combine(torch.as_tensor(rows[np.random.default_rng(seed).permutation(n)].copy()), f, {})
        torch.testing.assert_close(turned, found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_equal_rows_are_what_comes_out(name):
    rule, _, f = RULES[name]
    row = torch.tensor([0.3, -1.0, 0.5]).double()
    torch.testing.assert_close(rule.combine(row.expand(11, -1), f, {}), row, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_two_wild_rows_of_eleven_do_not_carry_it_away(name):
    """Every column stays among the good rows'; the mean is a hundred million off."""
    rule, _, f = RULES[name]
    rows = torch.as_tensor(sent())
    rows[3], rows[7] = 1e9, -3e8
    good = rows[[i for i in range(11) if i not in (3, 7)]]
    found = rule.combine(rows, f, {})
    if name == "norm_bound":  # no longer than C
        assert found.norm() <= 2.0
    else:
        assert (found >= good.min(0).values).all()
        assert (found <= good.max(0).values).all()
    assert rows.mean(0).abs().min() > 1e7


def test_trimming_nothing_is_the_mean_and_all_but_one_the_median():
    rows = torch.as_tensor(sent())
    torch.testing.assert_close(TrimmedMean(bad=0).combine(rows, 0, {}), rows.mean(0))
    torch.testing.assert_close(TrimmedMean(bad=5).combine(rows, 5, {}), Median().combine(rows, 0, {}))


def test_weiszfelds_objective_never_rises():
    rows = torch.as_tensor(sent())
    ends = [RFA(iterations=k).combine(rows, 0, {}) for k in range(1, 9)]
    totals = [(rows - end).norm(dim=1).sum().item() for end in [rows.mean(0), *ends]]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(totals))
    assert totals[-1] < totals[0]


def test_centred_clipping_goes_on_from_where_it_was():
    rows, rule = torch.as_tensor(sent()), CentredClipping(radius=0.5, iterations=2)
    memory, v = rule.memory(rows[0]), np.zeros(5)
    for _ in range(3):
        found = rule.combine(rows, 0, memory)
        for _ in range(2):
            step = np.mean([cut(row - v, 0.5) for row in rows.numpy()], axis=0)
            assert np.linalg.norm(step) <= 0.5
            v = v + step
        np.testing.assert_allclose(found, v, atol=1e-12)
    wide = CentredClipping(radius=1e9)
    torch.testing.assert_close(wide.combine(rows, 0, wide.memory(rows[0])), rows.mean(0))


class NaiveRobust(Naive):
    """Rounds of any rule."""

    rule, bad, least, bucket, eta = staticmethod(median), 0, 1, 1, 0.7

    def round(self, t, active):
        rows = [self.innovation(i, t) for i in active]
        if self.bucket > 1:
            order = rng.generator(self.seed, rng.Purpose.STRATEGY, t).permutation(len(rows))
            mixed = [rows[j] for j in order]
            rows = [np.mean(mixed[a : a + self.bucket], axis=0) for a in range(0, len(mixed), self.bucket)]
        if len(rows) >= self.least and rows:
            self.model = self.model - self.eta * self.combined_rows(rows)

    def combined_rows(self, rows):
        return self.rule(rows, self.bad)


class NaiveCentred(NaiveRobust):
    """Nobody's rows leave v where it is."""

    def begin(self):
        self.centre = np.zeros_like(self.model)

    def combined_rows(self, rows):
        for _ in range(2):
            self.centre = self.centre + np.mean([cut(row - self.centre, 0.1) for row in rows], axis=0)
        return self.centre


NEAR = {"bad": 0, "least": 3}  # Krum and its kin need three rows though nobody lies


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        (Median(0.7), {}),
        (Median(0.7, bucket=2), {"bucket": 2}),
        (TrimmedMean(0.7, bad=1), {"rule": staticmethod(trimmed), "bad": 1, "least": 3}),
        (RFA(0.7), {"rule": staticmethod(rfa)}),
        (Krum(0.7, bad=0), NEAR | {"rule": staticmethod(krum)}),
        (MultiKrum(0.7, bad=0), NEAR | {"rule": staticmethod(multi_krum)}),
        (Bulyan(0.7, bad=0), NEAR | {"rule": staticmethod(bulyan)}),
        (NormBound(0.7, norm=0.1), {"rule": staticmethod(functools.partial(bounded, norm=0.1))}),
        (CentredClipping(0.7, radius=0.1, iterations=2), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_round_follows_the_rule(strategy, settings, follows):
    """Too few rows leave the model as it is."""
    follows(strategy, NaiveCentred if settings is None else with_(NaiveRobust, **settings))


def test_the_median_of_replicates_is_each_replicates_median(models):
    whole = models(Median(0.7))
    for r, seed in enumerate(SEEDS):
        torch.testing.assert_close(models(Median(0.7), seeds=(seed,))[:, 0], whole[:, r], rtol=0, atol=1e-12)
    assert not torch.allclose(whole, models(FedAvg(0.7)), atol=1e-4)


def test_rounds_of_too_few_rows_are_told_once_and_rules_that_nobody_can_meet_refused(caplog, models):
    with caplog.at_level(logging.WARNING):
        models(TrimmedMean(0.7, bad=1))
    assert [r.message for r in caplog.records if "TrimmedMean" in r.message] == [
        "TrimmedMean: 2 rows in round 0, but it needs 3; in such rounds the model does not change"
    ]
    process = Full()
    process.setup(Population((0,), 6))
    with pytest.raises(ConfigError, match=r"bad=1: Bulyan needs 7 rows in a round, and 6 clients give 6"):
        Bulyan(bad=1).check(process)
    with pytest.raises(ConfigError, match=r"bad=2: Krum needs 7 rows in a round, and 6 clients give 3"):
        Krum(bad=2, bucket=2).check(process)
    with pytest.raises(ConfigError, match=r"bad=1\.5 must be a whole number of clients, or a share below 1"):
        Krum(bad=1.5)
    assert CLIENTS == 4
