"""FedPBC and FedAvg on F_i(x) = ½‖x − u_i‖² in expectation, exactly, over all ways in which links can fail.

s steps at rate η take x to (1−c)x + cu_i with c = 1 − (1−η)^s. With links that are independent over rounds the mean
models obey linear equations, whose coefficients are E[1{S ⊆ A} / |A|], 1/0 counting as 0: summed over all 2^m sets for
few clients, and over the numbers of linked clients for two groups of many.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

Array = np.ndarray


@dataclass
class Exact:
    """Attributes:

    u: [m, d] the clients' optima.
    p: [m] probabilities of the links.
    c: 1 − (1−η)^s.
    average: [m] E[1{i ∈ A} / |A| given A ≠ ∅].
    pairs: [m, m] E[1{i, j ∈ A} / |A|].
    """

    u: Array
    p: Array
    c: float
    average: Array
    pairs: Array

    @property
    def optimum(self) -> Array:
        """[d] of the mean of the F_i."""
        return self.u.mean(0)

    @property
    def mixing(self) -> Array:
        """[m, m] EW: W is 1/|A| among the linked, 1 on the diagonal of the others."""
        return np.diag(1 - self.p) + self.pairs

    def clients(self, compute: str = "all") -> Array:
        """[m, d] E x_i at rest. z = EW((1−c)z + cu); where only the linked compute, the others' z_i stay."""
        idle = np.diag((1 - self.p) * (compute == "active"))
        worked = self.mixing - idle
        return np.linalg.solve(np.eye(len(self.p)) - (1 - self.c) * worked - idle, self.c * worked @ self.u)

    def server(self, compute: str = "all") -> Array:
        """[d] E x_PS at rest: Σ_A P(A | A ≠ ∅) mean_A((1−c)z + cu)."""
        return self.average @ ((1 - self.c) * self.clients(compute) + self.c * self.u)

    def fedavg(self) -> Array:
        """[d] what FedAvg's model is in expectation in the end, whatever c: Proposition 1."""
        return self.average @ self.u

    def rounds(self, number: int, compute: str = "all") -> Iterator[tuple[Array, Array]]:
        """(E x_i [m, d], E x_PS [d]) after each round, from models that are zero."""
        idle, never = np.diag((1 - self.p) * (compute == "active")), np.prod(1 - self.p)
        worked, z, x = self.mixing - idle, np.zeros_like(self.u), np.zeros(self.u.shape[1])
        for _ in range(number):
            after = (1 - self.c) * z + self.c * self.u
            z, x = worked @ after + idle @ z, (1 - never) * self.average @ after + never * x
            yield z, x


def exact(u: Array, p: Array, c: float) -> Exact:
    """By the sum over all sets of clients."""
    average, pairs = np.zeros(len(p)), np.zeros((len(p), len(p)))
    for chosen in itertools.product((0, 1), repeat=len(p)):
        inside = np.array(chosen)
        share = np.where(inside, p, 1 - p).prod() / max(inside.sum(), 1)
        average += share * inside
        pairs += share * np.outer(inside, inside)
    return Exact(u, p, c, average / (1 - np.prod(1 - p)), pairs)


def over(members: tuple[int, int], sizes: tuple[int, int], p: tuple[float, float], power: int = 1) -> float:
    """E[1{S ⊆ A} / |A|^power], S with that many members of each of two groups of independently linked clients."""
    others = [binom.pmf(np.arange(n - k + 1), n - k, q) for n, k, q in zip(sizes, members, p, strict=True)]
    count = sum(members) + np.add.outer(*(np.arange(len(chance)) for chance in others))
    inverse = np.where(count > 0, 1 / np.maximum(count, 1) ** power, 0)
    return float(p[0] ** members[0] * p[1] ** members[1] * (others[0] @ inverse @ others[1]))


def pairs_of(sizes: tuple[int, int], p: tuple[float, float], power: int) -> Array:
    """[m, m] E[1{i, j ∈ A} / |A|^power]; the first `sizes[0]` clients are linked with p[0], the others with p[1]."""
    group = np.repeat([0, 1], sizes)
    both = np.array([[over((2 - a - b, a + b), sizes, p, power) for b in (0, 1)] for a in (0, 1)])
    found = both[np.ix_(group, group)]
    np.fill_diagonal(found, np.array([over((1 - a, a), sizes, p, power) for a in (0, 1)])[group])
    return found


def exact_of_two_groups(u: Array, sizes: tuple[int, int], p: tuple[float, float], c: float) -> Exact:
    """The same as `exact` for any number of clients."""
    pairs = pairs_of(sizes, p, power=1)
    chances = np.repeat(p, sizes)
    average = np.repeat([over((1, 0), sizes, p), over((0, 1), sizes, p)], sizes)
    return Exact(u, chances, c, average / (1 - np.prod(1 - chances)), pairs)


def noise_of_fedavg(u: Array, sizes: tuple[int, int], p: tuple[float, float], c: float) -> float:
    """√(tr Var x) at rest of x ← (1−c)x + c·mean_A u: its square is c/(2−c) tr Var(mean_A u given A ≠ ∅)."""
    told = exact_of_two_groups(u, sizes, p, c)
    square = np.sum(pairs_of(sizes, p, power=2) * (u @ u.T)) / (1 - np.prod(1 - told.p))
    return float(np.sqrt(c / (2 - c) * (square - told.fedavg() @ told.fedavg())))
