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
from fedsim.core.files import check_regular_path
from fedsim.data.datasets.own.data import UserDataset
from fedsim.data.datasets.own.samples import RawSamples, to_array
from fedsim.data.datasets.tokens import token_indices


class LEAF(UserDataset):
    """Every user is a client (partition=natural). Inputs are lists of numbers, as FEMNIST's and Synthetic's are, or
    sequences of equal length whose target is the next character, as Shakespeare's are: these become indices of
    characters in `alphabet`, as in `fedsim.data.datasets.Text`, whose classes are 0 for characters that occur in no
    training sequence and one for each other character. Not supported: texts of different lengths (Sent140, Reddit) and
    file names (CelebA).

    Reads FOLDER/train/*.json and FOLDER/test/*.json, as written by LEAF's preprocessing; or FOLDER/*.json, or one file,
    of whose samples `test_fraction` is held out. Test users without training data (LEAF's split by user) form a common
    test set.

    Args:
        path: the folder or file.
        shape: of an input, such as [1,28,28]; None: unchanged.
        **options: of `UserDataset`.

    Attributes:
        alphabet: characters of the training sequences, sorted; empty if inputs are numbers.
    """

    def __init__(self, path: str, shape: Sequence[int] | None = None, **options: Any) -> None:
        if not path:
            raise MissingDataError("{path}='' names no folder and no file", mentions=("path",))
        root = Path(path).expanduser()
        if not root.exists():
            raise MissingDataError(f"{{path}}={root} does not exist (looked for {root.resolve()})", mentions=("path",))
        split_paths = [root / split_name for split_name in ("train", "test")]
        if split_paths[1].is_dir() and not split_paths[0].is_dir():
            raise MissingDataError(f"{{path}}={root} has a folder test but no folder train", mentions=("path",))
        train = split_paths[0] if split_paths[0].is_dir() else root
        splits = [read(train), *([read(split_paths[1])] if train != root and split_paths[1].is_dir() else [])]
        self.alphabet = ""
        if splits[0].x.dtype.kind == "U":
            if shape is not None or options.get("classes") is not None or options.get("task") == "regression":
                raise ConfigError(
                    f"{{path}}={root} holds text, which determines shape, classes and task; set {{shape}} "
                    "and {classes} to null and {task} to classification",
                    mentions=("path", "shape", "classes", "task"),
                )
            self.alphabet, splits = encode_characters(splits)
            options |= {"inputs": "tokens", "classes": len(self.alphabet) + 1}
        if shape is not None:
            splits = [reshape_inputs(split, shape) for split in splits]
        super().__init__(root.stem, splits[0], splits[1] if splits[1:] else None, **options)


def read(location: Path) -> RawSamples:
    """All users of a file, or of all JSON files of a folder."""
    files = sorted(location.glob("*.json")) if location.is_dir() else [location]
    if not files:
        raise MissingDataError(f"{{path}}: {location} has no JSON files", mentions=("path",))
    samples_by_user: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for file in files:
        for user, samples in read_users(file):
            if user in samples_by_user:
                raise ConfigError(f"{file}: user {user!r} also occurs in another file; keep one of them")
            samples_by_user[user] = samples
    nonempty_users = {user: samples for user, samples in samples_by_user.items() if len(samples[1])}
    if not nonempty_users:
        raise ConfigError(f"{location}: no user has samples")
    if len({x.dtype.kind for x, _ in nonempty_users.values()}) > 1:
        raise ConfigError(f"{location}: some users have numbers in x and others text; use one kind")
    if len(widths := {x.dtype.itemsize for x, _ in nonempty_users.values() if x.dtype.kind == "U"}) > 1:
        raise ConfigError(
            f"{location}: users' sequences have {len(widths)} different lengths; make them the same length"
        )
    shapes = {x.shape[1:] for x, _ in nonempty_users.values()}
    if len(shapes) > 1:
        shape_names = " and ".join(sorted(str(list(shape)) for shape in shapes)[:2])
        raise ConfigError(
            f"{location}: x is ragged: its entries differ in shape ({shape_names}); make the shapes equal"
        )
    names, user_ends = list(nonempty_users), list(itertools.accumulate(len(y) for _, y in nonempty_users.values()))

    def describe_sample(number: int) -> str:
        user = bisect.bisect_right(user_ends, number)
        return f"sample {number - (user_ends[user - 1] if user else 0)} of user {names[user]}"

    x, y = (np.concatenate([samples[k] for samples in nonempty_users.values()]) for k in (0, 1))
    owners = np.repeat(np.array(names), [len(samples[1]) for samples in nonempty_users.values()])
    return RawSamples(str(location), x, y, owners, describe_sample)


