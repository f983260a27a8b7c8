"""Folders of images: layout, sizes, colours, clients by their files' names, and files that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refused import refused

from fedsim import Simulation
from fedsim.data.datasets import ImageFolder
from fedsim.models import Linear

DRAW = np.random.default_rng(3)
PIXELS: dict[str, np.ndarray] = {}


def draw(path: str, shape: tuple[int, ...] = (6, 5, 3), kind: str | None = None) -> None:
    """An image in a file; its pixels are kept for comparison."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    PIXELS[path] = DRAW.integers(0, 256, shape, dtype=np.uint8)
    image = Image.fromarray(PIXELS[path])
    (image if kind is None else image.convert(kind)).save(path)


def folder(test: bool = True, **options: Any) -> str:
    """Three clients, two classes."""
    for half in ("train", "test") if test else ("",):
        for label in ("cat", "dog"):
            for client in ("ann", "976906", "007"):
                for number in range(1 if half == "test" else 3):
                    draw(f"own/{half}/{label}/{client}_{number}.png".replace("//", "/"), **options)
    return "own"


def test_images_labels_and_clients_are_those_of_the_files() -> None:
    data = ImageFolder(folder(), client=r"([^/]+)_\d")
    assert data.client_names == ("007", "976906", "ann")
    assert data.label_names == ("cat", "dog")
    for half, x, y, owners in (
        ("train", data.train_x, data.train_y, data.owners),
        ("test", data.test_x, data.test_y, data.test_owners),
    ):
        paths = sorted(path for path in PIXELS if path.startswith(f"own/{half}/"))
        assert torch.equal(x, torch.tensor(np.stack([PIXELS[path] for path in paths]).transpose(0, 3, 1, 2)))
        assert [data.label_names[label] for label in y] == [path.split("/")[2] for path in paths]
        assert [data.client_names[owner] for owner in owners] == [Path(path).stem.split("_")[0] for path in paths]
    seen = data.prepare(data.train_x, torch.float64)
    assert seen.mean((0, 2, 3)).abs().max() < 1e-6


def test_without_halves_a_share_of_every_client_is_held_out() -> None:
    data = ImageFolder(folder(test=False), client=r"([^/]+)_\d", test_fraction=0.5)
    assert torch.bincount(data.test_owners).tolist() == [3, 3, 3]
    assert Simulation(data, Linear, clients="all", rounds=1).run().final["test_accuracy"][0] >= 0


@pytest.mark.parametrize(("kinds", "colours", "channels"), [
    (("L", "L"), None, 1), (("L", "RGB"), None, 3), (("RGB", "RGB"), "grey", 1), (("L", "L"), "rgb", 3),
    (("P", "RGBA"), None, 3), (("1", "LA"), None, 1),
])  # fmt: skip
def test_colours(kinds: tuple[str, str], colours: str | None, channels: int) -> None:
    draw("own/a/0.png", kind=kinds[0])
    draw("own/b/0.png", kind=kinds[1])
    data = ImageFolder("own", colours=colours, test_fraction=0)
    assert data.shape == (channels, 6, 5)
    mode = "L" if channels == 1 else "RGB"
    wanted = np.asarray(Image.open("own/b/0.png").convert("RGB").convert(mode)).reshape(6, 5, channels)
    assert torch.equal(data.train_x[1], torch.tensor(wanted.transpose(2, 0, 1)))


def test_several_sizes_are_resized_as_asked() -> None:
    folder()
    draw("own/train/dog/007_9.png", (9, 12, 3))
    data = ImageFolder("own", size=[4, 7])
    assert data.shape == (3, 4, 7)
    resized = Image.open("own/train/dog/007_9.png").resize((7, 4), Image.Resampling.BILINEAR)
    wanted = torch.tensor(np.asarray(resized).transpose(2, 0, 1).copy())
    assert any(torch.equal(x, wanted) for x in data.train_x)


def spoilt(path: str, content: bytes) -> Callable[[], str]:
    def write() -> str:
        folder()
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(content)
        return "own"

    return write


def cut() -> str:
    folder()
    path = Path("own/test/dog/007_0.png")
    path.write_bytes(path.read_bytes()[:-40])
    return "own"


def and_then(change: Callable[[], object]) -> Callable[[], str]:
    def write() -> str:
        folder()
        change()
        return "own"

    return write


def wide() -> None:
    Image.fromarray(np.full((6, 5), 60_000, np.uint16)).save("own/train/cat/wide.png")


BAD: dict[str, tuple[Callable[[], str], dict[str, Any], str]] = {
    "absent": (lambda: "nowhere", {}, "path=nowhere is not a folder"),
    "a file": (lambda: str(Path("own").write_text("") or "own"), {}, "path=own is not a folder"),
    "empty": (lambda: str(Path("own").mkdir() or "own"), {}, "own has no subfolders of images, one per class"),
    "an empty class": (and_then(lambda: Path("own/train/emu").mkdir()), {}, "Found no valid file for the classes emu"),
    "text": (spoilt("own/train/cat/z.png", b"no picture"), {}, "own/train/cat/z.png is not a readable image"),
    "nothing": (spoilt("own/train/cat/z.png", b""), {}, "own/train/cat/z.png is not a readable image"),
    "cut": (cut, {}, "own/test/dog/007_0.png is not a readable image"),
    "wide pixels": (and_then(wide), {}, "wide.png is not a readable image (its pixels are not bytes"),
    "ragged": (
        and_then(lambda: draw("own/train/dog/x.png", (9, 5, 3))),
        {},
        "images differ in size: cat/007_0.png is 5×6, dog/x.png 5×9; size=[6,5] resizes them",
    ),
    "test of another size": (
        and_then(lambda: [draw(path, (9, 5, 3)) for path in list(PIXELS) if path.startswith("own/test")]),
        {},
        "test inputs are [3, 9, 5] uint8, training inputs [3, 6, 5]",
    ),
    "test of other colours": (
        and_then(lambda: [draw(path, (6, 5)) for path in list(PIXELS) if path.startswith("own/test")]),
        {},
        "test inputs are [1, 6, 5] uint8, training inputs [3, 6, 5]",
    ),
    "one class": (lambda: draw("own/cat/a.png") or draw("own/cat/b.png") or "own", {}, "all labels are 'cat'"),
    "test alone": (lambda: draw("own/test/cat/a.png") or "own", {}, "has a folder test but no folder train"),
    "no group": (folder, {"client": "abc"}, "client=abc has no group"),
    "no expression": (folder, {"client": "(a"}, "client=(a is not a regular expression"),
    "no client": (folder, {"client": "(ann)_"}, "client=(ann)_ matches no client in cat/007_0.png"),
    "one number": (folder, {"size": [4]}, "size=[4] must be two numbers"),
    "no size": (folder, {"size": [4, 0]}, "size=0 must be a whole number"),
    "a colour": (folder, {"colours": "red"}, "colours='red' is unknown"),
    "two test sets": (folder, {"test_fraction": 0.3}, "the data already have test samples"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(case: str) -> None:
    make, options, says = BAD[case]
    PIXELS.clear()
    path = make()
    refused(lambda: ImageFolder(path, **options), says)
