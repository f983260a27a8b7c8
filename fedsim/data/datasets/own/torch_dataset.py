"""Any map-style PyTorch Dataset: every sample is read once and stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.data.datasets.own.data import UserDataset
from fedsim.data.datasets.own.pictures import check_picture_options, image_pixels, is_picture, stack_images
from fedsim.data.datasets.own.samples import RawSamples, to_array

SAMPLES_READ_TWICE = 16  # samples that are read twice


class TorchData(UserDataset):
    """Samples (x, y), or mappings, of Datasets with a length: of torchvision, of another library, or your own. A
    Dataset with random samples (such as a random crop) raises an error, since samples are read once: remove such
    transforms, and use `augment`.

    Args:
        train, test: the Datasets; without `test` a share of `train` is held out.
        x, y: where inputs and targets are in a sample: an index of a tuple, or a key of a mapping.
        client: likewise for the sample's client; or an attribute of the Dataset, [N] clients. None: the partition
            decides.
        size, colours: of Pillow images, see `fedsim.data.datasets.ImageFolder`.
        name: the name of the data in reports; None: the class of `train`.
        **options: of `UserDataset`.
    """

    def __init__(
        self,
        train: Any,
        test: Any = None,
        x: int | str = 0,
        y: int | str = 1,
        client: int | str | None = None,
        size: Sequence[int] | None = None,
        colours: str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        check_picture_options(size, colours)
        keys = {"x": x, "y": y, "client": client}
        splits = [
            read(split, dataset, keys, size, colours)
            for split, dataset in (("train", train), ("test", test))
            if split == "train" or dataset is not None
        ]
        super().__init__(name or type(train).__name__, splits[0], splits[1] if splits[1:] else None, **options)


def read(
    split: str, dataset: Any, keys: dict[str, int | str | None], size: Sequence[int] | None, colours: str | None
) -> RawSamples:
    """All samples of a Dataset."""
    source = f"dataset.{split} ({type(dataset).__name__})"
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or isinstance(dataset, (str, Mapping)):
        raise ConfigError(f"{source} is not a map-style Dataset, which has a length and samples by index")
    client, client_values = keys["client"], None
    if isinstance(client, str) and hasattr(dataset, client):
        client_values, client = getattr(dataset, client), None
    count = dataset_length(source, dataset)
    values_by_role: dict[str, list[Any]] = {name: [] for name in keys}
    for number in range(count):
        sample = read_sample(source, dataset, number)
        for name, key in (keys | {"client": client}).items():
            if key is not None:
                values_by_role[name].append(copy_value(entry_of_sample(source, name, sample, key)))
        if number < SAMPLES_READ_TWICE:
            _check_repeatable(source, dataset, number, keys, values_by_role)
    if not count:
        raise ConfigError(f"{source} holds no samples")
    owners = values_by_role["client"] or None if client_values is None else client_values
    pictures = all(map(is_picture, values_by_role["x"]))
    x = input_array(source, values_by_role["x"], size, colours)
    return RawSamples(source, x, values_by_role["y"], owners, channels="first" if pictures else None)


def copy_value(value: Any) -> Any:
    """A copy of a value, since some Datasets reuse a buffer."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _check_repeatable(
    source: str,
    dataset: Any,
    number: int,
    keys: Mapping[str, int | str | None],
    values_by_role: Mapping[str, list[Any]],
) -> None:
    """Raise an error if a Dataset's sample or target differs when read again."""
    sample = read_sample(source, dataset, number)
    for name, value_noun in (("x", "sample"), ("y", "the target of sample")):
        if keys[name] is None:
            continue
        first_read, second_read = (
            np.asarray(copy_value(value))
            for value in (values_by_role[name][-1], entry_of_sample(source, name, sample, keys[name]))
        )
        if first_read.dtype != object and not np.array_equal(
            first_read, second_read, equal_nan=first_read.dtype.kind == "f"
        ):
            raise ConfigError(
                f"{source}: {value_noun} {number} differs each time it is read; remove random transforms, and use "
                "dataset/augment"
            )


def dataset_length(source: str, dataset: Any) -> int:
    """The number of samples."""
    try:
        return len(dataset)
    except Exception as error:  # a user's class may raise any error
        raise ConfigError(f"{source} has no length ({error_text(error)})") from error


def read_sample(source: str, dataset: Any, number: int) -> Any:
    """A sample."""
    try:
        return dataset[number]
    except Exception as error:  # likewise
        raise ConfigError(f"{source}: sample {number} cannot be read ({error_text(error)})") from error


def entry_of_sample(source: str, name: str, sample: Any, key: Any) -> Any:
    """The value at an index or key of a sample."""
    try:
        if isinstance(key, str) and not hasattr(sample, "keys"):
            raise TypeError  # a tensor would interpret a word as several indices
        return sample[key]
    except (LookupError, TypeError) as error:
        kind = f"the keys {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else type(sample).__name__
        raise ConfigError(f"{source}: dataset.{name}={key!r} does not occur in a sample ({kind})") from error


def input_array(source: str, values: list[Any], size: Sequence[int] | None, colours: str | None) -> np.ndarray:
    """[N, …] of all samples; Pillow images as bytes with channels first."""
    if not all(map(is_picture, values)):
        if size is not None or colours is not None:
            raise ConfigError(
                f"{source}: {{size}} and colours are for Pillow images, and x holds other values", mentions=("size",)
            )
        return to_array(source, "x", [np.asarray(value) if is_picture(value) else value for value in values])
    try:
        labelled_pixels = ((f"sample {number}", image_pixels(value, size)) for number, value in enumerate(values))
        return np.ascontiguousarray(stack_images(source, labelled_pixels, colours).transpose(0, 3, 1, 2))
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source}: an image cannot be read ({error_text(error)})") from error


def error_text(error: BaseException) -> str:
    """An error's message in one line; its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
