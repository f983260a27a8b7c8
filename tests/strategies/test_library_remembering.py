"""FOCUS, FedStale, MimiC, AREA, MIFA's divisors and ages, memory by data: each against its formula."""

from __future__ import annotations

import numpy as np
import pytest
from library import PROBABILITIES, Naive, with_
from naive_strategies import BY_DATA, CLIENTS, UNIFORM

from fedsim.strategies import (
    AREA,
    MIFA,
    FedAU,
    FedAWE,
    FedDC,
    FedPBC,
    FedStale,
    FedVARP,
    Focus,
    MimiC,
    Scaffold,
)


class NaiveFocus(Naive):
    """The push-pull recursion as published: y_i gathers changes of the gradient, y what clients pushed."""

    eta, empty, weights = 0.25, "step", UNIFORM

    def begin(self):
        self.memory, self.y = self.rows(), np.zeros_like(self.model)

    def round(self, t, active):
        rates = self.learner.rates(t)
        for i in active:
            x, y = self.model, np.zeros_like(self.model)
            for k in range(len(rates)):
                x = x - rates[k - 1] * y if k else x
                gradient = self.learner.gradient(i, x)
                y, self.memory[i] = y + gradient - self.memory[i], gradient
            self.y = self.y + CLIENTS * self.weights[i] * y
        if active or self.empty == "step":
            self.model = self.model - self.eta * rates[0] * self.y


class NaiveFedStale(Naive):
    """1/p_i: true, or the mean of the intervals that have closed."""

    beta, eta, weights, known, cutoff = 0.5, 1.0, UNIFORM, False, 10**9

    def begin(self):
        self.memory, self.closed, self.away = self.rows(), [[] for _ in range(CLIENTS)], [0] * CLIENTS

    def round(self, t, active):
        v = self.beta * sum(w * h for w, h in zip(self.weights, self.memory, strict=True))
        for i in active:
            seldom = 1 / PROBABILITIES[i] if self.known else np.mean(self.closed[i] or [1.0])
            v = v + self.weights[i] * seldom * (self.innovation(i, t) - self.beta * self.memory[i])
        self.memory = [self.innovation(i, t) if i in active else h for i, h in enumerate(self.memory)]
        self.model = self.model - self.eta * v if active else self.model
        for i in range(CLIENTS):
            self.away[i] += 1
            if i in active or self.away[i] == self.cutoff:
                self.closed[i].append(self.away[i])
                self.away[i] = 0


class NaiveMimiC(Naive):
    eta, everybody, weights, gradient = 1.0, True, UNIFORM, False

    def begin(self):
        self.memory = self.rows()

    def round(self, t, active):
        active = list(range(CLIENTS)) if self.everybody and t == 0 else active
        if not active:
            return
        heard = {i: self.innovation(i, t) for i in active}
        rate = self.learner.rates(t)[0] if self.gradient else 1.0
        v = self.over({i: g + rate * self.memory[i] for i, g in heard.items()}, self.weights)
        for i, g in heard.items():
            self.memory[i] = (v - g) / rate
        self.model = self.model - self.eta * v


class NaiveAREA(Naive):
    """As it is sent: differences gather in u, and the server moves by u."""

    weights = UNIFORM

    def begin(self):
        self.models = [self.model] * CLIENTS

    def round(self, t, active):
        u = np.zeros_like(self.model)
        for i in active:
            end = self.model - self.innovation(i, t)
            u, self.models[i] = u + self.weights[i] * (end - self.models[i]), end
        self.model = self.model + u


class NaiveMIFA(Naive):
    eta, weights, gradient, wait, seen, power, oldest = 1.0, UNIFORM, False, False, False, 0.0, 10**9

    def begin(self):
        self.memory, self.last = self.rows(), [None] * CLIENTS

    def round(self, t, active):
        rate = self.learner.rates(t)[0] if self.gradient else 1.0
        for i in active:
            self.memory[i], self.last[i] = self.innovation(i, t) / rate, t
        met = [i for i in range(CLIENTS) if self.last[i] is not None]
        if self.wait and len(met) < CLIENTS:
            return
        total = sum(self.weights[i] for i in met) if self.seen else 1.0
        for i in met:
            if t - self.last[i] <= self.oldest:
                psi = (1 + t - self.last[i]) ** -self.power
                self.model = self.model - self.eta * rate * psi * self.weights[i] / total * self.memory[i]


class NaiveFedVARP(Naive):
    weights = BY_DATA

    def begin(self):
        self.memory = self.rows()

    def round(self, t, active):
        heard = {i: self.innovation(i, t) for i in active}
        if heard:
            surprise = self.over({i: g - self.memory[i] for i, g in heard.items()}, self.weights)
            v = sum(w * y for w, y in zip(self.weights, self.memory, strict=True)) + surprise
            self.model = self.model - v
        for i, g in heard.items():
            self.memory[i] = g


