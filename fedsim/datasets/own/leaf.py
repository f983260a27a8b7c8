"""Data in LEAF's JSON format (Caldas et al. 2018): users, num_samples, user_data."""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core import checks
from fedsim.core.errors import ConfigError, MissingDataError
from fedsim.core.files import regular
from fedsim.datasets.own.data import OwnData
from fedsim.datasets.own.samples import Part, array
from fedsim.datasets.text import tokens_of


class LEAF(OwnData):
    """Every user is a client (partition=natural). Inputs are lists of numbers, as FEMNIST's and Synthetic's are, or
    sequences of one length whose target is the next character, as Shakespeare's are: these become numbers of
    characters in `alphabet`, as in `fedsim.datasets.Text`, whose classes are 0 for characters that occur in no training
    sequence and one for each other. Sent140's and Reddit's texts of several lengths and CelebA's names of files are
    refused.

    Read from all files FOLDER/train/*.json and FOLDER/test/*.json, as LEAF's preprocessing writes them; or from
    FOLDER/*.json, or one file, of whose samples `test_fraction` is held out. Test users who train nothing (LEAF's split
    by user) test everybody's model.

    Args:
        path: the folder or file.
        shape: of an input, such as [1,28,28]; None takes inputs as they are.
        **options: of `OwnData`.

    Attributes:
        alphabet: characters of the training sequences, sorted; empty where inputs are numbers.
    """

    def __init__(self, path: str, shape: Sequence[int] | None = None, **options: Any) -> None:
        place = Path(path).expanduser()
        if not place.exists():
            raise MissingDataError(f"dataset.path={place} is not there (looked for {place.resolve()})")
        halves = [place / half for half in ("train", "test")]
        if halves[1].is_dir() and not halves[0].is_dir():
            raise MissingDataError(f"dataset.path={place} has a folder test and none of the name train")
        train = halves[0] if halves[0].is_dir() else place
        parts = [read(train), *([read(halves[1])] if train != place and halves[1].is_dir() else [])]
        self.alphabet = ""
        if parts[0].x.dtype.kind == "U":
            if shape is not None or options.get("classes") is not None or options.get("task") == "regression":
                raise ConfigError(
                    f"dataset.path={place} holds text, whose shape, classes and task follow from it; set dataset.shape "
                    "and dataset.classes to null and dataset.task to classification"
                )
            self.alphabet, parts = spelled(parts)
            options |= {"inputs": "tokens", "classes": len(self.alphabet) + 1}
        if shape is not None:
            parts = [shaped(part, shape) for part in parts]
        super().__init__(place.stem, parts[0], parts[1] if parts[1:] else None, **options)


def read(place: Path) -> Part:
    """All users of a file, or of all JSON files of a folder."""
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not files:
        raise MissingDataError(f"dataset.path: {place} has no JSON files")
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for file in files:
        for user, samples in users(file):
            if user in found:
                raise ConfigError(f"{file}: user {user!r} stands in another file too; keep one of them")
            found[user] = samples
    held = {user: samples for user, samples in found.items() if len(samples[1])}
    if not held:
        raise ConfigError(f"{place}: no user has samples")
    if len({x.dtype.kind for x, _ in held.values()}) > 1:
        raise ConfigError(f"{place}: some users have numbers in x and others text; make them alike")
    if len(widths := {x.dtype.itemsize for x, _ in held.values() if x.dtype.kind == "U"}) > 1:
        raise ConfigError(f"{place}: users' sequences have {len(widths)} different lengths; make them alike")
    shapes = {x.shape[1:] for x, _ in held.values()}
    if len(shapes) > 1:
        shown = " and ".join(sorted(str(list(shape)) for shape in shapes)[:2])
        raise ConfigError(f"{place}: x is ragged, its entries differ in shape ({shown}); make them alike")
    names, ends = list(held), list(itertools.accumulate(len(y) for _, y in held.values()))

    def where(number: int) -> str:
        user = bisect.bisect_right(ends, number)
        return f"sample {number - (ends[user - 1] if user else 0)} of user {names[user]}"

    x, y = (np.concatenate([samples[k] for samples in held.values()]) for k in (0, 1))
    owners = np.repeat(np.array(names), [len(samples[1]) for samples in held.values()])
    return Part(str(place), x, y, owners, where)


