"""`fedsim data`: the files that each data set needs, whether they are available, and their download."""

from __future__ import annotations

import argparse
import functools
import os
from importlib.util import find_spec
from pathlib import Path

from hydra.utils import get_class

from fedsim.app.commands import COMMAND_DESCRIPTIONS
from fedsim.app.comments import first_comment
from fedsim.app.config import choice_target, config_folder, groups
from fedsim.core import checks
from fedsim.core.errors import MissingDataError
from fedsim.data.datasets import Dataset, Text, UserDataset
from fedsim.data.datasets.data_files import Files, data_root
from fedsim.data.datasets.vision import error_text

USER_DATA_CLASSES = (UserDataset, Text)  # what is read from a user's own files, named by dataset.path


def main(arguments: list[str]) -> None:
    """List all data sets, or check the named ones and download what is missing."""
    parser = argparse.ArgumentParser("fedsim data", description=f"Show {COMMAND_DESCRIPTIONS['data']}.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="data sets to download, and to read as a check")
    parser.add_argument(
        "--root", help="folder of the files (default: the environment variable FEDSIM_DATA, else ./data)"
    )
    options = parser.parse_args(arguments)
    root, origin = data_root_and_origin(options.root)
    for name in options.names:
        checks.check_choice("NAME", name, datasets())
    if not options.names:
        print(f"data sets are looked for in {root} ({origin})\n")
        print("\n".join(dataset_line(name, root) for name in datasets()))
        print("\n`fedsim data NAME` downloads a data set, or says what to do without a network.")
    for name in options.names:
        print(f"{name}: {dataset_availability_note(name)}")
        fetch_and_read(name, root)


@functools.cache
def datasets() -> dict[str, type[Dataset]]:
    """Return the choices of the group `dataset` and their classes."""
    return {name: get_class(choice_target("dataset", name)) for name in groups()["dataset"] if name != "custom"}


def data_root_and_origin(root: str | None) -> tuple[Path, str]:
    """Return the folder of all data sets, and which setting determines it."""
    origin = "--root" if root else "FEDSIM_DATA" if os.environ.get("FEDSIM_DATA") else "FEDSIM_DATA is not set"
    return data_root(root).resolve(), origin


def dataset_availability_note(name: str) -> str:
    """Return one line about the availability of a data set."""
    return first_comment(config_folder() / "dataset" / f"{name}.yaml")


def dataset_line(name: str, root: Path) -> str:
    """Return the line of a data set in the list."""
    files = datasets()[name].files
    if issubclass(datasets()[name], USER_DATA_CLASSES):
        return f"  {name:20} your files          {dataset_availability_note(name)}"
    if files is None:
        return f"  {name:20} ready               {dataset_availability_note(name)}"
    existing_files = files.existing_paths(root)
    filenames = [path.relative_to(root).as_posix() for path in existing_files] or list(files.forms[-1])
    paths = ", ".join(filenames[:2]) + ", …" * (len(filenames) > 2)
    if files.module and find_spec(files.module) is None:
        paths += f"; needs {files.module}: pip install 'fedsim-torch[{files.extra}]'"
    return (
        f"  {name:20} {'found' if existing_files else 'missing':8}"
        f"{total_size_text(existing_files) if existing_files else '':>9}  {paths}"
    )


def total_size_text(paths: list[Path]) -> str:
    """Return the total size of the files; folders, which may hold 100,000 files, are not searched."""
    if any(path.is_dir() for path in paths):
        return "a folder"
    return f"{sum(path.stat().st_size for path in paths) / 1e6:.1f} MB"


def fetch_and_read(name: str, root: Path) -> None:
    """Download a data set if it is missing, and read it.

    Raises:
        MissingDataError: where it cannot be had; the message says what to do.
    """
    kind = datasets()[name]
    if issubclass(kind, USER_DATA_CLASSES):
        print(f"  is read from your own files: fedsim dataset={name} dataset.path=…")
        return
    if kind.files is None:
        print("  needs no files")
        return
    if not kind.files.existing_paths(root):
        _fetch(name, kind, kind.files, root)
    data = kind(root=str(root))  # type: ignore[call-arg]
    held_out = "no test samples" if data.test_x is None else f"{len(data.test_x):,} test samples"
    print(f"  read: {len(data.train_x):,} training samples of shape {list(data.shape)}, {held_out}")
    print(f"  from: {', '.join(map(str, kind.files.existing_paths(root)))}")


def _fetch(name: str, kind: type[Dataset], files: Files, root: Path) -> None:
    """Download what is missing."""
    filenames = " and ".join(files.forms[-1])
    if files.is_manual_download:
        raise MissingDataError(
            f"{name} cannot be fetched without a login; put {filenames} from {files.source} in {root}"
        )
    print(f"  absent under {root}; fetching it from {files.url or files.source}", flush=True)
    try:
        if files.torchvision:
            kind(root=str(root), download=True)  # type: ignore[call-arg]
        else:
            files.fetch(root)
    except Exception as error:  # a network, a mirror or a damaged archive may raise any error
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise MissingDataError(
            f"{name} could not be fetched ({error_text(cause)}); on a machine with a network run `fedsim data {name} "
            "--root "
            f"FOLDER`, then put {filenames} from there in {root} (published at {files.url or files.source})"
        ) from error
