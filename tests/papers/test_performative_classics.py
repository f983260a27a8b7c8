"""Facts behind the classics of performative prediction: where exact retraining of a strategic classifier ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.core.errors import MissingDataError
from fedsim.data.datasets import Dataset, GiveMeSomeCredit
from fedsim.local import SGD
from fedsim.models import Linear
from fedsim.shift import Strategic

DRAW = np.random.default_rng(5)
FEATURES = DRAW.normal(0.3, 1.0, (200, 3))
LABELS = (FEATURES @ [0.5, -1.0, 0.3] + DRAW.logistic(size=200) > 0).astype(float)
MOVING = [0, 2]


def minimiser(x: np.ndarray, y: np.ndarray, ridge: float, penalised_intercept: bool) -> np.ndarray:
    """[d + 1] weights and intercept of logistic regression, by Newton's method with halved steps."""
    x = np.column_stack([x, np.ones(len(x))])
    penalty = np.full(x.shape[1], ridge)
    penalty[-1] *= penalised_intercept

    def value(w: np.ndarray) -> float:
        return float(np.mean(np.logaddexp(0, x @ w) - y * (x @ w)) + 0.5 * penalty @ w**2)

    w = np.zeros(x.shape[1])
    for _ in range(200):
        p = 1 / (1 + np.exp(-x @ w))
        gradient = x.T @ (p - y) / len(x) + penalty * w
        step = np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x / len(x) + np.diag(penalty), gradient)
        while value(w - step) > value(w) + 1e-15 and np.linalg.norm(step) > 1e-13:
            step = step / 2
        w = w - step
        if np.linalg.norm(step) < 1e-11:
            break
    return w


def gaps(x: np.ndarray, y: np.ndarray, moving: list[int], epsilon: float, penalised: bool, count: int) -> np.ndarray:
    """[count] distances between consecutive models of exact retraining, from the minimiser on data at rest."""
    ridge = 1 / len(x)
    model = minimiser(x, y, ridge, penalised)
    distances = []
    for _ in range(count):
        shifted = x.copy()
        shifted[:, moving] -= epsilon * model[moving]
        following = minimiser(shifted, y, ridge, penalised)
        distances.append(np.linalg.norm(following - model))
        model = following
    return np.array(distances)


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 100.0, 1000.0])
def test_an_intercept_without_penalty_absorbs_the_shift_in_one_retraining(epsilon: float) -> None:
    """The first step is ε‖θ_S‖², of the intercept alone; from then on nothing moves."""
    first, *rest = gaps(FEATURES, LABELS, MOVING, epsilon, False, 4)
    weights = minimiser(FEATURES, LABELS, 1 / 200, False)[MOVING]
    assert first == pytest.approx(epsilon * float(weights @ weights), rel=1e-8)
    assert max(rest) < 1e-7 * max(1.0, first)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 100.0])
def test_the_stable_point_differs_from_the_minimiser_by_the_intercept(epsilon: float) -> None:
    """Solved for by fedsim, without a penalty: the minimiser on data at rest, its intercept larger by ε‖θ_S‖²."""
    data = Dataset(
        "applicants", torch.as_tensor(FEATURES), torch.as_tensor(LABELS).long(), classes=2, loss="logistic",
        strategic=tuple(MOVING),
    )  # fmt: skip
    simulation = Simulation(
        data, Linear, clients=1, local=SGD(lr=0.1, steps=1, batch_size=None), rounds=1,
        shift=Strategic(epsilon, spread=0.0, deploy="round", references="always"), execution=Execution(dtype="float64"),
    )  # fmt: skip
    stable = simulation.references["distance_to_ps"][0].numpy()
    expected = minimiser(FEATURES, LABELS, 0.0, False)
    expected[-1] += epsilon * expected[MOVING] @ expected[MOVING]
    assert stable == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_whether_retraining_on_credit_data_converges_depends_on_the_penalty_of_the_intercept() -> None:
    """Perdomo et al.'s data and ridge 1/n. Penalised, the steps contract to less than a tenth at ε = 100, and do not
    fall at ε = 1000; not penalised, there is a single step at both."""
    try:
        data = GiveMeSomeCredit()
    except MissingDataError as error:
        pytest.skip(str(error))
    x, y = data.train_x.double().numpy(), data.train_y.double().numpy()
    moving = [0, 5, 7]
    penalised = gaps(x, y, moving, 100.0, True, 4)
    assert (penalised[1:] < 0.1 * penalised[:-1]).all()
    assert gaps(x, y, moving, 1000.0, True, 6)[-3:].min() > 0.1
    for epsilon in (100.0, 1000.0):
        assert gaps(x, y, moving, epsilon, False, 3)[1:].max() < 1e-9 * epsilon
