"""Strategies written client by client: Python lists for memory, training in NumPy; no code of fedsim's."""

from __future__ import annotations

import math

import numpy as np

from fedsim.core.ties import tie_breakers
from fedsim.data.datasets import Dataset
from fedsim.local import Constant, InverseSqrt, PerStep

SIZES, SEEDS, ROUNDS, STEPS, LRS = (5, 2, 9, 1), (4, 11), 10, 3, (0.05, 0.03)
CLIENTS = len(SIZES)
UNIFORM = [1 / CLIENTS] * CLIENTS
BY_DATA = [size / sum(SIZES) for size in SIZES]


def script() -> np.ndarray:
    """Random participation: round 2 is empty, round 6 for the second replicate; client 3 comes late to the first."""
    counts = (np.random.default_rng(5).random((ROUNDS, len(SEEDS), CLIENTS)) < 0.5).astype(np.int8)
    counts[2] = 0
    counts[6] = [[1, 0, 1, 0], [0, 0, 0, 0]]
    counts[:5, 0, 3] = 0
    counts[5, 0, 3] = 1
    return counts


class Learner:
    """One replicate's clients: full-batch gradient steps on ½ mean (w·a + b − y)² from x = (w, b)."""

    def __init__(self, dataset: Dataset, lr: float, rate) -> None:
        owners = dataset.owners.numpy()
        self.data = [
            (dataset.train_x.numpy()[owners == i], dataset.train_y.numpy()[owners == i]) for i in range(CLIENTS)
        ]
        self.lr, self.rate = lr, rate

    def rates(self, t: int, steps: int = STEPS) -> list[float]:
        return [self.lr * self.rate(t, k, steps) for k in range(steps)]

    def error(self, i: int, x: np.ndarray) -> np.ndarray:
        features, targets = self.data[i]
        return features @ x[:-1] + x[-1] - targets

    def loss(self, i: int, x: np.ndarray) -> float:
        return 0.5 * np.mean(self.error(i, x) ** 2)

    def gradient(self, i: int, x: np.ndarray) -> np.ndarray:
        error = self.error(i, x)
        return np.append(self.data[i][0].T @ error, error.sum()) / len(error)

    def train(
        self,
        i: int,
        x: np.ndarray,
        t: int,
        correction=0.0,
        mu: float = 0.0,
        steps: int = STEPS,
        momentum: float = 0.0,
        nesterov: bool = False,
    ) -> np.ndarray:
        start, velocity = x, 0.0
        for rate in self.rates(t, steps):
            gradient = self.gradient(i, x) + correction + mu * (x - start)
            velocity = momentum * velocity + gradient
            x = x - rate * (gradient + momentum * velocity if nesterov else velocity)
        return x

    def innovation(self, i: int, x: np.ndarray, t: int, **options) -> np.ndarray:
        return x - self.train(i, x, t, **options)


class NaiveFedAU:
    def __init__(self, x, learner, eta, cutoff):
        self.model, self.learner, self.eta, self.cutoff = x, learner, eta, cutoff
        self.closed = [[] for _ in range(CLIENTS)]
        self.away = [0] * CLIENTS

    @property
    def weight(self):
        return [sum(lengths) / len(lengths) if lengths else 1.0 for lengths in self.closed]

    def round(self, t, counts):
        omega = self.weight
        moves = [omega[i] * self.learner.innovation(i, self.model, t) for i in range(CLIENTS) if counts[i]]
        self.model = self.model - self.eta / CLIENTS * sum(moves, np.zeros_like(self.model))
        for i in range(CLIENTS):
            self.away[i] += 1
            if counts[i] or self.away[i] == self.cutoff:
                self.closed[i].append(self.away[i])
                self.away[i] = 0


class NaiveF3AST:
    seed = 0

    def __init__(self, x, learner, eta, beta, weights, k=None):
        self.model, self.learner, self.eta, self.beta, self.w, self.k = x, learner, eta, beta, weights, k
        self.frequency = [0.0] * CLIENTS

    def round(self, t, counts):
        active = [i for i in range(CLIENTS) if counts[i]]
        if self.k is not None:
            urgency = [self.w[i] ** 2 / r**2 if r else math.inf for i, r in enumerate(self.frequency)]
            ties = tie_breakers(self.seed, np.arange(CLIENTS), t)  # who goes first among equals
            active = sorted(active, key=lambda i: (-urgency[i], ties[i]))[: self.k]
        for i in range(CLIENTS):
            self.frequency[i] = (1 - self.beta) * self.frequency[i] + self.beta * (i in active)
        x = self.model
        for i in active:
            unbiased = self.frequency[i] / (1 - (1 - self.beta) ** (t + 1))
            self.model = self.model - self.eta * self.w[i] / unbiased * self.learner.innovation(i, x, t)


