"""Digits by writer from files in the published layout: examples/WRITER/{pixels, label}."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from fedsim import Simulation
from fedsim.core import ConfigError, MissingDataError
from fedsim.data.datasets import FEMNIST
from fedsim.data.datasets.emnist import ALL_CHARACTERS_FILE, DIGITS_FILE, EMNIST
from fedsim.data.partition import Natural
from fedsim.evaluation.personal import Personal
from fedsim.models import MLP

SIZES = {"f0000_14": (12, 3), "f0001_41": (5, 0), "f0003_42": (9, 2), "f0007_10": (0, 1)}


@pytest.fixture
def written(tmp_path):
    """The two files in the true layout; the images of each writer and part."""
    h5py = pytest.importorskip("h5py")
    draw, images = np.random.default_rng(0), {}
    (tmp_path / "emnist").mkdir()
    for part, name in enumerate(("train", "test")):
        with h5py.File(tmp_path / DIGITS_FILE.format(name), "w") as file:
            for writer, sizes in SIZES.items():
                if part and not sizes[1]:
                    continue
                pixels = draw.random((sizes[part], 28, 28), dtype=np.float32)
                labels = draw.integers(0, 10, sizes[part], dtype=np.int32)
                group = file.create_group(f"examples/{writer}")
                group.create_dataset("pixels", data=pixels)
                group.create_dataset("label", data=labels)
                images[writer, name] = pixels, labels
    return tmp_path, images


def test_every_writer_is_a_client_with_its_own_images(written):
    root, images = written
    dataset = EMNIST(root=str(root))
    writers = ["f0000_14", "f0001_41", "f0003_42"]  # the fourth has no training images
    assert dataset.shape == (1, 28, 28)
    assert dataset.train_x.dtype == torch.uint8
    for owner, writer in enumerate(writers):
        own = dataset.owners == owner
        seen = dataset.prepare(dataset.train_x[own], torch.float64)[:, 0]
        np.testing.assert_allclose(seen, images[writer, "train"][0], atol=0.5 / 255 + 1e-6)
        assert dataset.train_y[own].tolist() == images[writer, "train"][1].tolist()
    expected = np.concatenate([images["f0000_14", "test"][1], images["f0003_42", "test"][1]])
    assert dataset.test_y.tolist() == expected.tolist()
    assert dataset.test_owners.tolist() == [0] * 3 + [2] * 2


def test_writers_are_drawn_by_the_seed_and_bring_their_own_test_images(written):
    root, images = written
    sizes = {len(y): writer for writer, y in ((w, images[w, "train"][1]) for w in SIZES) if len(y)}
    met = set()
    for seed in range(30):
        dataset, again = (EMNIST(1, str(root), seed) for _ in range(2))
        assert torch.equal(dataset.train_x, again.train_x)
        writer = sizes[len(dataset.train_y)]
        met.add(writer)
        assert (0 if dataset.test_y is None else len(dataset.test_y)) == SIZES[writer][1]
    assert met == set(sizes.values())
    with pytest.raises(ConfigError, match=r"writers=4 exceeds the 3 writers"):
        EMNIST(4, str(root))


def test_it_trains_by_writer_with_validation_samples_of_their_own(written):
    simulation = Simulation(
        EMNIST(root=str(written[0])), MLP, clients=3, partition=Natural(validation=0.2), rounds=1,
        personal=Personal(over="all"),
    )  # fmt: skip
    assert simulation.federation.num_samples.tolist() == [10, 4, 8]
    assert np.isfinite(simulation.run().history[-1]["localized_validation_accuracy"])


def test_what_is_absent_or_damaged_is_said(written, monkeypatch, tmp_path):
    h5py = pytest.importorskip("h5py")
    with pytest.raises(MissingDataError, match=r"fed_emnist_digitsonly_train\.h5.*FEDSIM_DATA"):
        EMNIST(root=str(tmp_path / "nowhere"))
    path = written[0] / DIGITS_FILE.format("test")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(MissingDataError, match=r"fed_emnist_digitsonly_test\.h5"):
        EMNIST(root=str(written[0]))
    with h5py.File(path, "w") as file:
        file.create_dataset("examples/f0000_14/pixels", data=np.full((2, 28, 28), 255.0))
        file.create_dataset("examples/f0000_14/label", data=np.zeros(2, np.int32))
    with pytest.raises(MissingDataError, match=r"writer f0000_14; expected \[n, 28, 28\] in \[0, 1\]"):
        EMNIST(root=str(written[0]))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingDataError, match=r"pip install 'fedsim-torch\[emnist\]'"):
        EMNIST(root=str(written[0]))


def test_all_characters_have_62_classes(tmp_path):
    h5py = pytest.importorskip("h5py")
    (tmp_path / "emnist").mkdir()
    for part in ("train", "test"):
        with h5py.File(tmp_path / ALL_CHARACTERS_FILE.format(part), "w") as file:
            for writer, labels in {"f1": [61, 0, 35], "f0": [9]}.items():
                file[f"examples/{writer}/pixels"] = np.ones((len(labels), 28, 28), np.float32)
                file[f"examples/{writer}/label"] = np.array(labels)
    dataset = FEMNIST("all", root=str(tmp_path))
    assert (dataset.classes, dataset.train_y.tolist()) == (62, [9, 61, 0, 35])
    assert dataset.client_names == ("f0", "f1")
    with h5py.File(tmp_path / ALL_CHARACTERS_FILE.format("train"), "a") as file:
        file["examples/f1/label"][0] = 62
    with pytest.raises(MissingDataError, match=r"dataset=femnist: .* labels 0 to 61"):
        FEMNIST(root=str(tmp_path))
    with pytest.raises(MissingDataError, match="dataset=emnist: no usable"):
        EMNIST(root=str(tmp_path))
