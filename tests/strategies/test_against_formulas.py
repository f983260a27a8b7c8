"""Every strategy against its formula, written client by client in NumPy, local training included."""

from __future__ import annotations

import numpy as np
import pytest

from fedsim import Execution, Simulation
from fedsim.local import SGD
from fedsim.strategies import FedAvg, FedAvgAll, FedAvgKnown, FedAWE, FedPBC

SIZES, SEEDS, ROUNDS, LR, STEPS = (5, 2, 9, 1), (4, 11), 8, 0.05, 3
CLIENTS = len(SIZES)


def script() -> tuple[np.ndarray, np.ndarray]:
    """Random participation with its probabilities; round 2 is empty, round 5 only for the second replicate."""
    draw = np.random.default_rng(3)
    probabilities = draw.uniform(0.2, 0.9, (ROUNDS, len(SEEDS), CLIENTS))
    counts = (draw.random(probabilities.shape) < probabilities).astype(np.int8)
    counts[2] = 0
    counts[5] = [[1, 0, 1, 0], [0, 0, 0, 0]]
    counts[6, 0] = [0, 1, 0, 1]
    return counts, probabilities


def train(x: np.ndarray, features: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Full-batch gradient steps on ½ mean (w·a + b − y)² from x = (w, b)."""
    for _ in range(STEPS):
        error = features @ x[:-1] + x[-1] - targets
        x = x - LR * np.append(features.T @ error, error.sum()) / len(targets)
    return x


class Naive:
    """One replicate, one client at a time. `local(i, x)` is client i's local training from x."""

    def __init__(self, x0: np.ndarray, local) -> None:
        self.x, self.local = x0, local
        self.models = [x0] * CLIENTS
        self.tau = [-1] * CLIENTS

    def fedavg(self, t, active, p, eta, weights):
        total = sum(weights[i] for i in active)
        move = sum(weights[i] / total * (self.local(i, self.x) - self.x) for i in active)
        self.x = self.x + eta * move

    def fedavg_all(self, t, active, p, eta, weights):
        self.x = self.x + eta * sum(weights[i] * (self.local(i, self.x) - self.x) for i in active)

    def fedavg_known(self, t, active, p, eta, weights):
        self.x = self.x + eta * sum(weights[i] * (self.local(i, self.x) - self.x) / p[i] for i in active)

    def fedpbc(self, t, active, p, eta, weights, everybody=True):
        ends = [self.local(i, x) if everybody or i in active else x for i, x in enumerate(self.models)]
        if active:
            self.x = sum(ends[i] for i in active) / len(active)
        self.models = [self.x if i in active else end for i, end in enumerate(ends)]

    def fedpbc_active(self, t, active, p, eta, weights):
        self.fedpbc(t, active, p, eta, weights, everybody=False)

    def fedawe(self, t, active, p, eta, weights, clip=np.inf):
        if not active:
            return
        update = np.zeros_like(self.x)
        for i in active:
            innovation = self.models[i] - self.local(i, self.models[i])
            update = update + eta * (t - self.tau[i]) * innovation / len(active)
        norm = np.sqrt(sum(update**2))
        self.clipped = getattr(self, "clipped", 0) + (norm > clip)
        self.x = sum(self.models[i] for i in active) / len(active) - update * min(1, clip / norm)
        for i in active:
            self.models[i], self.tau[i] = self.x, t

    def fedawe_clipped(self, t, active, p, eta, weights):
        self.fedawe(t, active, p, eta, weights, clip=CLIP)

    def fedawe_mean_clipped(self, t, active, p, eta, weights):
        """The order of the authors' program: η_g times the clipped mean."""
        if not active:
            return
        before = sum(self.models[i] for i in active) / len(active)
        self.fedawe(t, active, p, 1.0, weights, clip=CLIP)
        self.x = before + eta * (self.x - before)
        for i in active:
            self.models[i] = self.x


CLIP = 0.35  # some of the rounds reach it, some do not
UNIFORM = [1 / CLIENTS] * CLIENTS
BY_DATA = [size / sum(SIZES) for size in SIZES]

CASES = {
    "fedavg": (FedAvg(), "fedavg", 1.0, UNIFORM),
    "fedavg server_lr": (FedAvg(server_lr=0.7), "fedavg", 0.7, UNIFORM),
    "fedavg by data": (FedAvg(server_lr=1.3, weighting="data"), "fedavg", 1.3, BY_DATA),
    "fedavg_all": (FedAvgAll(server_lr=1.2), "fedavg_all", 1.2, UNIFORM),
    "fedavg_all by data": (FedAvgAll(server_lr=0.9, weighting="data"), "fedavg_all", 0.9, BY_DATA),
    "fedavg_known": (FedAvgKnown(server_lr=0.8), "fedavg_known", 0.8, UNIFORM),
    "fedavg_known by data": (FedAvgKnown(server_lr=0.8, weighting="data"), "fedavg_known", 0.8, BY_DATA),
    "fedpbc": (FedPBC(), "fedpbc", None, UNIFORM),
    "fedpbc active": (FedPBC(compute="active"), "fedpbc_active", None, UNIFORM),
    "fedawe": (FedAWE(), "fedawe", 1.0, UNIFORM),
    "fedawe server_lr": (FedAWE(server_lr=0.6), "fedawe", 0.6, UNIFORM),
    "fedawe clip": (FedAWE(server_lr=0.8, clip=CLIP), "fedawe_clipped", 0.8, UNIFORM),
    "fedawe clip, mean": (FedAWE(server_lr=0.8, clip=CLIP, clipped="mean"), "fedawe_mean_clipped", 0.8, UNIFORM),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_every_round_follows_the_formula(case, executor, play, Scripted, Regression, regression_of):
    strategy, formula, eta, weights = CASES[case]
    counts, probabilities = script()
    dataset = regression_of(SIZES)
    simulation = Simulation(
        dataset,
        Regression,
        clients=CLIENTS,
        availability=Scripted(counts, probabilities),
        strategy=strategy,
        local=SGD(lr=LR, steps=STEPS, batch_size=None),
        rounds=ROUNDS,
        seeds=SEEDS,
        execution=Execution(dtype="float64", executor=executor, chunk=3),
    )
    features, targets, owners = (v.numpy() for v in (dataset.train_x, dataset.train_y, dataset.owners))

    def local(i: int, x: np.ndarray) -> np.ndarray:
        return train(x, features[owners == i], targets[owners == i])

    naive = [Naive(x0.numpy(), local) for x0 in simulation.initial_state().model]
    assert not np.allclose(naive[0].x, naive[1].x)
    for played in play(simulation):
        for r, one in enumerate(naive):
            active = np.flatnonzero(counts[played.t, r])
            getattr(one, formula)(played.t, list(active), probabilities[played.t, r], eta, weights)
            state = played.after
            np.testing.assert_allclose(state.model[r], one.x, atol=1e-8, err_msg=f"round {played.t}")
            own = slice(r * CLIENTS, (r + 1) * CLIENTS)
            if hasattr(state, "models"):
                np.testing.assert_allclose(state.models[own], np.stack(one.models), atol=1e-8)
            if hasattr(state, "last_seen"):
                np.testing.assert_array_equal(state.last_seen[own], one.tau)
    if case.startswith("fedawe clip"):
        heard = [int((counts[:, r].sum(1) > 0).sum()) for r in range(len(SEEDS))]
        assert all(0 < one.clipped < rounds for one, rounds in zip(naive, heard, strict=True))