class NaiveMIFA:
    def __init__(self, x, learner, eta, gradient=False, wait=False):
        self.model, self.learner, self.eta, self.gradient, self.wait = x, learner, eta, gradient, wait
        self.memory = [np.zeros_like(x) for _ in range(CLIENTS)]
        self.met = [False] * CLIENTS

    def round(self, t, counts):
        rate = self.learner.rates(t)[0] if self.gradient else 1.0
        for i in range(CLIENTS):
            if counts[i]:
                self.memory[i] = self.learner.innovation(i, self.model, t) / rate
                self.met[i] = True
        if all(self.met) or not self.wait:
            self.model = self.model - self.eta / CLIENTS * rate * sum(self.memory)


class NaiveFedVARP:
    def __init__(self, x, learner, eta):
        self.model, self.learner, self.eta = x, learner, eta
        self.memory = [np.zeros_like(x) for _ in range(CLIENTS)]

    def round(self, t, counts):
        heard = {i: self.learner.innovation(i, self.model, t) for i in range(CLIENTS) if counts[i]}
        if not heard:
            return
        surprise = sum(g - self.memory[i] for i, g in heard.items()) / len(heard)
        self.model = self.model - self.eta * (sum(self.memory) / CLIENTS + surprise)
        for i, g in heard.items():
            self.memory[i] = g


class NaiveScaffold:
    """c moves as the paper writes it; that it stays the mean of the c_i is a consequence."""

    def __init__(self, x, learner, eta, steps=(STEPS,) * CLIENTS):
        self.model, self.learner, self.eta, self.steps = x, learner, eta, steps
        self.memory = [np.zeros_like(x) for _ in range(CLIENTS)]
        self.mean = np.zeros_like(x)

    def round(self, t, counts):
        active = [i for i in range(CLIENTS) if counts[i]]
        if not active:
            return
        heard, changes = [], []
        for i in active:
            correction = self.mean - self.memory[i]
            g = self.learner.innovation(i, self.model, t, correction=correction, steps=self.steps[i])
            control = self.memory[i] - self.mean + g / sum(self.learner.rates(t, self.steps[i]))
            heard.append(g)
            changes.append(control - self.memory[i])
            self.memory[i] = control
        self.model = self.model - self.eta * sum(heard) / len(active)
        self.mean = self.mean + len(active) / CLIENTS * (sum(changes) / len(active))


class NaiveFedProx:
    def __init__(self, x, learner, eta, mu, weights, steps=(STEPS,) * CLIENTS):
        self.model, self.learner, self.eta, self.mu, self.w, self.steps = x, learner, eta, mu, weights, steps

    def round(self, t, counts):
        x, mass = self.model, sum(self.w[i] for i in range(CLIENTS) if counts[i])
        for i in range(CLIENTS):
            if counts[i]:
                g = self.learner.innovation(i, x, t, mu=self.mu, steps=self.steps[i])
                self.model = self.model - self.eta * self.w[i] / mass * g


class NaiveFedOpt:
    def __init__(self, x, learner, optimizer, eta, beta1, beta2, tau):
        self.model, self.learner, self.optimizer = x, learner, optimizer
        self.eta, self.beta1, self.beta2, self.tau = eta, beta1, beta2, tau
        self.first, self.second = np.zeros_like(x), np.full_like(x, tau**2)

    def round(self, t, counts):
        ends = [self.learner.train(i, self.model, t) for i in range(CLIENTS) if counts[i]]
        if not ends:
            return
        delta = sum(ends) / len(ends) - self.model
        self.first = self.beta1 * self.first + (1 - self.beta1) * delta
        v, square = self.second, delta**2
        if self.optimizer == "adam":
            self.second = self.beta2 * v + (1 - self.beta2) * square
        elif self.optimizer == "yogi":
            self.second = v - (1 - self.beta2) * square * np.sign(v - square)
        else:
            self.second = v + square
        self.model = self.model + self.eta * self.first / (np.sqrt(self.second) + self.tau)


class NaivePFedAvg:
    def __init__(self, x, learner, scheme, weights=None):
        self.model, self.learner, self.scheme, self.w = x, learner, scheme, weights

    def round(self, t, counts):
        drawn = [i for i in range(CLIENTS) for _ in range(counts[i])]
        if not drawn:
            return
        ends = {i: self.learner.train(i, self.model, t) for i in drawn}
        if self.scheme == "I":
            self.model = sum(ends[i] for i in drawn) / len(drawn)
        else:
            share = CLIENTS / len(drawn) if self.scheme == "II" else 1.0
            self.model = sum(self.w[i] * share * end for i, end in ends.items())


SCHEDULES = {
    "constant": (Constant(), lambda t, k, s: 1.0),
    "sqrt": (InverseSqrt(2.0), lambda t, k, s: 1 / math.sqrt(t / 2 + 1)),
    "step": (PerStep(0.95), lambda t, k, s: 0.95 ** (t * s + k)),
}