class NaiveScaffold(Naive):
    weights = BY_DATA

    def begin(self):
        self.memory = self.rows()

    def round(self, t, active):
        c = sum(w * own for w, own in zip(self.weights, self.memory, strict=True))
        heard = {i: self.innovation(i, t, correction=c - self.memory[i]) for i in active}
        for i, g in heard.items():
            self.memory[i] = self.memory[i] - c + g / sum(self.learner.rates(t))
        self.model = self.model - self.over(heard, self.weights) if heard else self.model


class NaiveFedPBC(Naive):
    """Whoever is not linked goes on with its own."""

    weights = BY_DATA

    def begin(self):
        self.models = [self.model] * CLIENTS

    def round(self, t, active):
        self.models = [self.learner.train(i, x, t) for i, x in enumerate(self.models)]
        if active:
            self.model = self.over({i: self.models[i] for i in active}, self.weights)
            self.models = [self.model if i in active else x for i, x in enumerate(self.models)]


class NaiveFedAWE(Naive):
    weights = BY_DATA

    def begin(self):
        self.models, self.last_seen = [self.model] * CLIENTS, [-1] * CLIENTS

    def round(self, t, active):
        echoed = {
            i: x - (t - self.last_seen[i]) * self.learner.innovation(i, x, t)
            for i, x in enumerate(self.models)
            if i in active
        }
        self.model = self.over(echoed, self.weights) if active else self.model
        for i in active:
            self.models[i], self.last_seen[i] = self.model, t


class NaiveFedDC(Naive):
    alpha, weights = 0.2, BY_DATA

    def begin(self):
        self.drift, self.control = self.rows(), self.rows()

    def round(self, t, active):
        if not active:
            return
        x, ends = self.model, {}
        c = sum(w * own for w, own in zip(self.weights, self.control, strict=True))
        for i in active:
            linear = c - self.control[i] + self.alpha * self.drift[i]
            ends[i] = self.learner.train(i, x, t, correction=linear, mu=self.alpha)
        for i, end in ends.items():
            self.control[i] = self.control[i] - c + (x - end) / sum(self.learner.rates(t))
            self.drift[i] = self.drift[i] + end - x
        self.model = self.over(ends, self.weights) + sum(w * b for w, b in zip(self.weights, self.drift, strict=True))


AGED = {"gradient": True, "seen": True, "power": 0.5, "oldest": 2, "weights": BY_DATA, "eta": 0.7}
CASES = {
    "focus": (Focus(0.25), NaiveFocus, "step"),
    "focus, skips, by data": (
        Focus(0.3, "skip", "data"), with_(NaiveFocus, eta=0.3, empty="skip", weights=BY_DATA), "sqrt",
    ),
    "fedstale": (FedStale(), NaiveFedStale, "constant"),
    "fedstale, cut off": (FedStale(0.8, 0.7, cutoff=2), with_(NaiveFedStale, beta=0.8, eta=0.7, cutoff=2), "sqrt"),
    "fedstale, known, by data": (
        FedStale(0.3, 1.0, "known", None, "data"), with_(NaiveFedStale, beta=0.3, known=True, weights=BY_DATA), "step",
    ),
    "mimic": (MimiC(), NaiveMimiC, "constant"),
    "mimic, who is there": (MimiC(0.8, "available"), with_(NaiveMimiC, eta=0.8, everybody=False), "sqrt"),
    "mimic, gradient, by data": (
        MimiC(memory="gradient", weighting="data"), with_(NaiveMimiC, gradient=True, weights=BY_DATA), "sqrt"
    ),
    "area": (AREA(), NaiveAREA, "constant"),
    "area by data": (AREA("data"), with_(NaiveAREA, weights=BY_DATA), "step"),
    "mifa by data": (MIFA(weighting="data"), with_(NaiveMIFA, weights=BY_DATA), "constant"),
    "mifa of those seen": (MIFA(divide_by="seen"), with_(NaiveMIFA, seen=True), "constant"),
    "mifa, aged": (MIFA(0.7, "gradient", False, "same", "data", "seen", 0.5, 2), with_(NaiveMIFA, **AGED), "sqrt"),
    "mifa, aged, waits": (MIFA(wait_for_all=True, age_power=1.0), with_(NaiveMIFA, power=1.0, wait=True), "constant"),
    "fedvarp by data": (FedVARP(weighting="data"), NaiveFedVARP, "constant"),
    "fedau by data": (FedAU(0.7, 2, "data"), with_(NaiveFedStale, beta=0, eta=0.7, weights=BY_DATA, cutoff=2), "sqrt"),
    "fedpbc by data": (FedPBC(weighting="data"), NaiveFedPBC, "step"),
    "fedawe by data": (FedAWE(weighting="data"), NaiveFedAWE, "constant"),
    "feddc by data": (FedDC(0.2, "data"), NaiveFedDC, "step"),
    "scaffold by data": (Scaffold(weighting="data"), NaiveScaffold, "step"),
}  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CASES)
def test_every_round_follows_the_formula(name, follows):
    strategy, naive, schedule = CASES[name]
    follows(strategy, naive, schedule=schedule)
