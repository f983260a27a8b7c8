"""The batches on which a user's module and loss are tried: of unequal sizes, padded where clients go together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.trainer.agreement import AgreementTrial

SIZES = np.array([[3, 2, 4], [1, 2, 4], [2, 2, 0]])


def trial() -> AgreementTrial:
    samples = {"x": torch.arange(22.0).reshape(11, 2), "y": torch.arange(11)}
    return AgreementTrial(samples, torch.zeros(3, 5), SIZES, 5)


@pytest.mark.parametrize(("step", "clients"), [(0, 3), (1, 3), (2, 2)])
def test_padding_alone_has_the_weight_0(step: int, clients: int) -> None:
    batch = trial().batch(step, 0, clients, torch.float64)
    sizes = SIZES[:clients, step]
    assert batch["x"].shape == (clients, sizes.max(), 2)
    weight = batch.get("weight", torch.ones(clients, int(sizes.max()), dtype=torch.float64))
    assert weight.dtype == torch.float64
    assert weight.tolist() == [[1.0] * size + [0.0] * (sizes.max() - size) for size in sizes]
    assert ("weight" in batch) == (np.ptp(sizes) > 0)


def test_a_client_has_the_same_samples_alone_as_beside_others() -> None:
    for step in range(3):
        together = trial().batch(step, 0, 3, torch.float64)
        for client, size in enumerate(SIZES[:, step]):
            if size:
                alone = trial().batch_of_client(client, step, torch.float64)
                assert alone["x"].shape == (size, 2)
                assert "weight" not in alone
                for name in ("x", "y", "client", "key"):
                    value = together[name][client]
                    assert torch.equal(alone[name], value[:size] if name in ("x", "y") else value)


def test_clients_take_as_many_steps_as_they_have_batches() -> None:
    assert trial().steps.tolist() == [3, 3, 2]
    assert trial().active_row_counts() == [3, 3, 2]
