"""Arrays of one's own: lists, NumPy and tensors, files of three kinds, and whatever nobody could train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refused import Trap, refused
from safetensors.numpy import save_file

from fedsim import Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import ArrayFiles, Arrays
from fedsim.data.datasets.own.data import channel_statistics, standardise_features
from fedsim.data.partition import IID, Natural
from fedsim.models import Linear

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(40, 3)).astype(np.float32)
Y = np.where(X.sum(1) > 0, "warm", "cold")
CLIENTS = DRAW.choice([976906, 12, 7001], 40)
SAME = {
    "lists": (X.tolist(), Y.tolist(), CLIENTS.tolist()),
    "tensors": (torch.tensor(X), Y.tolist(), torch.tensor(CLIENTS)),
    "rows": (list(X), list(Y), list(CLIENTS)),
    "rows of tensors": (list(torch.tensor(X)), tuple(Y), [str(c) for c in CLIENTS]),
    "floats": (X.astype(np.float64), Y.astype(object), CLIENTS.astype(float)),
}


def npz(**changes: Any) -> str:
    arrays = {"x": X, "y": Y, "clients": CLIENTS} | changes
    np.savez("own.npz", **{name: value for name, value in arrays.items() if value is not None})
    return "own.npz"


def folder(**changes: Any) -> str:
    Path("own").mkdir()
    for name, value in ({"x": X, "y": Y, "clients": CLIENTS} | changes).items():
        np.save(f"own/{name}.npy", value, allow_pickle=True)
    return "own"


def safetensors(**changes: Any) -> str:
    save_file({"x": X, "y": (Y == "warm").astype(np.int64), "clients": CLIENTS} | changes, "own.safetensors")
    return "own.safetensors"


@pytest.mark.parametrize("kind", SAME)
def test_it_does_not_matter_what_arrays_are_made_of(kind: str) -> None:
    data, like = Arrays(*SAME[kind]), Arrays(X, Y, CLIENTS)
    assert torch.equal(data.train_x.float(), like.train_x)
    assert torch.equal(data.train_y, like.train_y)
    assert torch.equal(data.owners, like.owners)
    assert data.client_names == like.client_names == ("12", "7001", "976906")
    assert data.label_names == like.label_names == ("cold", "warm")


def test_every_client_holds_out_its_share_and_nothing_is_lost() -> None:
    data = Arrays(np.arange(40.0)[:, None], Y, CLIENTS, test_fraction=0.25)
    names = np.array(data.client_names)
    for owners, x, y in ((data.owners, data.train_x, data.train_y), (data.test_owners, data.test_x, data.test_y)):
        rows = x[:, 0].long()
        assert names[owners].tolist() == [str(c) for c in CLIENTS[rows]]
        assert np.array(data.label_names)[y].tolist() == Y[rows].tolist()
    assert sorted(torch.cat([data.train_x, data.test_x])[:, 0].tolist()) == list(range(40))
    sizes = np.array([(int(name) == CLIENTS).sum() for name in names])
    assert torch.bincount(data.test_owners).tolist() == (sizes // 4).tolist()
    other = Arrays(np.arange(40.0)[:, None], Y, CLIENTS, test_fraction=0.25, seed=1)
    assert not torch.equal(data.test_x, other.test_x)


def test_labels_of_any_values_keep_their_order_and_their_names() -> None:
    assert Arrays(np.eye(4), [10, 1, 2, 1], test_fraction=0).label_names == ("1", "2", "10")
    assert Arrays(np.eye(4), [10, -1, 9, -2], test_fraction=0).label_names == ("-2", "-1", "9", "10")
    assert Arrays(np.eye(4), [True, False, False, True], test_fraction=0).train_y.tolist() == [1, 0, 0, 1]
    assert Arrays(np.eye(4), [3.0, 7.0, 3.0, 7.0], test_fraction=0).label_names == ("3", "7")
    fixed = Arrays(np.eye(4), [3, 0, 3, 0], classes=5, test_fraction=0)
    assert (fixed.classes, fixed.train_y.tolist()) == (5, [3, 0, 3, 0])


def test_regression_keeps_numbers() -> None:
    data = Arrays(X, X[:, 0] * 2, task="regression", test_fraction=0)
    assert (data.loss, data.classes, data.label_names) == ("squared", None, None)
    assert torch.equal(data.train_y, torch.tensor(X[:, 0] * 2))
    assert Arrays(X, X[:, :2].tolist(), task="regression", test_fraction=0).train_y.shape == (40, 2)


def test_small_clients_leave_with_their_test_samples() -> None:
    clients, of_test = ["a"] * 30 + ["b"] * 9 + ["c"], ["c", "a", "b", "stranger"]
    data = Arrays(X, Y, clients, X[:4], Y[:4], of_test, min_samples=5)
    assert data.client_names == ("a", "b")
    assert len(data.train_x) == 39
    assert data.test_owners.tolist() == [0, 1]
    assert torch.equal(data.test_x, torch.tensor(X[1:3]))


def test_test_samples_of_others_test_everybody() -> None:
    data = Arrays(X, Y, CLIENTS, X[:4], Y[:4], ["n", "o", "n", "e"])
    assert data.test_owners is None
    assert len(data.test_x) == 4


@pytest.mark.parametrize("shape", [(40, 8, 6), (40, 8, 6, 3), (40, 3, 8, 6)])
def test_images_get_their_channels_first(shape: tuple[int, ...]) -> None:
    pixels = DRAW.integers(0, 256, shape, dtype=np.uint8)
    data = Arrays(pixels, Y, test_fraction=0, standardise=True)
    expected = pixels[:, None] if len(shape) == 3 else pixels if shape[1] == 3 else pixels.transpose(0, 3, 1, 2)
    assert torch.equal(data.train_x, torch.tensor(expected))
    seen = data.prepare(data.train_x, torch.float64)
    assert seen.mean((0, 2, 3)).abs().max() < 1e-6
    assert (seen.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-6


def test_standardised_features_have_mean_zero_and_variance_one_in_training() -> None:
    x = np.column_stack([X * 5 + 3, np.full(40, 7.0)])
    data = Arrays(x, Y, standardise=True, test_fraction=0.5)
    assert data.train_x.mean(0).abs().max() < 1e-6
    assert torch.allclose(data.train_x.std(0, correction=0), torch.tensor([1.0, 1, 1, 0]))
    assert data.test_x.mean(0).abs().max() > 1e-3


def test_a_feature_that_does_not_vary_becomes_zero_whatever_its_number() -> None:
    """The mean of equal numbers may be off by rounding, which a division by their deviation would blow up."""
    for constant in (0.1, 3.7, 1e6 / 3, 1 / 7):
        for count in range(2, 60):
            train, test = standardise_features(
                torch.full((count, 1), constant, dtype=torch.float64), torch.full((2, 1), 5.0)
            )
            assert not train.any()
            assert test is not None
            assert not test.any()


@pytest.mark.parametrize("write", [npz, folder, safetensors])
def test_files_of_all_kinds_hold_the_same(write: Any) -> None:
    data, like = ArrayFiles(write()), Arrays(X, Y, CLIENTS)
    for name in ("train_x", "train_y", "test_x", "test_y", "test_owners"):
        found = (
            getattr(data, name)
            if name != "train_x" or data.assignable_samples is None
            else data.inputs(data.assignable_samples)
        )
        found = found if name != "train_y" or data.assignable_samples is None else found[data.assignable_samples]
        assert torch.equal(found, getattr(like, name)), name
    assert data.client_names == like.client_names
    assert data.name == "own"


def test_files_bring_test_samples() -> None:
    data = ArrayFiles(npz(x=None, x_train=X, x_test=X[:5], y_test=Y[:5], clients_test=CLIENTS[:5]))
    assert torch.equal(data.test_x, torch.tensor(X[:5]))
    assert len(data.train_x) == 40


@pytest.mark.parametrize("partition", [Natural(), IID()])
@pytest.mark.parametrize("clients", [2, 3])
def test_a_mapped_file_trains_bit_for_bit_like_arrays_in_memory(partition: Any, clients: int) -> None:
    """What is held out, and whoever is left out, is left out of the table, and not of the file."""
    path, results = folder(), []
    for data in (ArrayFiles(path), Arrays(X, Y, CLIENTS)):
        simulation = Simulation(data, Linear, clients=clients, partition=partition, rounds=3)
        results.append(simulation.run())
        assert data.memory_mapped == (len(results) == 1)
    assert torch.equal(results[0].state.model, results[1].state.model)
    assert results[0].final["test_loss"] == results[1].final["test_loss"]
    assert np.load("own/x.npy").tobytes() == X.tobytes()


def test_a_mapped_file_is_not_read_into_memory(here: Path) -> None:
    sparse = np.lib.format.open_memmap("x.npy", mode="w+", dtype=np.uint8, shape=(40, 3, 4096, 4096))  # 2 GB of holes
    del sparse
    np.save("y.npy", Y)
    data = ArrayFiles(".", channels="first", test_fraction=0)
    assert data.train_x.shape == (40, 3, 4096, 4096)
    assert data.memory_mapped
    assert data.inputs(torch.tensor([3])).shape == (1, 3, 4096, 4096)
    refused(lambda: ArrayFiles(folder(), standardise=True), "standardise=true would read the whole file")


def nan(at: int, value: float) -> np.ndarray:
    x = X.copy()
    x[at, 1] = value
    return x


BAD_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "no samples": ({"x": []}, "x holds no samples"),
    "one number": ({"x": 3}, "x is 3, not one value per sample"),
    "one target": ({"y": 1.5}, "y is 1.5, not one value per sample"),
    "sparse": ({"x": torch.tensor(X).to_sparse()}, "x is a sparse tensor; give a dense one"),
    "ragged": ({"x": [[1.0, 2.0], [3.0]]}, "x is ragged: its entries differ in shape ([1] and [2])"),
    "ragged inside": ({"x": [[[1.0], [2.0, 3.0]], [[1.0], [2.0, 3.0]]]}, "x is ragged"),
    "NaN": ({"x": nan(7, np.nan)}, "sample 7 holds nan in x"),
    "infinity": ({"x": nan(39, -np.inf)}, "sample 39 holds -inf in x"),
    "words": ({"x": [["a"], ["b"]]}, "x holds words, but inputs must be numbers"),
    "complex": ({"x": X.astype(complex)}, "x holds complex numbers"),
    "whole numbers": ({"x": np.ones((40, 2), int)}, "set inputs to numbers, or to tokens"),
    "negative tokens": ({"x": -np.ones((40, 2), int), "inputs": "tokens"}, "x holds the token -1"),
    "floats as pixels": ({"inputs": "pixels"}, "inputs=pixels are bytes"),
    "floats as tokens": ({"inputs": "tokens"}, "inputs=tokens are whole numbers"),
    "nothing in a sample": ({"x": np.zeros((40, 0))}, "its samples are empty"),
    "channels nowhere": ({"x": np.zeros((40, 5, 6, 7), np.uint8)}, "set channels=first or last"),
    "channels anywhere": ({"x": np.zeros((40, 3, 6, 3), np.uint8)}, "set channels=first or last"),
    "no targets": ({"y": None}, "there are inputs but no targets; add y"),
    "too few targets": ({"y": Y[:39]}, "y holds 39 targets for 40 samples"),
    "3.7 is no label": ({"y": np.full(40, 3.7)}, "sample 0 has the target 3.7, which is not a label"),
    "no label": ({"y": [None, *Y[1:]]}, "sample 0 has no label"),
    "NaN label": ({"y": [1.0, np.nan] * 20}, "sample 1 has no label"),
    "one class": ({"y": ["cold"] * 40}, "all labels are 'cold'; classification needs at least two"),
    "one-hot labels": ({"y": np.eye(40)}, "a label is one value per sample"),
    "label beyond": ({"y": [0, 7] * 20, "classes": 3}, "sample 1 has the label '7', but classes=3 are 0 to 2"),
    "one class asked": ({"classes": 1}, "classes=1 is fewer than two classes"),
    "words to regress": ({"task": "regression"}, "the target 'warm' is not a number"),
    "NaN to regress": ({"y": nan(3, np.nan)[:, 1], "task": "regression"}, "the target of sample 3 is missing"),
    "too many clients": ({"clients": [*CLIENTS, 1]}, "clients has the shape [41] for 40 samples"),
    "a nameless client": ({"clients": ["a"] * 9 + [""] + ["b"] * 30}, "sample 9 has no client"),
    "no client": ({"clients": [None] + ["b"] * 39}, "sample 0 has no client"),
    "NaN for a client": ({"clients": np.where(CLIENTS == 12, np.nan, CLIENTS)}, "has no client"),
    "all too small": ({"min_samples": 30}, "min_samples=30 leaves no client"),
    "nobody to be small": ({"clients": None, "min_samples": 3}, "min_samples=3 needs samples that belong to clients"),
    "another test shape": (
        {"x_test": X[:, :2], "y_test": Y},
        "test inputs are [2] float32, training inputs [3] float32",
    ),
    "test pixels": ({"x_test": np.zeros((4, 3), np.uint8), "y_test": Y[:4]}, "test inputs are [3] uint8"),
    "test NaN": ({"x_test": nan(5, np.nan), "y_test": Y}, "test: sample 5 holds nan"),
    "test targets alone": ({"y_test": Y}, "add x_test"),
    "only tests are owned": ({"clients": None, "x_test": X, "y_test": Y, "clients_test": CLIENTS}, "give both"),
    "nothing left to train": ({"test_fraction": 1}, "test_fraction=1 leaves no training samples"),
    "two test sets": ({"x_test": X, "y_test": Y, "test_fraction": 0.2}, "the data already have test samples"),
    "nothing held out": ({"test_fraction": 0.01}, "test_fraction=0.01 holds out no sample"),
    "tokens to scale": ({"x": np.ones((40, 2), int), "inputs": "tokens", "standardise": True}, "these are tokens"),
    "a task": ({"task": "clustering"}, "task='clustering' is unknown"),
}


def test_long_doubles_are_read_in_double_precision() -> None:
    x = np.arange(1, 81, dtype=np.longdouble).reshape(40, 2) / 3
    assert torch.equal(Arrays(x, Y).train_x, Arrays(x.astype(np.float64), Y).train_x)


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays(case: str) -> None:
    changes, says = BAD_ARRAYS[case]
    arguments = {"x": X, "y": Y, "clients": CLIENTS} | changes
    if isinstance(arguments["x"], list) and len(arguments["x"]) == 2:
        arguments |= {"y": Y[:2], "clients": None}
    refused(lambda: Arrays(**arguments), says)


BAD_FILES: dict[str, tuple[Any, str]] = {
    "absent": (lambda: "nowhere.npz", "path=nowhere.npz does not exist"),
    "no archive": (lambda: str(Path("own.npz").write_text("PK no") and "own.npz"), "own.npz cannot be read"),
    "empty archive": (lambda: str(Path("own.npz").touch() or "own.npz"), "own.npz cannot be read"),
    "cut archive": (lambda: cut(npz()), "own.npz cannot be read"),
    "objects": (lambda: npz(y=np.array([Trap()] * 40, dtype=object)), "it holds objects, which are not unpickled"),
    "objects in npy": (lambda: folder(clients=np.array([Trap()], dtype=object)), "it holds objects"),
    "no x": (lambda: npz(x=None), "does not contain an array x; it has y, clients"),
    "other names": (lambda: str(np.savez("own.npz", data=X) or "own.npz"), "does not contain an array x; it has none"),
    "no y": (lambda: npz(y=None), "there are inputs but no targets"),
    "unequal": (lambda: npz(y=Y[:7]), "y holds 7 targets for 40 samples"),
    "NaN in a map": (lambda: folder(x=nan(11, np.nan)), "sample 11 holds nan in x"),
    "no safetensors": (lambda: str(Path("a.safetensors").write_text("{}") and "a.safetensors"), "cannot be read"),
    "cut safetensors": (lambda: cut(safetensors()), "own.safetensors cannot be read"),
    "another kind": (lambda: str(Path("own.csv").write_text("1,2") and "own.csv"), "must be FILE.npz"),
    "cut npy": (lambda: str(Path(cut(f"{folder()}/x.npy")).parent), "own cannot be read"),
    "empty folder": (lambda: str(Path("own").mkdir() or "own"), "does not contain an array x"),
}


def cut(path: str) -> str:
    Path(path).write_bytes(Path(path).read_bytes()[:-30])
    return path


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case: str) -> None:
    make, says = BAD_FILES[case]
    path = make()
    refused(lambda: ArrayFiles(path), says)


def test_all_clients_or_some_drawn_by_seed() -> None:
    data = Arrays(X, Y, CLIENTS)
    everybody = Simulation(data, Linear, clients="all")
    assert everybody.federation.client_names == ("12", "7001", "976906")
    some = [Simulation(data, Linear, clients=2, partition=Natural(seed=seed)) for seed in range(12)]
    assert {len(simulation.federation.client_names) for simulation in some} == {2}
    assert len({simulation.federation.client_names for simulation in some}) == 3
    for simulation in some:
        chosen = simulation.dataset
        of_test = {data.client_names[owner] for owner in data.test_owners}
        assert {chosen.client_names[owner] for owner in chosen.test_owners} == of_test & {
            *simulation.federation.client_names
        }
        for client, name in enumerate(simulation.federation.client_names):
            held = simulation.partition_tables[0].order[
                slice(*simulation.partition_tables[0].offsets[client : client + 2])
            ]
            assert {data.client_names[owner] for owner in data.owners[held]} == {name}
    with pytest.raises(ConfigError, match="clients=4, but the data set has 3 natural owners"):
        Simulation(data, Linear, clients=4)
    with pytest.raises(ConfigError, match="clients=all are those that come with the data"):
        Simulation(Arrays(X, Y), Linear, clients="all")
    with pytest.raises(ConfigError, match="clients='many' must be a whole number"):
        Simulation(data, Linear, clients="many")


def test_shuffled_clients_keep_their_names() -> None:
    simulation = Simulation(Arrays(X, Y, CLIENTS), Linear, clients=2, partition=Natural(shuffle=True), seeds=[0, 1, 2])
    data = simulation.dataset
    for table in simulation.partition_tables:
        for client, name in enumerate(table.names):
            held = table.order[slice(*table.offsets[client : client + 2])]
            assert {data.client_names[owner] for owner in data.owners[held]} == {name}
    assert simulation.federation.client_names is None  # other ones in every replicate


def test_channels_are_normalised_by_the_training_images_alone() -> None:
    images = torch.arange(3 * 2 * 4, dtype=torch.uint8).reshape(3, 2, 2, 2)
    mean, std = channel_statistics(images, torch.tensor([0, 2]))
    chosen = images[[0, 2]].double() / 255
    assert mean == pytest.approx(chosen.mean((0, 2, 3)).tolist())
    assert std == pytest.approx(chosen.std((0, 2, 3), correction=0).tolist())


def test_labels_of_positions_are_trained_on_where_there_is_one() -> None:
    """Against the mean of PyTorch's cross-entropy over the labelled positions of each sample."""
    draw = np.random.default_rng(0)
    x, y = draw.random((12, 6), dtype=np.float32), draw.integers(0, 4, (12, 5))
    y[:, 3:] = -100
    y[0, 0] = 3
    data = Arrays(x, y, task="positions", test_fraction=0)
    assert data.classes == 4
    assert data.train_y is not None
    assert data.train_y.tolist() == y.tolist()
    assert data.loss == "cross_entropy"
    model = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Unflatten(1, (5, 4)))
    expected = torch.nn.functional.cross_entropy(
        model(torch.from_numpy(x))[:, :3].reshape(-1, 4), data.train_y[:, :3].reshape(-1)
    )
    result = Simulation(data, model, clients=3, rounds=1).run()
    assert result.history[0]["train_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (
            [1, 0],
            {},
            r"task=positions needs whole numbers \[N, …\], one per position, but y holds int64 of shape \[2\]",
        ),
        ([[0.5, 1], [0, 1]], {}, r"task=positions needs whole numbers .* y holds float64 of shape \[2, 2\]"),
        ([[0, 1], [0, -1]], {}, r"sample 1 has a label outside 0 to 1; a position without a label is -100"),
        ([[0, 1], [0, 2]], {"classes": 2}, r"sample 1 has a label outside 0 to 1"),
        ([[0, 1], [-100, -100]], {}, r"no position of sample 1 has a label"),
    ],
)
def test_bad_labels_of_positions_are_named(y: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Arrays(np.zeros((2, 3), np.float32), np.array(y), task="positions", test_fraction=0, **options)


def test_test_labels_have_as_many_positions() -> None:
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ConfigError, match=r"test targets are \[3\] int64, training targets \[2\]"):
        Arrays(x, np.array([[0, 1], [1, 0]]), x_test=x, y_test=np.zeros((2, 3), np.int64), task="positions")
