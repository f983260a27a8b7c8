"""CA-Fed against its formula, whom it leaves out, and what it is when it leaves out nobody."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from library import Naive, everybody, with_
from naive_strategies import BY_DATA, CLIENTS, UNIFORM

from fedsim.core import ConfigError
from fedsim.strategies import CAFed, FedAvg


class NaiveCAFed(Naive):
    kappa, tolerance, smoothness, optimum, prior, eta, weights = 1.0, 0.0, 0.0, 0.0, 10.0, 1.0, UNIFORM

    def begin(self):
        self.seen, self.estimates, self.left_out = [[] for _ in range(CLIENTS)], [None] * CLIENTS, []

    def error(self, kept):
        total = sum(self.weights[i] for i in kept)
        a = [self.weights[i] / total if i in kept else 0.0 for i in range(CLIENTS)]
        distance = sum(abs(x - y) for x, y in zip(a, self.weights, strict=True)) / 2
        return np.dot(a, self.excess) + self.kappa * distance**2 * max(self.excess)

    def round(self, t, active):
        for i in range(CLIENTS):
            self.seen[i].append(i in active)
        for i in active:
            old, new = self.estimates[i], self.learner.loss(i, self.model)
            self.estimates[i] = new if old is None else self.smoothness * old + (1 - self.smoothness) * new
        mean = np.mean([f for f in self.estimates if f is not None])
        self.excess = [(mean if f is None else f) - self.optimum for f in self.estimates]
        pi = [(sum(seen) + self.prior / 2) / (t + 1 + self.prior) for seen in self.seen]
        correlation = []
        for seen in self.seen:
            pairs = list(itertools.pairwise(seen))
            on, off = [b for a, b in pairs if a], [not b for a, b in pairs if not a]
            stays, misses = ((sum(x) + self.prior / 2) / (len(x) + self.prior) for x in (on, off))
            correlation.append(abs(stays + misses - 1))
        kept = set(range(CLIENTS))
        for key in (lambda i: (-correlation[i], self.tie(i, t)), lambda i: (pi[i], self.tie(i, t))):
            for i in sorted(range(CLIENTS), key=key):
                if i in kept and len(kept) > 1 and self.error(kept) - self.error(kept - {i}) >= self.tolerance:
                    kept = kept - {i}
        self.left_out.append(CLIENTS - len(kept))
        heard = {i: self.innovation(i, t) for i in active if i in kept}
        for i, g in heard.items():
            self.model = self.model - self.eta * self.weights[i] / pi[i] * g


CASES = {
    "ca_fed": (CAFed(), NaiveCAFed, {}),
    "ca_fed by data": (
        CAFed(0.8, 0.5, 0.01, 0.4, 0.05, 2.0, "data"),
        with_(
            NaiveCAFed, eta=0.8, kappa=0.5, tolerance=0.01, smoothness=0.4, optimum=0.05, prior=2.0, weights=BY_DATA,
        ),
        {"schedule": "sqrt"},
    ),
    "nobody is left out": (CAFed(tolerance=1e9), with_(NaiveCAFed, tolerance=1e9), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_round_follows_the_formula(name, follows):
    strategy, naive, options = CASES[name]
    found = follows(strategy, naive, **options)
    assert any(any(one.left_out) for one in found) == (name != "nobody is left out")


def test_where_nobody_is_left_out_and_everybody_is_there_it_ends_as_fedavg(models):
    """π_i = (t + 1 + n/2) / (t + 1 + n) with a prior of n rounds, which a tiny one does not bend."""
    found = models(CAFed(tolerance=1e9, prior=1e-12), counts=everybody())
    torch.testing.assert_close(found, models(FedAvg(), counts=everybody()), rtol=0, atol=1e-10)


def test_the_correlated_go_first_and_never_all():
    """Clients alike but for |λ|: leaving any out costs κ TV² and saves nothing, unless its loss is the larger one."""
    w, order = np.full(4, 0.25), [2, 0, 1, 3, 0, 1, 2, 3]
    assert CAFed().included_of_replicate(w, np.ones(4), order).all()
    assert CAFed(bias=0.0).included_of_replicate(w, np.ones(4), order).tolist() == [False, False, False, True]
    assert CAFed().included_of_replicate(w, np.array([1.0, 1.0, 2.0, 1.0]), order).tolist() == [True, True, False, True]
    assert CAFed(bias=1e3).included_of_replicate(w, np.array([1.0, 1.0, 2.0, 1.0]), order).all()


def test_leaving_out_the_last_one_is_not_even_tried():
    """There is no mean of no losses: neither an error nor a warning comes of it."""
    with np.errstate(all="raise"):
        kept = CAFed(bias=0.0).included_of_replicate(np.full(3, 1 / 3), np.ones(3), [0, 1, 2])
    assert kept.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: CAFed(bias=-1), r"bias=-1"),
        (lambda: CAFed(prior=0), r"prior=0"),
        (lambda: CAFed(smoothness=2), r"smoothness=2"),
    ],
)
def test_impossible_settings_name_their_key(build, key):
    with pytest.raises(ConfigError, match=key):
        build()
