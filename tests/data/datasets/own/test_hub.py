"""Hugging Face's datasets: saved to disk, from files by its builders, from the cache; nothing is fetched unasked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refused import refused

from fedsim.core import MissingDataError
from fedsim.data.datasets import Arrays, Hub
from fedsim.data.datasets.own.hub import restrict_hub_access

datasets = pytest.importorskip("datasets")

DRAW = np.random.default_rng(5)
N = 20
X, AGE = DRAW.normal(size=(N, 3)).astype(np.float32), DRAW.normal(50, 9, N).astype(np.float32)
Y, WHO = DRAW.integers(0, 3, N), DRAW.choice(["007", "976906"], N)
NAMES = ["zebra", "ant", "cow"]
COLUMNS = {"x": "x", "y": "kind", "client": "who"}


@pytest.fixture(autouse=True)
def cache(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's cache is the test's own, and empty."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(here / "cache"))


def table(**changes: Any) -> Any:
    columns = {"x": X.tolist(), "age": AGE.tolist(), "kind": Y.tolist(), "who": WHO.tolist()} | changes
    features = datasets.Features(
        x=datasets.Sequence(datasets.Value("float32")),
        age=datasets.Value("float32"),
        kind=datasets.ClassLabel(names=NAMES),
        who=datasets.Value("string"),
    )
    return datasets.Dataset.from_dict(columns, None if changes else features)


def saved(**changes: Any) -> str:
    table(**changes).save_to_disk("saved")
    return "saved"


def csv() -> dict[str, Any]:
    for half, rows in (("train", range(15)), ("test", range(15, N))):
        lines = [f"{AGE[n]},{X[n, 0]},{WHO[n]},{NAMES[Y[n]]}" for n in rows]
        Path(f"{half}.csv").write_text("\n".join(["age,dose,who,kind", *lines]))
    return {"path": "csv", "data_files": {"train": "train.csv", "test": "test.csv"}}


def test_what_was_saved_to_disk_keeps_its_labels_and_their_names() -> None:
    data, like = Hub(saved(), **COLUMNS), Arrays(X, Y, WHO, classes=3)
    for name in ("train_x", "train_y", "owners", "test_x", "test_y", "test_owners"):
        assert torch.equal(getattr(data, name), getattr(like, name)), name
    assert data.label_names == tuple(NAMES)  # in their order, not the alphabet's
    assert data.client_names == ("007", "976906")


def test_a_builder_reads_local_files_of_both_splits() -> None:
    data = Hub(**csv(), x=["age", "dose"], y="kind", client="who")
    assert torch.allclose(data.train_x, torch.tensor(np.column_stack([AGE, X[:, 0]])[:15]))
    assert len(data.test_x) == 5
    assert [data.label_names[label] for label in data.train_y] == [NAMES[y] for y in Y[:15]]


def test_images_are_kept_as_bytes() -> None:
    pixels = DRAW.integers(0, 256, (N, 4, 5, 3), dtype=np.uint8)
    features = datasets.Features(image=datasets.Image(), kind=datasets.ClassLabel(names=NAMES))
    columns = {"image": [Image.fromarray(p) for p in pixels], "kind": Y.tolist()}
    datasets.DatasetDict(train=datasets.Dataset.from_dict(columns, features)).save_to_disk("pictures")
    data = Hub("pictures", "image", "kind", test_fraction=0)
    assert torch.equal(data.train_x, torch.tensor(pixels.transpose(0, 3, 1, 2)))
    assert Hub("pictures", "image", "kind", size=[2, 2], colours="grey").shape == (1, 2, 2)


def test_what_lies_in_the_cache_is_read_without_a_network(here: Path) -> None:
    """As the library leaves a data set of the Hub there: NAMESPACE___NAME/CONFIG/VERSION/HASH."""
    place = here / "cache" / "somebody___animals" / "default" / "0.0.0" / ("0" * 40)
    builder = datasets.load_dataset(**csv(), cache_dir=str(here / "other"))["train"]
    source = Path(builder.cache_files[0]["filename"]).parent
    place.mkdir(parents=True)
    for file in source.iterdir():
        (place / file.name.replace("csv-", "animals-")).write_bytes(file.read_bytes())
    info = (place / "dataset_info.json").read_text()
    (place / "dataset_info.json").write_text(info.replace('"dataset_name": "csv"', '"dataset_name": "animals"'))
    data = Hub("somebody/animals", ["age", "dose"], "kind", client="who")
    assert len(data.train_x) == 15
    assert len(data.test_x) == 5


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "of the Hub": (lambda: {"path": "nobody/nothing"}, "dataset.download=true downloads data sets of the Hub"),
    "no such folder": (
        lambda: {"path": "./nowhere"},
        "dataset.path=./nowhere (config=None, data_files=None) can",
    ),
    "an empty folder": (lambda: {"path": str(Path("e").mkdir() or "e")}, "dataset.path=e (config=None"),
    "no such file": (
        lambda: {"path": "csv", "data_files": "no.csv"},
        "data_files=no.csv) cannot be read",
    ),
    "no files": (lambda: {"path": "csv", "data_files": [7]}, "data_files=[7] must be a file, a list of files"),
    "a configuration of files": (lambda: csv() | {"config": "a"}, "config=a belongs to a data set of the Hub"),
    "cut": (lambda: cut(saved()), "dataset.path=saved (config=None, data_files=None) cannot"),
    "damaged": (lambda: damaged(saved()), "dataset.path=saved (config=None, data_files=None) cannot"),
    "ragged": (lambda: {"path": saved(x=[[1.0], *X[1:].tolist()])}, "x is ragged"),
    "no such column": (lambda: {"path": saved(), "x": "pixels"}, "dataset.x=pixels is not a column of saved, "),
    "no such target": (lambda: {"path": saved(), "y": "label"}, "dataset.y=label is not a column"),
    "no such client": (lambda: {"path": saved(), "client": "by"}, "dataset.client=by is not a column"),
    "no such split": (lambda: {"path": saved(), "train": "validation"}, "dataset.train=validation is not a split"),
    "no such test": (lambda: {"path": saved(), "test": "test"}, "dataset.test=test is not a split of saved"),
    "no column": (lambda: {"path": saved(), "x": []}, "x=[] names no column"),
    "lists among columns": (lambda: {"path": saved(), "x": ["age", "x"]}, "column 'x' of x holds more than"),
    "words": (lambda: {"path": saved(), "x": "who"}, "x holds words"),
    "NaN": (lambda: {"path": saved(age=[np.nan, *AGE[1:].tolist()]), "x": "age"}, "sample 0 holds nan in x"),
    "no label": (lambda: {"path": saved(kind=[None, *Y[1:].tolist()])}, "sample 0 has no label"),
    "3.7 is no label": (lambda: {"path": saved(kind=[3.7] * N)}, "has the target 3.7"),
    "hidden labels": (lambda: {"path": saved_with(-1)}, "has the label '-1', but classes=3"),
    "no client": (lambda: {"path": saved(who=[None, *WHO[1:].tolist()])}, "sample 0 has no client"),
    "no samples": (lambda: {"path": nothing()}, "saved"),  # old versions of datasets read it, new ones cannot
    "no pictures": (lambda: {"path": saved(), "size": [2, 2]}, "size and colours are for Pillow images"),
}


def cut(path: str) -> dict[str, Any]:
    for file in Path(path).glob("*.arrow"):
        file.write_bytes(file.read_bytes()[:100])
    return {"path": path}


def damaged(path: str) -> dict[str, Any]:
    Path(path, "state.json").write_text("{")
    return {"path": path}


def nothing() -> str:
    table().select([]).save_to_disk("saved")
    return "saved"


def saved_with(label: int) -> str:
    table().map(lambda sample: sample | {"kind": label}).save_to_disk("saved")
    return "saved"


@pytest.mark.parametrize("case", BAD)
def test_bad_data_sets(case: str) -> None:
    make, says = BAD[case]
    options = COLUMNS | make()
    refused(lambda: Hub(**options), says)


def test_the_library_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDataError, match=r"pip install 'fedsim-torch\[hub\]'"):
        Hub("ylecun/mnist", "image", "label")


def test_the_network_is_open_only_if_asked_for_and_afterwards_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)

    def is_offline() -> list[bool]:
        return [constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE]

    for online in (False, True):
        with restrict_hub_access(online=online):
            assert is_offline() == [not online] * 2
        assert is_offline() == [False] * 2