def users(file: Path) -> list[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """The users of one file, inputs [n, …] and targets [n] of each."""
    try:
        content = json.loads(regular(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise MissingDataError(f"dataset.path: {file} cannot be read as JSON ({reason})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: LEAF's files hold users and user_data; this is a {type(content).__name__}")
    named, counts, data = (content.get(key) for key in ("users", "num_samples", "user_data"))
    if not isinstance(named, list) or not isinstance(data, dict):
        raise ConfigError(f"{file}: LEAF's files hold a list users and an object user_data, not {', '.join(content)}")
    if counts is not None and (not isinstance(counts, list) or len(counts) != len(named)):
        raise ConfigError(f"{file}: num_samples must have a number for each of the {len(named)} users")
    found = []
    for place, name in enumerate(map(str, named)):
        own = data.get(name)
        if not isinstance(own, dict) or not all(isinstance(own.get(key), list) for key in ("x", "y")):
            raise ConfigError(f"{file}: user {name!r} has no lists x and y in user_data")
        if len(own["x"]) != len(own["y"]):
            raise ConfigError(f"{file}: user {name!r} has {len(own['x'])} inputs and {len(own['y'])} targets")
        if counts is not None and counts[place] != len(own["y"]):
            raise ConfigError(f"{file}: num_samples says {counts[place]} of user {name!r}, who has {len(own['y'])}")
        found.append((name, samples(f"{file}, user {name}", own["x"], own["y"])))
    return found


def samples(source: str, x: list[Any], y: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """One user's."""
    inputs = array(source, "x", x)
    targets = array(source, "y", y)
    if len(x) and inputs.dtype.kind == "U" and inputs.ndim == 1:
        lengths = {len(text) for text in x}
        if len(lengths) == 1 and all(isinstance(each, str) and len(each) == 1 for each in y):
            return inputs, targets
        raise ConfigError(
            f"{source}: x holds words such as {x[0][:20]!r}, and of text dataset=leaf reads sequences of one length "
            "with a character as target, as Shakespeare's; read files of images by dataset=image_folder, and give "
            "other texts as lists of numbers"
        )
    if len(x) and inputs.dtype.kind not in "iufb":
        kind = "lists of words" if inputs.dtype.kind == "U" else type(inputs.item(0)).__name__
        raise ConfigError(
            f"{source}: x holds {kind}, as Sent140's and Reddit's do, and dataset=leaf reads numbers and Shakespeare's "
            "sequences; give each text as a list of numbers, all of one length"
        )
    return inputs.astype(np.float32), targets


def spelled(parts: list[Part]) -> tuple[str, list[Part]]:
    """The alphabet of the training sequences, and all parts with numbers of characters in the place of characters."""
    codes = [[_codes(values) for values in (part.x, part.y)] for part in parts]
    known = np.unique(np.concatenate([values.reshape(-1) for values in codes[0]]))
    alphabet = known.astype("<u4").tobytes().decode("utf-32-le")
    lengths = {x.shape[1] for x, _ in codes}
    if len(lengths) > 1:
        raise ConfigError(
            f"{parts[-1].source}: test sequences have another length than training sequences; make them alike"
        )
    found = [[tokens_of(values, known) for values in each] for each in codes]
    made = [
        Part(part.source, x, y[:, 0].astype(np.int64), part.clients, part.where)
        for part, (x, y) in zip(parts, found, strict=True)
    ]
    return alphabet, made


def _codes(texts: np.ndarray) -> np.ndarray:
    """[N] texts of L characters → their code points [N, L]."""
    return np.ascontiguousarray(texts).view(np.uint32).reshape(len(texts), -1)


def shaped(part: Part, shape: Sequence[int]) -> Part:
    """The same inputs in a shape."""
    sizes = [checks.whole("dataset.shape", size) for size in shape]
    if math.prod(sizes) != math.prod(part.x.shape[1:]):
        raise ConfigError(
            f"dataset.shape={list(shape)} holds {math.prod(sizes)} numbers, but inputs of {part.source} have "
            f"{math.prod(part.x.shape[1:])}"
        )
    return Part(part.source, part.x.reshape(-1, *sizes), part.y, part.clients, part.where)
