"""Where training starts, and whom it weighs how."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim import Simulation
from fedsim.availability import UniformK
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset, Digits, GaussianMean
from fedsim.local import SGD
from fedsim.models import Linear, Mean
from fedsim.shift import Location
from fedsim.strategies import PFedAvg


def gaussian(start: str = "random", scheme: str = "full", **options: object) -> Simulation:
    data, strategy = GaussianMean(clients=25, weight_variance=0.01), PFedAvg(scheme)
    return Simulation(data, Mean, clients=25, shift=Location(variance=0.1), start=start, strategy=strategy, **options)


def test_unequal_weights_enter_means_sensitivities_and_the_stable_point() -> None:
    simulation = gaussian()
    weights = simulation.federation.data_fractions[:25]
    assert weights.sum() == pytest.approx(1)
    assert weights.max() > 0.1
    means, epsilons = simulation.dataset.means.numpy(), simulation.shift.epsilons.numpy()
    assert weights @ means == pytest.approx(10)
    assert weights @ epsilons == pytest.approx(0.9)
    assert float(simulation.references["distance_to_ps"]) == pytest.approx(100)  # Σ w_i m_i / (1 − Σ w_i ε_i)
    plain = GaussianMean(clients=25, weight_variance=0)
    assert np.allclose(plain.weights, 1 / 25)


def test_the_weights_have_the_variance_that_is_asked_for() -> None:
    drawn = np.concatenate([GaussianMean(clients=25, weight_variance=0.005, seed=s).weights for s in range(400)])
    assert drawn.var() == pytest.approx(0.005, rel=0.1)
    with pytest.raises(ConfigError, match=r"weight_variance=0\.04.*clients=25"):
        GaussianMean(clients=25, weight_variance=0.04)


def test_training_can_start_at_the_stable_point() -> None:
    simulation = gaussian("ps", rounds=1, seeds=[0, 1], local=SGD(lr=1e-9))
    result = simulation.run()
    first = [row["distance_to_ps"] for row in result.history if row["round"] == 0]
    assert max(first) < 1e-4
    assert torch.allclose(result.state.model, torch.full((2, 1), 100.0), atol=1e-3)
    assert next(row["distance_to_ps"] for row in gaussian(rounds=1).run().history) > 50


def test_a_start_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"start=ps.*shift\.references"):
        Simulation(Digits(), Linear, clients=4, start="ps").run()
    with pytest.raises(ConfigError, match="start='po'"):
        Simulation(Digits(), Linear, clients=4, start="po")


def test_scheme_two_multiplies_models_by_the_weights_drawn() -> None:
    simulation = gaussian("ps", "II", rounds=1, availability=UniformK(20), local=SGD(lr=1e-9))
    present = simulation.availability.counts(0)[0] > 0
    expected = 100 * simulation.federation.data_fractions[present].sum() * 25 / 20  # need not sum to one
    assert float(simulation.run().state.model) == pytest.approx(expected, rel=1e-4)


def test_training_can_start_at_the_best_model_on_data_that_have_not_answered() -> None:
    """Σ w_i m_i, which is 10, where the stable point is at 100; batches are moved from the first step on."""
    simulation = gaussian("erm", rounds=1, seeds=[0, 1], local=SGD(lr=1e-9))
    assert torch.allclose(simulation.initial_state().model, torch.full((2, 1), 10.0), atol=1e-5)
    first = [row["distance_to_ps"] for row in simulation.run().history if row["round"] == 0]
    assert first == pytest.approx([90.0, 90.0], abs=1e-4)
    with pytest.raises(ConfigError, match=r"start=erm, but .*ridge"):
        Simulation(flat(), Linear, clients=2, start="erm").run()


def flat() -> Dataset:
    """A feature that is always 0: any weight of it is as good."""
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    x[:, 1] = 0
    return Dataset("flat", x, torch.arange(40) % 2, classes=2)
