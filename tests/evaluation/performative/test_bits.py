"""The same numbers wherever in memory they lie: distances to reference points, and test losses, are the same bits.

Matrix products of MKL sum in another order where a factor begins elsewhere, and NumPy's arrays begin anywhere.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch

from fedsim import Simulation
from fedsim.core import Federation
from fedsim.data.datasets import Dataset, GaussianMean
from fedsim.evaluation.performative.solvers import find_zero, minimise
from fedsim.models import Linear, Mean
from fedsim.shift import Location


def moved(values: np.ndarray, places: int) -> np.ndarray:
    """The same array, so many of its entries behind a multiple of 64 bytes."""
    room = np.empty(values.nbytes + 128, np.uint8)
    begin = -room.ctypes.data % 64 + places * values.itemsize
    copied = room[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
    copied[...] = values
    return copied


def test_a_newton_step_is_the_same_bits_every_time():
    """LAPACK's default for least squares gave up to 56 answers in 300 calls."""
    generator = torch.Generator().manual_seed(0)
    slope = torch.randn(25, 25, generator=generator, dtype=torch.float64)
    start = torch.zeros(25, dtype=torch.float64)
    target, found, junk = torch.randn(25, generator=generator, dtype=torch.float64), set(), []
    for size in range(40):
        junk.append(np.empty(17 * size + 1))  # what is free lies elsewhere in every turn
        zero = find_zero(lambda x: slope @ x - target, lambda x: slope, start, None, 1e-6)
        assert zero is not None
        found.add(zero.numpy().tobytes())
    assert len(found) == 1


def test_a_minimum_does_not_depend_on_where_scipys_arrays_begin(monkeypatch: pytest.MonkeyPatch):
    genuine, place, found = scipy.optimize.minimize, 0, set()
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((7, 12), (7,)))

    def elsewhere(function, start, **options):
        return genuine(lambda point: function(moved(point, place)), moved(start, place), **options)

    monkeypatch.setattr(scipy.optimize, "minimize", elsewhere)
    for place in (0, 1, 3):  # noqa: B007 (read by `elsewhere`)
        least = minimise(lambda x: (a @ x - b).square().sum(), torch.ones(12, dtype=torch.float64), (-9.0, 9.0))
        assert least is not None
        found.add(least[0].numpy().tobytes())
    assert len(found) == 1


def test_reference_points_do_not_depend_on_where_weights_begin(monkeypatch: pytest.MonkeyPatch):
    set_up, place, found = Federation.__post_init__, 0, set()

    def elsewhere(federation):
        set_up(federation)
        federation.client_weights = moved(federation.client_weights, place)

    monkeypatch.setattr(Federation, "__post_init__", elsewhere)
    for place in (0, 1, 2):  # noqa: B007 (read by `elsewhere`)
        run = Simulation(GaussianMean(clients=13), Mean, clients=13, shift=Location())
        found.add(b"".join(run.references[name].numpy().tobytes() for name in ("distance_to_ps", "distance_to_po")))
    assert len(found) == 1


def test_test_losses_do_not_depend_on_where_the_array_begins():
    draw = np.random.default_rng(0)
    x = draw.standard_normal((77, 13)).astype(np.float32)
    y, models, found = torch.tensor(x.sum(1)), torch.tensor(draw.standard_normal((1, 14)), dtype=torch.float32), set()
    for place in range(16):
        data = Dataset("regression", torch.tensor(x), y, torch.from_numpy(moved(x, place)), y, loss="squared")
        run = Simulation(data, Linear, clients=3)
        found.add(run.evaluator(models).metrics["test_loss"].tobytes())
    assert len(found) == 1
