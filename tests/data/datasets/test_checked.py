"""A `Dataset` made by hand whose parts do not fit is refused in one sentence; inputs as a model sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedsim import Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset, Digits, TorchData
from fedsim.data.datasets.augment import CropFlip
from fedsim.models import Linear

X = torch.sin(torch.arange(240.0)).reshape(60, 4)
Y = torch.arange(60) % 3
PIXELS = torch.zeros(60, 3, 2, 2, dtype=torch.uint8)
ALONE = {"test_x": None, "test_y": None}


def data(**changes: Any) -> Dataset:
    return Dataset(
        **{"name": "d", "train_x": X, "train_y": Y, "test_x": X[:9], "test_y": Y[:9], "classes": 3} | changes
    )


MISTAKES = {
    "fewer targets": ({"train_y": Y[:50]}, "train_y holds 50 targets for 60 samples"),
    "fewer test targets": ({"test_y": Y[:5]}, "test_y holds 5 targets for 9 samples"),
    "label too large": ({"train_y": Y + 1}, "train_y holds the label 3, but classes=3 are 0 to 2"),
    "label below 0": ({"train_y": Y - 1}, "train_y holds the label -1"),
    "test label": ({"test_y": Y[:9] + 2}, "test_y holds the label 3"),
    "labels as floats": ({"train_y": Y.float(), "test_y": Y[:9].float()}, r"labels are int64; give train_y\.long\(\)"),
    "labels as int32": ({"train_y": Y.int(), "test_y": Y[:9].int()}, "train_y is int32, and labels are int64"),
    "an array": ({"train_x": X.numpy()}, "train_x is a ndarray; give a tensor"),
    "a list": ({"train_y": Y.tolist()}, "train_y is a list; give a tensor"),
    "inputs to test alone": ({"test_y": None}, "test_x is given and test_y is None"),
    "targets to test alone": ({"test_x": None}, "test_y is given and test_x is None"),
    "other test inputs": ({"test_x": X[:9, :3]}, r"test_x has entries \[3\] float32, train_x \[4\] float32"),
    "test pixels": ({"test_x": X[:9].to(torch.uint8)}, "test_x has entries .* uint8, train_x .* float32"),
    "classes": ({"classes": "3"}, "classes='3' must be a whole number"),
    "fewer owners": ({"owners": Y[:30]}, "owners holds 30 numbers for 60 samples"),
    "owners as floats": ({"owners": Y.float()}, r"owners is \[60\] float32; give whole numbers"),
    "owners below 0": ({"owners": Y - 1}, "owners holds -1"),
    "a list of owners": ({"owners": [0] * 60}, "owners is a list"),
    "fewer test owners": ({"owners": Y, "test_owners": Y[:4]}, "test_owners holds 4 numbers for 9 samples"),
    "names of clients": ({"owners": Y, "client_names": ("a",)}, "client_names holds 1 names for 3 clients"),
    "names of labels": ({"label_names": ("a",)}, "label_names holds 1 names for classes=3"),
    "samples that are not there": (
        {"assignable_samples": torch.tensor([99])},
        "assignable_samples names samples outside 0 to 59",
    ),
    "mean alone": ({"train_x": PIXELS, "mean": (0.5,), **ALONE}, "mean and std belong together"),
    "channels": ({"train_x": PIXELS, "mean": (0.5,), "std": (1.0, 2.0), **ALONE}, "std holds 2 numbers for 3 channels"),
    "no spread": ({"train_x": PIXELS, "mean": (0.5,), "std": (0.0,), **ALONE}, r"std=0\.0 must be positive"),
    "no samples": ({"train_x": X[:0], "train_y": Y[:0]}, "train_x holds no samples"),
    "complex": ({"train_x": X + 0j, **ALONE}, "train_x is complex"),
    "further inputs": ({"more": {"mask": [1]}}, r"more\.mask is a list"),
    "augmented numbers": ({"augment": CropFlip()}, r"dataset\.augment crops and flips images .* the shape \[4\]"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name):
    changes, says = MISTAKES[name]
    with pytest.raises(ConfigError, match=f"dataset=d: .*{says}") as raised:
        Simulation(data(**changes), Linear, clients=3, rounds=1)
    assert "\n" not in str(raised.value)


def test_what_fits_is_accepted():
    for changes in (
        {},
        {"owners": Y, "test_owners": Y[:9], "client_names": ("a", "b", "c")},
        {"classes": None, "loss": "squared", "train_y": X[:, 0], "test_y": X[:9, 0]},
        {"train_x": X.to(torch.uint8), "mean": (0.5,) * 4, "std": (1.0,) * 4, **ALONE},  # pixels of one row: 4 channels
    ):
        Simulation(data(**changes), Linear, clients=3, rounds=1).run()


@pytest.mark.parametrize("target", [{"boxes": torch.zeros(1, 4), "labels": torch.ones(1)}, {"a": 1}, {1, 2}, object()])
def test_targets_that_are_no_single_value_are_refused(target):
    with pytest.raises(ConfigError, match=r"y holds \w+ objects.*one value each; give one label.*target\['labels'\]"):
        TorchData([(X[n], target) for n in range(10)])


def test_test_inputs_are_what_the_run_evaluated():
    digits = Digits()
    result = Simulation(digits, Linear, clients=5, rounds=3).run()
    module = Linear(shape=digits.shape, classes=digits.classes)
    module.load_state_dict(result.model())
    accuracy = (module(digits.test_inputs()).argmax(1) == digits.test_y).float().mean()
    assert float(accuracy) == pytest.approx(result.final["test_accuracy"][0], abs=1e-6)


def test_inputs_of_pixels_are_scaled_and_normalised():
    images = Dataset("i", PIXELS + 255, test_x=PIXELS[:2], mean=(0.5,), std=(0.25,))
    assert (images.train_inputs() == 2).all()
    assert (images.test_inputs() == -2).all()
    assert images.test_inputs(torch.float64).dtype == torch.float64
    with pytest.raises(ConfigError, match="has no test samples"):
        Dataset("i", PIXELS).test_inputs()
