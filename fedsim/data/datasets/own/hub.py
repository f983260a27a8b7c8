"""Data sets read by the Hugging Face library `datasets`: from the Hub, its cache, disk, or files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core.errors import ConfigError, MissingDataError
from fedsim.data.datasets.own.data import UserDataset
from fedsim.data.datasets.own.pictures import is_picture
from fedsim.data.datasets.own.samples import RawSamples, to_array
from fedsim.data.datasets.own.torch_dataset import error_text, input_array

SAVED_DATASET_FILES = ("dataset_dict.json", "state.json", "dataset_info.json")  # files that `save_to_disk` writes


class Hub(UserDataset):
    """Columns of a data set that `datasets.load_dataset` or `load_from_disk` reads. Needs the extra `hub`.

    Without `download` nothing is downloaded: only the cache, data saved to disk, and local files (builders csv, json,
    parquet, imagefolder, …) are read. Labels have the order and names of the data set's ClassLabel.

    Args:
        path: of the Hub (`ylecun/mnist`), a folder written by `save_to_disk`, or the name of a builder.
        x: column of inputs (images, lists of numbers), or a list of numeric columns.
        y: column of targets.
        client: column of the sample's client; None: the partition decides.
        config: one of several configurations of the data set.
        data_files: for a builder: a file, a list of files, or files by split, {train: a.csv, test: b.csv}.
        train, test: names of the splits; None: 'test' if it exists, else a share of `train` is held out.
        size, colours: of images, see `fedsim.data.datasets.ImageFolder`.
        download: whether to download missing data.
        **options: of `UserDataset`.
    """

    def __init__(  # noqa: PLR0913 (the parameters are configuration keys)
        self,
        path: str,
        x: str | Sequence[str],
        y: str,
        client: str | None = None,
        config: str | None = None,
        data_files: Any = None,
        train: str = "train",
        test: str | None = None,
        size: Sequence[int] | None = None,
        colours: str | None = None,
        download: bool = False,
        **options: Any,
    ) -> None:
        splits = load_splits(path, config, data_files, download)
        if test is None and "test" in splits and train != "test":
            test = "test"
        for key, name in (("train", train), ("test", test)):
            if name is not None and name not in splits:
                raise ConfigError(f"dataset.{key}={name} is not a split of {path}; it has {', '.join(splits)}")
        split_parts = [splits[name] for name in (train, test) if name is not None]
        loaded_splits = [
            read(f"{path}, {split_part.split}", split_part, x, y, client, size, colours) for split_part in split_parts
        ]
        names = getattr(split_parts[0].features[y], "names", None)
        if names is not None and options.get("task", "classification") == "classification":
            options["classes"] = len(names)
        super().__init__(path, loaded_splits[0], loaded_splits[1] if loaded_splits[1:] else None, **options)
        if names is not None and self.classes is not None:
            self.label_names = tuple(names)


def load_splits(path: str, config: str | None, data_files: Any, download: bool) -> dict[str, Any]:
    """The splits of a data set by name."""
    try:
        import datasets
    except ImportError as error:
        raise MissingDataError(
            "dataset=hub is read by datasets, which is not installed; pip install 'fedsim-torch[hub]'"
        ) from error
    folder = Path(path).expanduser()
    check_data_files(data_files)
    if config is not None and data_files is not None:
        raise ConfigError(
            f"{{config}}={config} belongs to a data set of the Hub, but data_files is set too; give one of them",
            mentions=("config",),
        )
    try:
        with restrict_hub_access(online=download):
            if any((folder / name).exists() for name in SAVED_DATASET_FILES):
                dataset = datasets.load_from_disk(str(folder))
            else:
                location = str(folder) if folder.exists() else path
                dataset = datasets.load_dataset(location, config, data_files=data_files)
    except Exception as error:  # a library, a damaged file or the network may raise any error
        remedy = "" if download else "; dataset.download=true downloads data sets of the Hub"
        reason = error_text(error)[:300]
        description = f"dataset.path={path} (config={config}, data_files={data_files})"
        raise MissingDataError(f"{description} cannot be read by datasets: {reason}{remedy}") from error
    return dict(dataset) if isinstance(dataset, dict) else {"train": dataset}


def check_data_files(data_files: Any) -> None:
    """Check `data_files`: a file, several files, or files by split."""
    of_splits = list(data_files.values()) if isinstance(data_files, dict) else [data_files]
    for of_split in of_splits:
        for name in of_split if isinstance(of_split, list) and of_split else [of_split]:
            if data_files is not None and (not isinstance(name, str) or not name):
                raise ConfigError(
                    f"{{data_files}}={data_files!r} must be a file, a list of files, or files by split, such as "
                    "{train: a.csv, test: b.csv}",
                    mentions=("data_files",),
                )


@contextlib.contextmanager
def restrict_hub_access(online: bool) -> Iterator[None]:
    """Disables progress bars and, if not online, access to the network."""
    import datasets
    from huggingface_hub import constants

    were_bars_disabled = datasets.are_progress_bars_disabled()
    offline_switches = [(datasets.config, "HF_HUB_OFFLINE"), (constants, "HF_HUB_OFFLINE")]
    previous_values = [getattr(module, name) for module, name in offline_switches]
    datasets.disable_progress_bars()
    try:
        if not online:
            for module, name in offline_switches:
                setattr(module, name, True)
        yield
    finally:
        for (module, name), value in zip(offline_switches, previous_values, strict=True):
            setattr(module, name, value)
        if not were_bars_disabled:
            datasets.enable_progress_bars()


def read(
    source: str,
    split: Any,
    x: str | Sequence[str],
    y: str,
    client: str | None,
    size: Sequence[int] | None,
    colours: str | None,
) -> RawSamples:
    """Columns of one split."""
    input_columns = [x] if isinstance(x, str) else list(x)
    if not input_columns:
        raise ConfigError(key="x", value=[], needs="names no column")
    for key, name in [*(("x", name) for name in input_columns), ("y", y), ("client", client)]:
        if name is not None and name not in split.column_names:
            raise ConfigError(
                f"dataset.{key}={name} is not a column of {source}; it has {', '.join(split.column_names)}"
            )
    if not len(split):
        raise ConfigError(f"{source} holds no samples")
    try:
        column_by_name = {
            name: list(split[name]) for name in {*input_columns, y, *([client] if client is not None else [])}
        }
    except Exception as error:  # of a column whose entries cannot be decoded
        raise MissingDataError(f"{source} cannot be read ({error_text(error)})") from error
    input_arrays = [input_array(source, column_by_name[name], size, colours) for name in input_columns]
    if not isinstance(x, str):
        for name, values in zip(input_columns, input_arrays, strict=True):
            if values.ndim != 1:
                raise ConfigError(
                    f"{source}: column {name!r} of {{x}} holds more than one number per sample; name it alone",
                    mentions=("x",),
                )
        input_arrays = [np.column_stack([to_array(source, "x", values) for values in input_arrays]).astype(np.float32)]
    pictures = all(map(is_picture, column_by_name[input_columns[0]]))
    clients = None if client is None else column_by_name[client]
    return RawSamples(source, input_arrays[0], column_by_name[y], clients, channels="first" if pictures else None)
