"""Data weights of servers and robust rules, and FedNova's proximal term, each against a naive loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from library import Naive, with_
from naive_strategies import BY_DATA, UNIFORM
from test_library_asking import NaiveQFFL
from test_robust import cut, krum_scores, sent

from fedsim.core import ConfigError
from fedsim.local import SGD, Adam, Momentum
from fedsim.local.schedules import InverseSqrt
from fedsim.strategies import (
    QFFL,
    RFA,
    CentredClipping,
    FedAvg,
    FedAvgM,
    FedNova,
    FedOpt,
    FedProx,
    MultiKrum,
    NormBound,
    RobustServer,
    TrimmedMean,
)


class NaiveServer(Naive):
    """`moment` of FedAvgM or of Adam on the server."""

    adam, weights = False, BY_DATA

    def begin(self):
        self.first, self.second = np.zeros_like(self.model), np.full_like(self.model, 1e-2**2)

    def round(self, t, active):
        if not active:
            return
        mean = self.over({i: self.innovation(i, t) for i in active}, self.weights)
        if self.adam:
            self.first = 0.6 * self.first - 0.4 * mean
            self.second = 0.8 * self.second + 0.2 * mean**2
            self.model = self.model + 0.3 * self.first / (np.sqrt(self.second) + 1e-2)
        else:
            self.first = 0.5 * self.first + mean
            self.model = self.model - 0.7 * self.first


class NaiveQFFLByData(NaiveQFFL):
    def round(self, t, active):
        x, rate, up, down = self.model, self.learner.rates(t)[0], 0.0, 0.0
        for i in active:
            loss, g = self.learner.loss(i, x) + 1e-10, self.innovation(i, t) / rate
            up = up + BY_DATA[i] * loss**self.q * g
            down += BY_DATA[i] * (self.q * loss ** (self.q - 1) * np.sum(g**2) + loss**self.q / rate)
        if active:
            self.model = x - up / down


class NaiveProximalNova(Naive):
    """How often each gradient is in the client's move, step by step: the others' shrinks as the next is taken."""

    mu, weights, steps = 0.7, UNIFORM, (2, 1, 4, 1)

    def round(self, t, active):
        total = sum(self.weights[i] for i in active)
        work, move = 0.0, np.zeros_like(self.model)
        for i in active:
            counts: list[float] = []
            for rate in self.learner.rates(t, self.steps[i]):
                counts = [c * (1 - rate * self.mu) for c in counts] + [rate]
            g = self.innovation(i, t, steps=self.steps[i], mu=self.mu)
            work += self.weights[i] / total * sum(counts)
            move = move + self.weights[i] / total * g / sum(counts)
        self.model = self.model - 0.8 * work * move


CASES = {
    "fedavgm": (FedAvgM(0.7, 0.5, "data"), NaiveServer, {}),
    "fedopt": (FedOpt("adam", 0.3, 0.6, 0.8, 1e-2, "data"), with_(NaiveServer, adam=True), {}),
    "q_ffl": (QFFL(2.0, "data"), NaiveQFFLByData, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_round_follows_the_formula_by_data(name, follows):
    strategy, naive, options = CASES[name]
    follows(strategy, naive, **options)


@pytest.mark.parametrize("weighting", ["uniform", "data"])
def test_proximal_fednova_divides_by_what_each_clients_steps_weigh(weighting, follows, regression_of):
    """An epoch of batches of two is 2, 1, 4 and 1 steps; a client's samples are equal, so any batch is the full one."""
    dataset = regression_of((5, 2, 9, 1))
    first = torch.as_tensor(np.repeat((0, 5, 7, 16), (5, 2, 9, 1)))
    dataset.train_x, dataset.train_y = dataset.train_x[first], dataset.train_y[first]
    naive = with_(NaiveProximalNova, weights=BY_DATA if weighting == "data" else UNIFORM)
    work = {"steps": None, "epochs": 1, "batch_size": 2}
    follows(FedNova(0.8, weighting, mu=0.7), naive, dataset=dataset, work=work)


def test_with_equal_work_proximal_fednova_is_fedprox(models):
    one, other = (models(strategy) for strategy in (FedNova(0.7, "data", mu=0.4), FedProx(0.4, 0.7, "data")))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    assert not torch.allclose(other, models(FedAvg(0.7, "data")))