def read_users(file: Path) -> list[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """The users of one file, inputs [n, …] and targets [n] of each."""
    try:
        content = json.loads(check_regular_path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise MissingDataError(f"{{path}}: {file} cannot be read as JSON ({reason})", mentions=("path",)) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file}: a LEAF file holds an object with users and user_data; this is a {type(content).__name__}"
        )
    user_names, counts, data = (content.get(key) for key in ("users", "num_samples", "user_data"))
    if not isinstance(user_names, list) or not isinstance(data, dict):
        raise ConfigError(f"{file}: a LEAF file holds a list users and an object user_data, not {', '.join(content)}")
    if counts is not None and (not isinstance(counts, list) or len(counts) != len(user_names)):
        raise ConfigError(f"{file}: num_samples must have a number for each of the {len(user_names)} users")
    user_samples = []
    for index, name in enumerate(map(str, user_names)):
        user_data = data.get(name)
        if not isinstance(user_data, dict) or not all(isinstance(user_data.get(key), list) for key in ("x", "y")):
            raise ConfigError(f"{file}: user {name!r} has no lists x and y in user_data")
        if len(user_data["x"]) != len(user_data["y"]):
            raise ConfigError(
                f"{file}: user {name!r} has {len(user_data['x'])} inputs and {len(user_data['y'])} targets"
            )
        if counts is not None and counts[index] != len(user_data["y"]):
            raise ConfigError(
                f"{file}: num_samples is {counts[index]} for user {name!r}, who has {len(user_data['y'])} samples"
            )
        user_samples.append((name, samples(f"{file}, user {name}", user_data["x"], user_data["y"])))
    return user_samples


def samples(source: str, x: list[Any], y: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of one user."""
    inputs = to_array(source, "x", x)
    targets = to_array(source, "y", y)
    if len(x) and inputs.dtype.kind == "U" and inputs.ndim == 1:
        lengths = {len(text) for text in x}
        if len(lengths) == 1 and all(isinstance(target, str) and len(target) == 1 for target in y):
            return inputs, targets
        raise ConfigError(
            f"{source}: x holds words such as {x[0][:20]!r}; as text, dataset=leaf reads sequences of equal length "
            "with a character as target (Shakespeare); read image files with dataset=image_folder, and convert "
            "other texts to lists of numbers"
        )
    if len(x) and inputs.dtype.kind not in "iufb":
        kind = "lists of words" if inputs.dtype.kind == "U" else type(inputs.item(0)).__name__
        raise ConfigError(
            f"{source}: x holds {kind}, as Sent140's and Reddit's do, but dataset=leaf reads numbers and Shakespeare's "
            "sequences; convert each text to a list of numbers, all of equal length"
        )
    return inputs.astype(np.float32), targets


def encode_characters(sources: list[RawSamples]) -> tuple[str, list[RawSamples]]:
    """The alphabet of the training sequences, and all parts with characters replaced by their indices."""
    codes = [[_code_points(values) for values in (source.x, source.y)] for source in sources]
    code_points = np.unique(np.concatenate([values.reshape(-1) for values in codes[0]]))
    alphabet = code_points.astype("<u4").tobytes().decode("utf-32-le")
    lengths = {x.shape[1] for x, _ in codes}
    if len(lengths) > 1:
        raise ConfigError(
            f"{sources[-1].source}: test sequences have a different length from training sequences; make the lengths "
            "equal"
        )
    token_arrays = [[token_indices(values, code_points) for values in part_codes] for part_codes in codes]
    token_parts = [
        RawSamples(source.source, x, y[:, 0].astype(np.int64), source.clients, source.sample_label)
        for source, (x, y) in zip(sources, token_arrays, strict=True)
    ]
    return alphabet, token_parts


def _code_points(texts: np.ndarray) -> np.ndarray:
    """[N] texts of L characters → their code points [N, L]."""
    return np.ascontiguousarray(texts).view(np.uint32).reshape(len(texts), -1)


def reshape_inputs(source: RawSamples, shape: Sequence[int]) -> RawSamples:
    """The inputs in another shape."""
    sizes = [checks.check_whole_number("shape", size) for size in shape]
    if math.prod(sizes) != math.prod(source.x.shape[1:]):
        raise ConfigError(
            f"{{shape}}={list(shape)} holds {math.prod(sizes)} numbers, but inputs of {source.source} have "
            f"{math.prod(source.x.shape[1:])}",
            mentions=("shape",),
        )
    return RawSamples(source.source, source.x.reshape(-1, *sizes), source.y, source.clients, source.sample_label)
