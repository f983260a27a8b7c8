"""The history of deployed models: df/dθ ≈ Δf (Δθ)† against one client at a time in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.core import ConfigError, Federation
from fedsim.local.history import DeploymentHistory

D, P, CLIENTS = 3, 2, 4


def fresh(history: DeploymentHistory) -> dict[str, torch.Tensor]:
    federation = Federation((0,), CLIENTS, np.zeros(CLIENTS), dtype=torch.float64)
    return history.memory(federation, D, P)


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_the_finite_difference_is_over_each_clients_own_last_models(length: int, growing: bool) -> None:
    """Clients step at different times; df/dθ is numpy's pinv of the differences, and 0 in a client's first H steps, or
    with a growing window in its first min(d, H), after which it is of what the window holds."""
    history, draw = DeploymentHistory(length, rcond=1e-12, growing=growing), np.random.default_rng(length)
    needed = min(D, length) if growing else length
    carry, seen = fresh(history), [[] for _ in range(CLIENTS)]
    for _ in range(14):
        theta, f, u = (
            draw.standard_normal((CLIENTS, D)),
            draw.standard_normal((CLIENTS, P)),
            draw.standard_normal((CLIENTS, P)),
        )
        found = history.transposed_derivative_product(carry, *map(torch.as_tensor, (theta, f, u))).numpy()
        slope = history.derivative(carry, torch.as_tensor(theta), torch.as_tensor(f)).numpy()
        for i, past in enumerate(seen):
            expected = np.zeros((P, D))
            if len(past) >= needed:
                models, estimates = (np.array(part).T for part in zip(*past[-length:], strict=True))
                expected = (estimates - f[i][:, None]) @ np.linalg.pinv(models - theta[i][:, None])
            np.testing.assert_allclose(slope[i], expected, atol=1e-9)
            np.testing.assert_allclose(found[i], expected.T @ u[i], atol=1e-9)
            last = past[-1][1] if past else np.zeros(P)
            np.testing.assert_array_equal(history.last_estimate(carry)[i].numpy(), last)
        here = np.flatnonzero(draw.random(CLIENTS) < [0.2, 0.5, 0.9, 0.0])  # client 3 never appears
        part = history.record_deployment(
            {k: v[here] for k, v in carry.items()}, *(torch.as_tensor(z[here]) for z in (theta, f))
        )
        for name, value in part.items():
            carry[name][here] = value
        for i in here:
            seen[i].append((theta[i], f[i]))
    assert carry["own_steps"].tolist() == [len(past) for past in seen]
    assert not any(carry[name][3].any() for name in carry)


def test_a_linear_answer_is_found_exactly_where_models_moved_and_ignored_elsewhere() -> None:
    history, draw = DeploymentHistory(4), np.random.default_rng(1)
    jacobian = draw.standard_normal((P, D))
    carry = fresh(history)
    for step in range(4):  # client 0 moves in all of ℝ³, client 1 along one line, client 2 not at all
        theta = np.zeros((CLIENTS, D))
        theta[0], theta[1] = draw.standard_normal(D), step * np.array([1.0, 2.0, 2.0])
        carry = history.record_deployment(carry, torch.as_tensor(theta), torch.as_tensor(theta @ jacobian.T))
    theta = np.zeros((CLIENTS, D))
    found = history.derivative(carry, torch.as_tensor(theta), torch.as_tensor(theta @ jacobian.T)).numpy()
    line = np.array([1.0, 2.0, 2.0]) / 3
    np.testing.assert_allclose(found[0], jacobian, atol=1e-10)
    np.testing.assert_allclose(found[1], jacobian @ np.outer(line, line), atol=1e-10)
    np.testing.assert_array_equal(found[2:], 0)


def test_the_last_steps_come_latest_first_and_are_regressed_on_the_latest() -> None:
    """The ring turned once and a half; models and estimates as a list would hold them, their slope as numpy's."""
    history, draw = DeploymentHistory(4, rcond=1e-12), np.random.default_rng(2)
    carry, seen = fresh(history), []
    for _ in range(6):
        theta, f = draw.standard_normal((CLIENTS, D)), draw.standard_normal((CLIENTS, P))
        carry = history.record_deployment(carry, torch.as_tensor(theta), torch.as_tensor(f))
        seen.insert(0, (theta, f))
    models, estimates = history.recent_steps(carry)
    for ago, (theta, f) in enumerate(seen[:4]):
        np.testing.assert_array_equal(models[:, ago].numpy(), theta)
        np.testing.assert_array_equal(estimates[:, ago].numpy(), f)
    found = history.regression(models, estimates).numpy()
    for i in range(CLIENTS):
        away = np.stack([seen[k][0][i] - seen[0][0][i] for k in (1, 2, 3)])
        change = np.stack([seen[k][1][i] - seen[0][1][i] for k in (1, 2, 3)])
        np.testing.assert_allclose(found[i], change.T @ np.linalg.pinv(away.T), atol=1e-9)


@pytest.mark.parametrize("options", [{"length": 0}, {"length": 1.5}, {"rcond": -0.1}, {"rcond": 2}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(options))}="):
        DeploymentHistory(**options)
