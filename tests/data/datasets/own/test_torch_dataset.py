"""Any map-style Dataset: tuples, mappings and pictures, and what is no such thing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refused import refused
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedsim.data.datasets import Arrays, TorchData

DRAW = np.random.default_rng(4)
X, Y = torch.tensor(DRAW.normal(size=(30, 4)), dtype=torch.float32), torch.tensor(DRAW.integers(0, 3, 30))
WHO = DRAW.choice([976906, 7], 30)


class Listed(Dataset):
    """Whatever it is given."""

    def __init__(self, samples: list[Any], **attributes: Any) -> None:
        self.samples = samples
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        return self.samples[number]


class Random(Listed):
    def __getitem__(self, number: int) -> Any:
        x, y = super().__getitem__(number)
        return x + DRAW.normal(), y


class RandomTargets(Listed):
    def __getitem__(self, number: int) -> Any:
        return super().__getitem__(number)[0], int(DRAW.integers(0, 1000))


class OneBuffer(Listed):
    """Every sample is written into the same memory, as readers of records do."""

    def __init__(self, samples: list[Any], buffer: Any) -> None:
        super().__init__(samples)
        self.buffer = buffer

    def __getitem__(self, number: int) -> Any:
        x, y = super().__getitem__(number)
        self.buffer[:] = x
        return self.buffer, y


@pytest.mark.parametrize("buffer", [np.zeros(4, dtype=np.float32), torch.zeros(4)], ids=["array", "tensor"])
def test_samples_in_one_buffer_are_kept_apart(buffer: Any) -> None:
    data = TorchData(OneBuffer(PAIRS, buffer), test=Listed(PAIRS))
    assert torch.equal(data.train_x, X)


def test_samples_that_require_a_gradient_are_taken() -> None:
    data = TorchData(Listed([(x.clone().requires_grad_(), y) for x, y in PAIRS]), test=Listed(PAIRS))
    assert torch.equal(data.train_x, X)
    assert not data.train_x.requires_grad


class Broken(Listed):
    def __getitem__(self, number: int) -> Any:
        if number == 5:
            raise OSError("disk\nfailure")
        return super().__getitem__(number)


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        yield 0


PAIRS = list(zip(X, Y.tolist(), strict=True))
TRIPLES = [(x, y, who) for (x, y), who in zip(PAIRS, WHO, strict=True)]
SAME: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensors": (TensorDataset(X, Y, torch.tensor(WHO)), {"client": 2}),
    "tuples": (Listed(TRIPLES), {"client": 2}),
    "the other way round": (Listed([(w, y, x.numpy()) for x, y, w in TRIPLES]), {"x": 2, "client": 0}),
    "mappings": (Listed([{"in": x.tolist(), "out": y, "by": str(w)} for x, y, w in TRIPLES]),
                 {"x": "in", "y": "out", "client": "by"}),
    "an attribute": (Listed(PAIRS, identity=torch.tensor(WHO)), {"client": "identity"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAME)
def test_every_kind_of_sample_gives_the_same(kind: str) -> None:
    given, keys = SAME[kind]
    data, like = TorchData(given, **keys), Arrays(X, Y, WHO)
    for name in ("train_x", "train_y", "owners", "test_x", "test_y", "test_owners"):
        assert torch.equal(getattr(data, name), getattr(like, name)), name
    assert data.client_names == ("7", "976906")
    assert data.name == type(given).__name__


def test_pictures_are_kept_as_bytes_and_resized_as_asked() -> None:
    pictures = [Image.fromarray(DRAW.integers(0, 256, (6, 5 + n % 2), dtype=np.uint8)) for n in range(6)]
    samples = Listed([(picture, n % 2) for n, picture in enumerate(pictures)])
    data = TorchData(samples, samples, size=[6, 5])
    assert (data.shape, data.train_x.dtype) == ((1, 6, 5), torch.uint8)
    assert torch.equal(data.train_x[0, 0], torch.tensor(np.asarray(pictures[0])))
    assert torch.equal(data.train_x, data.test_x)
    refused(lambda: TorchData(samples), "images differ in size: sample 0 is 5×6, sample 1 6×6; size=[6,5]")


def changed(at: int, x: Any = None, y: Any = None) -> Listed:
    samples = list(PAIRS)
    samples[at] = (samples[at][0] if x is None else x, samples[at][1] if y is None else y)
    return Listed(samples)


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a word": ("mnist", {}, "dataset.train (str) is not a map-style Dataset"),
    "nothing": (None, {}, "dataset.train (NoneType) is not a map-style Dataset"),
    "a stream": (Endless(), {}, "is not a map-style Dataset"),
    "empty": (Listed([]), {}, "holds no samples"),
    "random": (Random(PAIRS), {}, "sample 0 differs each time it is read"),
    "random targets": (RandomTargets(PAIRS), {}, "the target of sample 0 differs each time it is read"),
    "masked": (changed(4, x=np.ma.masked_greater(np.arange(4.0), 2)), {}, "x is a masked array with masked values"),
    "broken": (Broken(PAIRS), {}, "sample 5 cannot be read (disk failure)"),
    "no target": (Listed([(x,) for x in X]), {}, "dataset.y=1 does not occur in a sample (tuple)"),
    "tensors alone": (Listed(list(X)), {"y": "label"}, "dataset.y='label' does not occur in a sample (Tensor)"),
    "another key": (Listed([{"a": 1, "b": 2}]), {}, "dataset.x=0 does not occur in a sample (the keys a, b)"),
    "no client": (Listed(PAIRS), {"client": 2}, "dataset.client=2 does not occur"),
    "clients of others": (Listed(PAIRS, who=[1, 2]), {"client": "who"}, "clients has the shape [2] for 30 samples"),
    "ragged": (changed(4, x=X[0, :2]), {}, "x is ragged: its entries differ in shape ([2] and [4])"),
    "NaN": (changed(4, x=X[0] * float("nan")), {}, "sample 4 holds nan in x"),
    "3.7 is no label": (changed(4, y=3.7), {}, "sample 4 has the target 3.7"),
    "no label": (changed(4, y="x"), {"classes": 3}, "sample 4 has the label 'x'"),
    "one class": (Listed([(x, 1) for x in X]), {}, "all labels are '1'"),
    "words": (Listed([("to be", 1)]), {}, "x holds words"),
    "no pictures": (Listed(PAIRS), {"size": [4, 4]}, "size and colours are for Pillow images"),
    "tests of another shape": (Listed(PAIRS), {"test": Listed([(X[0, :2], 1)])}, "test inputs are [2] float32"),
    "no test": (Listed(PAIRS), {"test": 7}, "dataset.test (int) is not a map-style Dataset"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_datasets(case: str) -> None:
    train, options, says = BAD[case]
    refused(lambda: TorchData(train, **options), says)
