"""What decides the claims of our own recipes that do not hold: formulas on quadratics, F_i(x) = ½ ‖x − u_i‖²."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Bernoulli, Cyclic, Full, Groups
from fedsim.data.datasets import GaussianMean, Quadratics
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.strategies import AmplifiedScaffold, FedStale, Scaffold

STEPS, WINDOW, GAMMA = 5, 10, 1.5


def distances(strategy, lr: float, rounds: int, availability, seeds: int) -> np.ndarray:
    """[T + 1, R] to the optimum, in amplified_scaffold/synthetic's federation."""
    simulation = Simulation(
        Quadratics(10, 20, slope=0.3, variance=1.0), Mean, clients=10, availability=availability, strategy=strategy,
        local=SGD(lr=lr, steps=STEPS, batch_size=None), rounds=rounds, seeds=tuple(range(seeds)),
        execution=Execution(dtype="float64"), evaluation=EvaluationOptions(every=1),
    )  # fmt: skip
    found = [row["distance_to_optimum"] for row in simulation.run().history]
    return np.array(found).reshape(-1, seeds)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("lr", "plain", "amplified"), [(0.003, 0.860, 0.790), (0.03, 0.218, 0.173)])
def test_the_larger_the_rate_the_less_a_window_gains_by_amplification(lr, plain, amplified):
    """With everybody there a window keeps q^P of the way, amplified |1 − γ (1 − q^P)|, q = (1 − η)^s: at the large rate
    the model has nearly arrived by itself, and is sent past the optimum."""
    left = (1 - lr) ** (STEPS * WINDOW)
    for strategy, kept, said in ((Scaffold(), left, plain), (AmplifiedScaffold(), 1 - GAMMA * (1 - left), amplified)):
        assert abs(kept) == pytest.approx(said, abs=1e-3)
        found = distances(strategy, lr, 2 * WINDOW, Full(), 1)[::WINDOW, 0]
        assert found / found[0] == pytest.approx([1, abs(kept), kept**2], rel=1e-9)


@pytest.mark.slow
def test_amplified_scaffold_needs_more_rounds_at_the_large_rate_and_fewer_at_a_third_less():
    """Rounds after which the distance stays below 0.01: differences by seed over 40 seeds, by four standard errors."""

    def rounds(strategy, lr: float) -> np.ndarray:
        above = distances(strategy, lr, 130, Cyclic(2, 5, k=2), 40) >= 0.01
        assert not above[-1].any()
        return len(above) - above[::-1].argmax(0)

    for lr, sign in ((0.03, 1), (0.02, -1)):
        more = sign * (rounds(AmplifiedScaffold(), lr) - rounds(Scaffold(), lr))
        assert more.mean() > 4 * more.std(ddof=1) / np.sqrt(len(more))


def variance(beta: float, noise: float, start: float, rounds: int, seeds: int = 200) -> float:
    """Of FedStale's model over seeds: eight clients of one law around 0, four always there, four with p = 0.1."""
    simulation = Simulation(
        GaussianMean(clients=8, means=[0.0] * 8, std=noise), functools.partial(Mean, start=start), clients=8,
        availability=Bernoulli(Groups(1.0, 0.1)), strategy=FedStale(beta, probabilities="known"),
        local=SGD(lr=0.02, steps=1, batch_size=1), rounds=rounds, seeds=tuple(range(seeds)),
        execution=Execution(dtype="float64"), evaluation=EvaluationOptions(every=rounds),
    )  # fmt: skip
    return float(simulation.run().state.model[:, 0].var())


@pytest.mark.slow
def test_stale_innovations_add_noise_at_rest_and_save_as_much_while_the_gradient_is_common():
    """A client that comes with probability p moves the model by w (1/p) ε in the round of a draw ε and, until it comes
    again after L rounds, by β w (L − 1/p) ε more: E = w² (1 + β² (1 − p)) / p a round: 44 w², and 80 w² for β = 1. On
    the way to the optimum what is stale is the common gradient, and (1/p − 1) w² ‖∇ − β h‖² is what it saves."""
    at_rest = variance(1.0, 1.0, 0.0, 200) / variance(0.0, 1.0, 0.0, 200)
    assert abs(np.log(at_rest / (80 / 44))) < 5 * np.sqrt(4 / 200)
    assert at_rest > 1.3
    assert variance(1.0, 0.0, 1.0, 30) < 0.7 * variance(0.0, 0.0, 1.0, 30)
