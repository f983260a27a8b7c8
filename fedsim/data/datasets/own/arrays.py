"""Your own arrays: passed in Python, or read from an NPZ or safetensors file or a folder of .npy files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedsim.core.errors import ConfigError, MissingDataError
from fedsim.core.files import check_regular_path
from fedsim.data.datasets.own.data import UserDataset
from fedsim.data.datasets.own.samples import RawSamples

ARRAY_ROLES = ("x", "y", "clients")
ARRAY_NAMES = [f"{role}{half}" for half in ("", "_train", "_test") for role in ARRAY_ROLES]


class Arrays(UserDataset):
    """Inputs and targets as lists, NumPy arrays or tensors.

    Args:
        x, y: [N, …] inputs and [N] targets to train on.
        clients: [N] client of each sample, by any name; None: the partition decides.
        x_test, y_test, clients_test: likewise, for testing.
        name: the name of the data in reports.
        **options: of `UserDataset`.

    Example:
        >>> data = Arrays([[0.0], [1.0], [2.0], [3.0]], ["no", "no", "yes", "yes"], test_fraction=0)
        >>> data.train_y.tolist(), data.label_names
        ([0, 0, 1, 1], ('no', 'yes'))
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        clients: Any = None,
        x_test: Any = None,
        y_test: Any = None,
        clients_test: Any = None,
        name: str = "arrays",
        **options: Any,
    ) -> None:
        if x_test is None and (y_test is not None or clients_test is not None):
            raise ConfigError(f"dataset={name}: there are test targets or clients, but no test inputs; add x_test")
        test = None if x_test is None else RawSamples(f"dataset={name}, test", x_test, y_test, clients_test)
        super().__init__(name, RawSamples(f"dataset={name}", x, y, clients), test, **options)


class ArrayFiles(Arrays):
    """Arrays x [N, …], y [N] and, if samples belong to clients, clients [N]; x_test, y_test, clients_test for testing.

    From FILE.npz, FILE.safetensors, or a folder of x.npy, y.npy, …; x.npy is memory-mapped, so it may be larger than
    memory. x_train is a synonym of x. Nothing is unpickled.

    Args:
        path: the file or folder.
        **options: of `UserDataset`.
    """

    def __init__(self, path: str, **options: Any) -> None:
        file = Path(path).expanduser()
        contents = read(file)
        arrays = {name: contents.get(name, contents.get(f"{name}_train")) for name in ARRAY_ROLES}
        arrays |= {name: contents[name] for name in (f"{role}_test" for role in ARRAY_ROLES) if name in contents}
        if arrays["x"] is None:
            raise MissingDataError(
                f"{{path}}={file} does not contain an array x; it has {', '.join(contents) or 'none'}",
                mentions=("path",),
            )
        super().__init__(**arrays, name=file.stem, **options)


def read(path: Path) -> dict[str, Any]:
    """The arrays of a file or folder whose names are in `ARRAY_NAMES`."""
    if not path.exists():
        raise MissingDataError(f"{{path}}={path} does not exist (looked for {path.resolve()})", mentions=("path",))
    try:
        check_regular_path(path)
        if path.is_dir():
            return {name: load_npy(path / f"{name}.npy") for name in ARRAY_NAMES if (path / f"{name}.npy").exists()}
        if path.suffix == ".safetensors":
            return {name: value for name, value in load_file(path).items() if name in ARRAY_NAMES}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in ARRAY_NAMES if name in file}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, SafetensorError) as error:
        reason = " ".join(str(error).split())
        reason = "it holds objects, which are not unpickled; store text as NumPy str" if "pickle" in reason else reason
        raise MissingDataError(f"{{path}}={path} cannot be read: {reason}", mentions=("path",)) from error
    raise ConfigError(
        f"{{path}}={path} must be FILE.npz, FILE.safetensors, or a folder with x.npy and y.npy", mentions=("path",)
    )


def load_npy(path: Path) -> np.ndarray:
    """Inputs are memory-mapped; other arrays are read."""
    is_input = path.stem.startswith("x")
    return np.load(check_regular_path(path), mmap_mode="c" if is_input else None, allow_pickle=False)
