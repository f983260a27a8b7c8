"""Performative power and the stability gap of evaluated models, in closed form."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset, Digits, GaussianMean
from fedsim.local import SGD
from fedsim.models import Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.shift import Contribution, Location, Response

QUIET = Tracking(progress="none", tensorboard=False)
BOTH = ["power", "stability"]
EPSILONS, MEANS = np.array([0.5, -0.4, 0.8]), [1.0, -2.0, 4.0]


def game(**options) -> Simulation:
    options = {
        "evaluation": EvaluationOptions(every=1, diagnostics=BOTH),
        "shift": Location(epsilons=list(EPSILONS)),
    } | options
    return Simulation(
        GaussianMean(clients=3, means=MEANS), functools.partial(Mean, start=2.0), clients=3, rounds=3, seeds=(0, 1),
        local=SGD(lr=0.3, steps=1, batch_size=5), execution=Execution(dtype="float64"), **options,
    )  # fmt: skip


def test_in_mean_estimation_both_are_known() -> None:
    """Power Σ w_i |ε_i| |θ|; the gap |θ − (m̄ + ε̄ θ)| = (1 − ε̄) |θ − θ^PS|, whatever the noise of the run."""
    evaluation = EvaluationOptions(every=1, diagnostics=BOTH, of=["global", "client_mean"])
    history = game(evaluation=evaluation).run(tracking=QUIET).history
    assert len(history) == 8
    stable = 1.0 / (1 - EPSILONS.mean())
    for row in history:
        theta = {stable + sign * row["distance_to_ps"] for sign in (-1, 1)}
        assert any(row["performative_power"] == pytest.approx(np.abs(EPSILONS).mean() * abs(t)) for t in theta)
        assert row["stability_gap"] == pytest.approx((1 - EPSILONS.mean()) * row["distance_to_ps"], abs=1e-8)
        assert row["client_mean_stability_gap"] >= 0
    assert history[0]["performative_power"] == pytest.approx(2 * np.abs(EPSILONS).mean())


def test_the_gap_is_zero_at_the_stable_point() -> None:
    first = game(start="ps").run(tracking=QUIET).history[0]
    assert first["stability_gap"] == pytest.approx(0, abs=1e-7)


def test_targets_that_move_count_and_clients_may_hold_unequally_much(play) -> None:
    """y − γ_i θᵀx of unequal clients, by hand; padded samples count for nothing."""
    draw = np.random.default_rng(0)
    x, sizes, gammas = draw.standard_normal((10, 2)), [2, 5, 3], [0.5, 1.0, 2.0]
    owners = np.repeat(range(3), sizes)
    data = Dataset("few", torch.as_tensor(x), torch.as_tensor(x.sum(1)), loss="squared", owners=torch.as_tensor(owners))
    simulation = Simulation(data, functools.partial(Linear, bias=False), clients=3, shift=Response(gammas), rounds=2,
                            local=SGD(lr=0.1, steps=1, batch_size=None), execution=Execution(dtype="float64"),
                            evaluation=EvaluationOptions(every=1, diagnostics=["power"]))  # fmt: skip
    *_, last = play(simulation)
    theta = last.after.model[0].numpy()
    expected = np.mean([g * np.abs(x[owners == i] @ theta).mean() for i, g in enumerate(gammas)])
    found = simulation.run(tracking=QUIET).history[-1]
    assert found["performative_power"] == pytest.approx(expected)
    assert "stability_gap" not in found


def test_nobody_pays_for_what_is_not_asked() -> None:
    assert (
        not {"performative_power", "stability_gap"}
        & game(evaluation=EvaluationOptions()).run(tracking=QUIET).final.keys()
    )


def test_what_has_no_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shift=none data do not react to the model"):
        game(shift=None)
    evaluation = EvaluationOptions(diagnostics=["power"])
    with pytest.raises(ConfigError, match=r"changes the weights of stored samples"):
        Simulation(Digits(), Linear, clients=3, shift=Contribution(form="loss"), evaluation=evaluation)
    with pytest.raises(ConfigError, match="diagnostics='gap'"):
        EvaluationOptions(diagnostics=["gap"])
