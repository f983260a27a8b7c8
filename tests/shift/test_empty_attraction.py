"""A client that lacks the only group which the model attracts keeps what it holds: no 0/0."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.data.datasets import Dataset
from fedsim.local import SGD
from fedsim.models import Mean
from fedsim.shift import Contribution


@pytest.mark.parametrize("theta", [-1.0, 1.0])
def test_fractions_at_the_edge(theta):
    """f = ½ + ½θ: at θ = −1 nobody is of class 0. Client 0 holds class 0, client 1 class 1, client 2 both."""
    owners = np.repeat(np.arange(3), 4)
    y = torch.as_tensor([0] * 4 + [1] * 4 + [0, 0, 1, 1])
    data = Dataset("two", torch.randn(12, 1), y, classes=2, loss="inner_product", owners=torch.as_tensor(owners))
    shift = Contribution("linear")
    simulation = Simulation(
        data, Mean, clients=3, shift=shift, local=SGD(steps=2, batch_size=4), rounds=2,
        execution=Execution(dtype="float64"),
    )  # fmt: skip
    deployed = torch.tensor([theta], dtype=torch.float64)
    found = [simulation.shift.fractions({"row": torch.tensor(row)}, deployed).tolist() for row in range(3)]
    assert found == [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0] if theta < 0 else [1.0, 0.0]]
    assert np.isfinite(simulation.run().final["train_loss"][0])
