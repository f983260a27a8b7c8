"""Best responses at a cost that is not smooth: optimality, a naive solver, the smooth limit, gradients."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset
from fedsim.evaluation.performative import Risk
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.run.tracking import Tracking
from fedsim.shift import Elastic, Strategic
from fedsim.shift.elastic import project_to_l1_ball

QUIET = Tracking(progress="none", tensorboard=False)


def simulation_of(shift, executor="vmap", **options) -> Simulation:
    draw = np.random.default_rng(0)
    x, y = torch.as_tensor(draw.standard_normal((24, 5))), torch.arange(24) % 2
    data = Dataset("few", x + 0.5 * y[:, None], y, classes=2, loss="logistic")
    return Simulation(data, functools.partial(Linear, bias=False), clients=3, shift=shift, local=SGD(lr=0.5, steps=2),
                      ridge=0.1, execution=Execution(executor, dtype="float64"), **{"rounds": 3} | options)  # fmt: skip


def by_bisection(w: np.ndarray, epsilon: float, tau: float, reach: float | None) -> np.ndarray:
    """δ = −sign(w) ε max(|w| − τ − μ, 0), with the least μ ≥ 0 that keeps ‖δ‖₁ within reach."""

    def delta(mu: float) -> np.ndarray:
        return -np.sign(w) * epsilon * np.maximum(np.abs(w) - tau - mu, 0)

    if reach is None or np.abs(delta(0)).sum() <= reach:
        return delta(0)
    low, high = 0.0, float(np.abs(w).max())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.abs(delta(middle)).sum() > reach else (low, middle)
    return delta(high)


@pytest.mark.parametrize("reach", [None, 0.3, 2.0])
@pytest.mark.parametrize("tau", [0.0, 0.4])
def test_the_response_is_the_best_one(tau, reach) -> None:
    """Against bisection on the multiplier, and against random other responses that cost what they cost."""
    shift = Elastic(0.8, 0.2, [0, 1, 3, 4], reluctance=tau, reach=reach, references="none")
    shift = simulation_of(shift).shift
    draw = np.random.default_rng(1)
    for client in range(3):
        epsilon = shift.epsilons[client].item()
        for _ in range(20):
            w = draw.standard_normal(5) * draw.integers(0, 2, 5)
            batch = {"x": torch.zeros(1, 5, dtype=torch.float64), "client": torch.tensor(client)}
            delta = shift(batch, torch.as_tensor(w))["x"][0].numpy()
            w = w * [1, 1, 0, 1, 1]  # the third feature stays
            np.testing.assert_allclose(delta, by_bisection(w, epsilon, tau, reach), atol=1e-10)
            other = delta + 0.1 * draw.standard_normal((100, 5)) * [1, 1, 0, 1, 1]
            if reach is not None:
                other = other / np.maximum(np.abs(other).sum(1, keepdims=True) / reach, 1)

            def cost(moved):
                return moved @ w + (moved**2).sum(-1) / (2 * epsilon) + tau * np.abs(moved).sum(-1)  # noqa: B023

            assert (cost(other) >= cost(delta) - 1e-12).all()


def test_without_reluctance_and_budget_it_is_strategic_bit_for_bit() -> None:
    ends = [simulation_of(s).run(tracking=QUIET).state.model for s in (Elastic(reluctance=0.0), Strategic())]
    assert torch.equal(*ends)
    assert not torch.equal(simulation_of(Elastic(reluctance=0.2)).run(tracking=QUIET).state.model, ends[1])


def test_executors_agree_and_the_reluctant_do_not_answer() -> None:
    shift = Elastic(reluctance=0.05, reach=0.5)
    both = [simulation_of(shift, e).run(tracking=QUIET).state.model for e in ("vmap", "loop")]
    torch.testing.assert_close(*both, rtol=0, atol=1e-12)
    still = simulation_of(Elastic(reluctance=1e6)).run(tracking=QUIET).state.model
    assert torch.equal(still, simulation_of(None).run(tracking=QUIET).state.model)


@pytest.mark.parametrize("radius", [0.2, 5.0])
def test_the_projection_has_the_gradient_of_its_differences(radius) -> None:
    point = torch.tensor([0.9, -0.5, 0.1, -1.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: project_to_l1_ball(p, radius), (point,))
    assert project_to_l1_ball(point, radius).abs().sum().item() <= radius + 1e-12


@pytest.mark.slow
def test_its_optimum_is_solved_where_it_has_a_gradient_and_left_out_with_a_reason_where_it_lies_on_a_kink() -> None:
    simulation = simulation_of(Elastic(0.3, 0.0, reluctance=0.05))
    risk, best = (
        Risk(simulation.model, simulation.shift, simulation.data, 0),
        simulation.references["distance_to_po"][0],
    )
    draw = torch.as_tensor(np.random.default_rng(0).standard_normal((50, 5)))
    assert all(risk.performative_risk(best + 0.01 * away) > risk.performative_risk(best) for away in draw)
    bound = simulation_of(Elastic(0.3, 0.0, reluctance=0.05, reach=0.1)).references
    assert list(bound) == ["distance_to_ps"]
    assert "kinks" in bound.summary()["optimal"]["verdict"][0]


@pytest.mark.parametrize(("key", "value"), [("reluctance", -0.1), ("reach", 0.0)])
def test_what_is_no_cost_is_refused(key, value) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}="):
        Elastic(**{key: value})
