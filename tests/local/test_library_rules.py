"""FedSAM's and FedLC's steps against their formulas, and where they must be plain ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedsim import Execution, Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset, Quadratics
from fedsim.local import SAM, SGD, FedLC
from fedsim.models import Linear, Mean

LABELS = [0, 0, 1, 1, 0, 2, 2, 2, 2]
OWNERS = [0, 0, 0, 0, 1, 1, 1, 1, 1]


@pytest.fixture(name="ends")
def ends_fixture(play):
    """[2, d] where two clients arrive after one round, and the model they begin with."""

    def run(rule, labels=None, owners=None, executor="vmap", **options) -> tuple[torch.Tensor, torch.Tensor]:
        draw = np.random.default_rng(3)
        x, y, who = torch.as_tensor(draw.standard_normal((9, 2))), labels or LABELS, owners or OWNERS
        data = Dataset("few", x[: len(y)], torch.tensor(y), classes=3, owners=torch.tensor(who))
        work = {"lr": 0.3, "steps": 2, "batch_size": None} | options
        simulation = Simulation(
            data, Linear, clients=2, local=rule(**work), execution=Execution(executor, dtype="float64"), rounds=1
        )
        played = next(play(simulation))
        return played.report.end, played.before.model[0]

    return run


def naive(labels, owners, start, lr, move) -> list[np.ndarray]:
    """Two steps of each client, with gradients of a function of (weights, x, labels, client) by finite means."""
    x = torch.as_tensor(np.random.default_rng(3).standard_normal((9, 2)))
    found = []
    for client in (0, 1):
        mine = [k for k, owner in enumerate(owners) if owner == client]
        row = start.clone()
        for _ in range(2):
            row = row - lr * move(row, x[mine], torch.tensor(labels)[mine])
        found.append(row)
    return found


def slope(row, x, y, margin=0.0) -> torch.Tensor:
    row = row.clone().requires_grad_()
    weight, bias = row[:6].reshape(3, 2), row[6:]
    F.cross_entropy(x @ weight.T + bias - margin, y).backward()
    return row.grad


@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_fedlc_takes_its_margin_off_the_scores(executor, ends):
    """τ n^{−1/4} of two clients: one has none of class 2, the other none of class 1."""
    found, start = ends(FedLC, tau=0.5, executor=executor)

    def move(row, x, y):
        counts = np.maximum([(y == c).sum().item() for c in range(3)], 1e-8)
        return slope(row, x, y, torch.as_tensor(0.5 * counts**-0.25))

    for row, wanted in zip(found, naive(LABELS, OWNERS, start, 0.3, move), strict=True):
        torch.testing.assert_close(row, wanted, rtol=0, atol=1e-10)


def test_balanced_softmax_adds_the_logarithm_of_the_counts(ends):
    labels, owners = [0, 1, 1, 2, 0, 0, 0, 1, 2], [0, 0, 0, 0, 1, 1, 1, 1, 1]
    found, start = ends(FedLC, labels, owners, margin="balanced")
    move = lambda row, x, y: slope(row, x, y, -torch.log(torch.bincount(y).double()))  # noqa: E731
    for row, wanted in zip(found, naive(labels, owners, start, 0.3, move), strict=True):
        torch.testing.assert_close(row, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("margin", ["fedlc", "balanced"])
def test_every_round_of_fedlc_follows_the_formula(margin, Scripted, play):
    """Five rounds of three unequal clients in two replicates; one round is empty, one for a replicate."""
    draw, owners = np.random.default_rng(3), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
    x, y = torch.as_tensor(draw.standard_normal((9, 2))), torch.tensor([0, 1, 2, 2, 1, 2, 0, 0, 2])
    words = ["110 011 000 101 100", "101 110 000 000 011"]
    counts = np.array([[list(map(int, w)) for w in one.split()] for one in words]).swapaxes(0, 1)
    simulation = Simulation(
        Dataset("few", x, y, classes=3, owners=owners), Linear, clients=3, seeds=(1, 5), rounds=5,
        availability=Scripted(counts), local=FedLC(0.5, margin, lr=0.3, steps=2, batch_size=None),
        execution=Execution(dtype="float64"),
    )  # fmt: skip
    models = list(simulation.initial_state().model)
    for played in play(simulation):
        for r, there in enumerate(counts[played.t]):
            ends = []
            for client in np.flatnonzero(there):
                mine, row = owners == client, models[r]
                held = torch.bincount(y[mine], minlength=3).double().clamp(min=1e-8)
                taken = 0.5 * (held**-0.25 if margin == "fedlc" else -held.log())
                for _ in range(2):
                    row = row - 0.3 * slope(row, x[mine], y[mine], taken)
                ends.append(row)
            models[r] = sum(ends) / len(ends) if ends else models[r]
            torch.testing.assert_close(played.after.model[r], models[r], rtol=0, atol=1e-10)


@pytest.mark.parametrize("margin", ["fedlc", "balanced"])
def test_with_equal_counts_calibration_is_plain_sgd(margin, ends):
    equal = [0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1]
    torch.testing.assert_close(ends(FedLC, *equal, margin=margin)[0], ends(SGD, *equal)[0], rtol=0, atol=1e-13)


def test_fedlc_refuses_what_has_no_classes():
    with pytest.raises(ConfigError, match=r"local=fedlc.*has no classes; use local=sgd"):
        Simulation(Quadratics(clients=2, points=[0.0, 1.0]), Mean, clients=2, local=FedLC())


@pytest.mark.parametrize(("adaptive", "executor"), [(False, "vmap"), (False, "loop"), (True, "vmap")])
def test_sam_steps_along_the_gradient_at_the_top_of_its_ascent(adaptive, executor, ends):
    found, start = ends(SAM, rho=0.2, adaptive=adaptive, executor=executor)

    def move(row, x, y):
        gradient = slope(row, x, y)
        scale = row.abs() + 0.01 if adaptive else torch.ones_like(row)
        return slope(row + 0.2 * scale**2 * gradient / (scale * gradient).norm(), x, y)

    for row, wanted in zip(found, naive(LABELS, OWNERS, start, 0.3, move), strict=True):
        torch.testing.assert_close(row, wanted, rtol=0, atol=1e-10)


def test_without_radius_sam_is_sgd(ends):
    torch.testing.assert_close(ends(SAM, rho=0.0)[0], ends(SGD, weight_decay=0.0)[0], rtol=0, atol=1e-13)


def test_on_a_quadratic_sam_does_not_settle_but_hovers(play):
    """The gradient is g (1 + ρ/‖g‖): x ← x − η (x − u) − ηρ sign(x − u), which ends at ±ηρ / (2 − η)."""
    simulation = Simulation(
        Quadratics(clients=1, points=[0.0]),
        Mean,
        clients=1,
        local=SAM(rho=0.5, lr=0.4, steps=41),
        execution=Execution(dtype="float64"),
        rounds=1,
    )
    start = torch.ones(1, 1, dtype=torch.float64)
    report = simulation.trainer.run(start, simulation.availability.sample(0), 0, start)
    assert abs(report.end.item()) == pytest.approx(0.4 * 0.5 / (2 - 0.4), abs=1e-6)