@pytest.mark.parametrize("mu", [1e-9, 0.3, 8.0, 10.0, 25.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_proximal_weight_is_the_sum_of_powers(mu, dtype):
    lr, steps = 0.1, torch.tensor([1.0, 3.0, 12.0], dtype=dtype)
    found = FedNova(mu=mu).proximal_gradient_weight(lr * steps, torch.full_like(steps, lr))
    wanted = [lr * sum((1 - lr * mu) ** k for k in range(int(s))) for s in steps]
    np.testing.assert_allclose(found, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-7)


@pytest.mark.parametrize("rule", [Adam, Momentum, lambda **options: SGD(**options | {"schedule": InverseSqrt()})])
def test_a_proximal_term_wants_plain_steps_at_a_constant_rate(rule, federated):
    with pytest.raises(ConfigError, match=r"use local=sgd"):
        federated(FedNova(mu=0.1), rule=rule)


def rfa(rows, weights):
    z = sum(w * row for w, row in zip(weights, rows, strict=True))
    for _ in range(4):
        beta = [w / max(1e-6, np.sqrt(sum((z - row) ** 2))) for w, row in zip(weights, rows, strict=True)]
        z = sum(b * row for b, row in zip(beta, rows, strict=True)) / sum(beta)
    return z


def bounded(rows, weights):
    return sum(w * cut(row, 2.0) for w, row in zip(weights, rows, strict=True))


def centred(rows, weights):
    v = np.zeros_like(rows[0])
    for _ in range(2):
        v = v + sum(w * cut(row - v, 1.5) for w, row in zip(weights, rows, strict=True))
    return v


def multi_krum(rows, weights):
    kept = np.argsort(krum_scores(rows, 2), kind="stable")[: len(rows) - 2]
    return sum(weights[i] * rows[i] for i in kept) / sum(weights[i] for i in kept)


RULES = {
    "rfa": (RFA(weighting="data"), rfa, 0),
    "norm_bound": (NormBound(norm=2.0, weighting="data"), bounded, 0),
    "centred_clipping": (CentredClipping(radius=1.5, iterations=2, weighting="data"), centred, 0),
    "multi_krum": (MultiKrum(bad=2, weighting="data"), multi_krum, 2),
}


@pytest.mark.parametrize("name", RULES)
def test_a_weighted_rule_is_its_formula(name):
    rule, naive, f = RULES[name]
    rows, weights = sent(), np.random.default_rng(3).dirichlet(np.ones(11))
    memory = {"centre": torch.zeros(5, dtype=torch.float64)}
    found = rule.combine_weighted(torch.as_tensor(rows), torch.as_tensor(weights), f, memory)
    np.testing.assert_allclose(found, naive(rows, weights), atol=1e-10)
    memory = {"centre": torch.zeros(5, dtype=torch.float64)}
    plain = rule.combine(torch.as_tensor(rows), f, dict(memory))
    even = rule.combine_weighted(torch.as_tensor(rows), torch.full((11,), 1 / 11, dtype=torch.float64), f, memory)
    torch.testing.assert_close(even, plain, rtol=0, atol=1e-12)


class NaiveBounded(Naive):
    weights = BY_DATA

    def round(self, t, active):
        if active:
            self.model = self.model - 0.7 * self.over({i: self.innovation(i, t) for i in active}, self.weights)


def test_a_bound_that_nobody_reaches_is_fedavg_by_data(follows):
    follows(NormBound(0.7, norm=1e9, weighting="data"), NaiveBounded)
    follows(RobustServer(NormBound(norm=1e9, weighting="data"), FedAvg(0.7)), NaiveBounded)
    assert RobustServer(NormBound(weighting="data"), FedAvg()).weighting == "data"


def test_buckets_weigh_as_their_rows_together(follows):
    """With a bound out of reach a weighted mean of weighted buckets is the weighted mean of all."""
    follows(NormBound(0.7, norm=1e9, bucket=2, weighting="data"), NaiveBounded)


def test_rules_of_ranks_take_no_weights():
    with pytest.raises(TypeError):
        TrimmedMean(weighting="data")


@pytest.mark.parametrize("beta", [1.0, [0.9, 1.0]])
def test_a_first_moment_that_never_moves_is_refused(beta):
    with pytest.raises(ConfigError, match=r"beta1=.* trains nothing.*must be below 1"):
        FedOpt(beta1=beta)
