"""What is displaced by how much: paths against their formulas, movements against a loop over samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.core import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.datasets import Dataset, GaussianMean
from fedsim.data.drift import Abrupt, ByClient, Cyclic, Linear, RandomWalk

T = np.arange(12)
CPU = torch.device("cpu")


def federation(clients=4, seeds=(0, 1), fractions=None):
    sizes = np.full(len(seeds) * clients, 10)
    return Federation(seeds, clients, sizes, fractions, CPU, torch.float64)


def prepared(drift, dataset=None, **options):
    drift.setup(federation(**options), dataset or GaussianMean(4))
    return drift


def displacements(drift, replicate=0, client=0):
    return drift.displacement(T, np.full(len(T), replicate), np.full(len(T), client))


def test_paths_follow_their_formulas():
    assert np.array_equal(displacements(prepared(Linear([0.5, -2.0])), 1), -2.0 * T)
    assert np.allclose(displacements(prepared(Cyclic(3.0, 8.0, 0.25))), 3 * np.cos(2 * np.pi * T / 8), atol=1e-14)
    assert displacements(prepared(Abrupt(2.0, [6, 3]))).tolist() == [0] * 3 + [2] * 3 + [4] * 6
    assert displacements(prepared(Abrupt(2.0, [6, 3], alternate=True))).tolist() == [0] * 3 + [2] * 3 + [0] * 6
    rounds = [0, 3, 5, 20]
    staggered = prepared(ByClient(1.5, rounds_of_clients=rounds))
    for client, first in enumerate(rounds):
        assert displacements(staggered, client=client).tolist() == [1.5 * (t >= first) for t in T]


def test_staggered_changes_are_spread_from_the_first_to_the_last_round():
    drift = prepared(ByClient(first=10, last=40))
    rounds = np.arange(50)
    zero = np.zeros(50, dtype=int)
    changed = [int((drift.displacement(rounds, zero, zero + client) == 0).sum()) for client in range(4)]
    assert sorted(changed) == [10, 20, 30, 40]
    assert changed != sorted(changed)


def test_a_random_walk_does_not_depend_on_the_order_of_questions():
    forwards, backwards = prepared(RandomWalk(0.3)), prepared(RandomWalk(0.3))
    far = backwards.displacement(np.array([40]), np.zeros(1, int), np.zeros(1, int))
    one_by_one = [forwards.displacement(np.array([t]), np.zeros(1, int), np.zeros(1, int))[0] for t in range(41)]
    assert one_by_one[0] == 0
    assert far[0] == one_by_one[-1]
    assert displacements(backwards).tolist() == one_by_one[: len(T)]
    assert not np.array_equal(displacements(backwards, 1)[1:], displacements(backwards, 0)[1:])


def test_an_autoregressive_path_forgets():
    walk, pulled = prepared(RandomWalk(1.0)), prepared(RandomWalk(1.0, reversion=0.4))
    steps = np.diff(displacements(walk))
    expected = [0.0]
    for step in steps:
        expected.append(0.6 * expected[-1] + step)
    assert np.allclose(displacements(pulled), expected, atol=1e-12)


def test_factors_scale_the_path_of_each_client():
    given = prepared(Linear(2.0, factors=[0.0, 1.0, -1.0, 0.5]))
    assert [displacements(given, client=i)[3] for i in range(4)] == [0.0, 6.0, -6.0, 3.0]
    drawn = prepared(Linear(1.0, spread=0.5))
    factors = [displacements(drawn, client=i)[1] for i in range(4)]
    assert len(set(factors)) == 4
    assert all(0.5 <= factor <= 1.5 for factor in factors)


def batch_of(shape, classes=None, c=2, size=5):
    draw = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(c, size, *shape, generator=draw, dtype=torch.float64)}
    if classes is not None:
        batch["y"] = torch.randint(classes, (c, size), generator=draw)
    return batch


def stored(shape, classes=None, y=None):
    n = 12
    labels = torch.arange(n) % classes if classes else y
    return Dataset("stored", torch.zeros(n, *shape), labels, classes=classes, loss=None if classes else "squared")


def moved(drift, dataset, batch, amounts=(0.5, -1.0), fractions=None):
    drift = prepared(drift, dataset, fractions=fractions)
    zero = np.zeros(len(amounts), dtype=int)
    return drift.displaced(batch, np.array(amounts), zero, np.arange(len(amounts)))


def test_features_move_along_the_direction():
    batch = batch_of((3,))
    result = moved(Linear(direction=[1.0, 0.0, -2.0]), stored((3,), 2), batch)["x"]
    for client, amount in enumerate((0.5, -1.0)):
        for j in range(5):
            expected = batch["x"][client, j] + amount * torch.tensor([1.0, 0.0, -2.0])
            assert torch.allclose(result[client, j], expected, atol=1e-15)


def test_vectors_rotate_in_their_plane():
    batch = batch_of((4,))
    result = moved(Linear(moves="rotation", plane=[3, 1]), stored((4,), 2), batch, (90.0, 30.0))["x"]
    turned = batch["x"].clone()
    turned[0, :, 3], turned[0, :, 1] = -batch["x"][0, :, 1], batch["x"][0, :, 3]
    assert torch.allclose(result[0], turned[0], atol=1e-15)
    assert torch.allclose(result[1].norm(dim=1), batch["x"][1].norm(dim=1))
    assert torch.equal(result[:, :, [0, 2]], batch["x"][:, :, [0, 2]])


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_a_quarter_turn_of_an_image_is_rot90(quarters):
    batch = batch_of((2, 6, 6))
    result = moved(Linear(moves="rotation"), stored((2, 6, 6), 2), batch, (90.0 * quarters, 0.0))["x"]
    assert torch.allclose(result[0], torch.rot90(batch["x"][0], quarters, (-2, -1)), atol=1e-12)
    assert torch.allclose(result[1], batch["x"][1], atol=1e-12)


def test_an_image_that_is_not_square_turns_upside_down():
    batch = batch_of((1, 4, 7))
    result = moved(Linear(moves="rotation"), stored((1, 4, 7), 2), batch, (180.0, 180.0))["x"]
    assert torch.allclose(result, batch["x"].flip(-2, -1), atol=1e-12)


def test_classes_are_renamed_cyclically_and_real_targets_move():
    batch = batch_of((3,), classes=4)
    result = moved(Linear(moves="targets"), stored((3,), 4), batch, (1.4, -0.6))["y"]
    assert torch.equal(result[0], (batch["y"][0] + 1) % 4)
    assert torch.equal(result[1], (batch["y"][1] + 3) % 4)
    real = {"x": batch["x"], "y": torch.zeros(2, 5, dtype=torch.float64)}
    shifted = moved(Linear(moves="targets"), stored((3,), y=torch.zeros(12)), real, (1.4, -0.6))["y"]
    assert torch.equal(shifted, torch.tensor([[1.4], [-0.6]], dtype=torch.float64).expand(2, 5))


def test_label_fractions_are_tilted_and_weights_have_mean_one():
    fractions = np.array([[[0.5, 0.3, 0.2], [0.0, 0.25, 0.75]]])
    batch = {"x": torch.zeros(2, 3, 1, dtype=torch.float64), "y": torch.arange(3).expand(2, 3)}
    weight = moved(Linear(moves="labels"), stored((1,), 3), batch, (0.7, -2.0), fractions)["weight"].numpy()
    for client, amount in enumerate((0.7, -2.0)):
        shares = fractions[0, client] * np.exp(amount * np.array([-1.0, 0.0, 1.0]))
        assert np.allclose(fractions[0, client] * weight[client], shares / shares.sum(), atol=1e-15)
    padded = batch | {"weight": torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)}
    masked = moved(Linear(moves="labels"), stored((1,), 3), padded, (0.7, -2.0), fractions)["weight"].numpy()
    assert np.array_equal(masked, weight * padded["weight"].numpy())


def test_samples_of_tokens_have_real_weights():
    fractions = np.array([[[0.5, 0.3, 0.2], [0.0, 0.25, 0.75]]])
    batch = {"x": torch.zeros(2, 3, 4, dtype=torch.int64), "y": torch.arange(3).expand(2, 3)}
    weight = moved(Linear(moves="labels"), stored((4,), 3), batch, (0.7, -2.0), fractions)["weight"]
    assert weight.is_floating_point()
    assert 0 < weight[0, 0] < 1


def test_nothing_moves_by_zero():
    batch = batch_of((3,), classes=2)
    for moves in ("features", "rotation", "targets", "labels"):
        fractions = np.full((1, 2, 2), 0.5)
        assert moved(Linear(moves=moves), stored((3,), 2), batch, (0.0, 0.0), fractions) is batch


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Abrupt(at=[]), r"at=\[\] names no round in which the data change"),
        (lambda: Linear(plane=[1, 1]), r"plane=\[1, 1\] must be two different features"),
        (lambda: ByClient(first=5, last=4), r"last=4 must not be before first=5"),
        (lambda: prepared(ByClient(rounds_of_clients=[1])), r"rounds_of_clients has 1 entries, but clients=4"),
        (lambda: prepared(Linear(factors=[1.0])), r"drift\.factors has 1 entries, but clients=4"),
        (lambda: prepared(Linear(direction=[1.0, 1.0])), r"drift\.direction has 2 entries, but inputs .* have 1"),
        (lambda: prepared(Linear(moves="rotation")), r"drift\.plane=\[0, 1\] names feature 1, but inputs .* have 1"),
        (lambda: prepared(Linear(moves="targets")), r"drift\.moves=targets needs one class or real-valued targets"),
        (lambda: prepared(Linear(moves="labels")), r"drift\.moves=labels changes the fractions of classes of stored"),
    ],
)
def test_what_cannot_drift_is_refused_in_a_sentence(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
