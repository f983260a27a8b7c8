"""Checks of your own samples (lists, NumPy arrays, tensors) and their conversion to tensors."""

from __future__ import annotations

import datetime
import enum
import numbers
import pathlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import ConfigError

INPUT_KINDS = ("numbers", "tokens", "pixels")
CHANNEL_POSITIONS = ("first", "last")
IMAGE_CHANNEL_COUNTS = (1, 3, 4)  # channels that an image may have
SCALAR_TYPES = (
    str, bytes, numbers.Number, np.generic, type(None), datetime.date, datetime.time, datetime.timedelta,
    pathlib.PurePath, enum.Enum,
)  # fmt: skip
NUMBERS_CHECKED_AT_ONCE = 2**24  # numbers that are checked at once, since there may be more than memory holds


@dataclass
class RawSamples:
    """The training or the test samples, before conversion.

    Attributes:
        source: their origin, for messages.
        x: [N, …] inputs: an array, a tensor, lists; a memory map is never read whole.
        y: [N, …] targets of any kind, or None.
        clients: [N] their clients, of any type, or None.
        sample_label: the name in messages of the sample with this number.
        channels: position of image channels, if the data format defines it.
    """

    source: str
    x: Any
    y: Any = None
    clients: Any = None
    sample_label: Callable[[int], str] = "sample {}".format
    channels: str | None = None

    @property
    def memory_mapped(self) -> bool:
        """Whether the input is a memory-mapped file."""
        return isinstance(self.x, np.memmap)


def to_array(source: str, name: str, values: Any) -> np.ndarray:
    """Convert any sequence to an array of numbers, words or, failing these, objects.

    Raises:
        ConfigError: entries differ in shape, or there are none.
    """
    if isinstance(values, Tensor):
        if values.layout != torch.strided or values.is_quantized:
            kind = "quantised" if values.is_quantized else "sparse"
            raise ConfigError(f"{source}: {name} is a {kind} tensor; give a dense one")
        values = values.detach().cpu().resolve_conj().resolve_neg()
        return values.float().numpy() if values.dtype == torch.bfloat16 else values.numpy()
    if isinstance(values, np.ndarray):
        _refuse_masked_array(source, name, values)
        return values
    if hasattr(values, "to_numpy"):  # a column of pandas, polars or pyarrow
        return np.asarray(values.to_numpy())
    if not isinstance(values, Iterable):
        raise ConfigError(f"{source}: {name} is {values!r:.40}, not one value per sample")
    entries = list(values)
    if any(isinstance(value, Tensor) for value in entries):
        entries = [value.detach().cpu().numpy() if isinstance(value, Tensor) else value for value in entries]
    for value in entries:
        _refuse_masked_array(source, name, value)
    shapes = {np.shape(value) for value in entries} if _is_rectangular(entries) else {(0,), (1,)}
    if len(shapes) > 1:
        shape_names = sorted({str(list(shape_of(value))) for value in entries})[:2]
        raise ConfigError(
            f"{source}: {name} is ragged: its entries differ in shape ({' and '.join(shape_names)}); "
            "give them the same shape"
        )
    kinds = {type(value) for value in entries}
    mixed = len(kinds) > 1 and bool(kinds & {str, bytes, type(None)})  # NumPy would silently turn 1 into '1'
    return np.array(entries, dtype=object) if mixed else np.asarray(entries)


def _refuse_masked_array(source: str, name: str, value: Any) -> None:
    """Raise an error for a masked array with masked values: NumPy would use the values under the mask."""
    if np.ma.is_masked(value):
        raise ConfigError(f"{source}: {name} is a masked array with masked values; fill them in, or leave them out")


def _is_rectangular(entries: list[Any]) -> bool:
    """Whether all entries have the same shape."""
    try:
        for value in entries:
            np.shape(value)
    except ValueError:
        return False
    return True


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of an entry; for a ragged one, its outer dimensions."""
    try:
        return tuple(np.shape(value))
    except ValueError:
        return (len(value),)


def input_array(samples: RawSamples, kind: str | None, channels: str | None, allows_missing: bool = False) -> Tensor:
    """[N, …] inputs: uint8 pixels with channels first, floating-point numbers, or int64 tokens.

    Args:
        samples: the samples.
        kind: 'numbers', 'tokens' or 'pixels'; None: floats are numbers, and bytes are pixels.
        channels: of images, 'first' or 'last'; None: the dimension of size 1, 3 or 4.
        allows_missing: whether NaN may mark missing values.

    Raises:
        ConfigError: they are not numbers, not finite, or empty.
    """
    source, x, channels = samples.source, to_array(samples.source, "x", samples.x), samples.channels or channels
    if not x.ndim or not len(x):
        raise ConfigError(f"{source}: x holds no samples")
    if x.dtype == bool:
        x, kind = x.astype(np.float32), kind or "numbers"
    x = _numeric_array(source, x)
    kind = _input_kind(source, x, kind)
    if kind == "pixels":
        return channels_first_images(source, torch.from_numpy(_writable_array(x)), channels)
    if kind == "tokens":
        tensor = _token_tensor(samples, x)
    else:
        tensor = _float_tensor(x)
        if not allows_missing:
            require_finite(samples, tensor)
    if channels is not None and tensor.dim() == 4:
        return channels_first_images(source, tensor, channels)
    return tensor


def _numeric_array(source_label: str, x: np.ndarray) -> np.ndarray:
    """[N, …] numbers in this machine's byte order, at least one per sample."""
    if x.dtype.kind not in "iuf":
        raise ConfigError(f"{source_label}: x holds {_kind_text(x)}, but inputs must be numbers; encode them first")
    if x.ndim == 1:
        x = x[:, None]
    if 0 in x.shape:
        raise ConfigError(f"{source_label}: x has the shape {list(x.shape)}, so its samples are empty")
    if not x.dtype.isnative:  # PyTorch does not support the other byte order
        x = x.astype(x.dtype.newbyteorder("="))
    return x


def _token_tensor(samples: RawSamples, x: np.ndarray) -> Tensor:
    smallest_token = min(int(x[row_selection].min()) for row_selection in sample_chunk_slices(x))
    if smallest_token < 0:
        raise ConfigError(f"{samples.source}: x holds the token {smallest_token}; tokens count from 0")
    if not (samples.memory_mapped and x.dtype.kind == "i"):  # a memory-mapped file stays on disk; a copy would not
        x = x.astype(np.int64)
    return torch.from_numpy(_writable_array(x))


def _float_tensor(x: np.ndarray) -> Tensor:
    if x.dtype.kind != "f" or x.dtype.itemsize > 8:  # PyTorch has no float wider than 64 bits
        x = x.astype(np.float64 if x.dtype.kind == "f" else np.float32)
    return torch.from_numpy(_writable_array(x))


def _input_kind(source: str, x: np.ndarray, kind: str | None) -> str:
    """The kind of the inputs."""
    if kind is None and x.dtype.kind != "f" and x.dtype != np.uint8:
        raise ConfigError(
            f"{source}: x holds whole numbers ({x.dtype}); set {{inputs}} to numbers, or to tokens if they encode "
            "something else",
            mentions=("inputs",),
        )
    kind = kind or ("numbers" if x.dtype.kind == "f" else "pixels")
    if kind == "pixels" and x.dtype != np.uint8:
        raise ConfigError(
            f"{source}: {{inputs}}=pixels are bytes, but x holds {x.dtype}; give uint8, or numbers",
            mentions=("inputs",),
        )
    if kind == "tokens" and x.dtype.kind == "f":
        raise ConfigError(f"{source}: {{inputs}}=tokens are whole numbers, but x holds {x.dtype}", mentions=("inputs",))
    return kind


def _writable_array(x: np.ndarray) -> np.ndarray:
    """An array that PyTorch accepts as writable; a memory map stays one."""
    return x if x.flags.writeable and all(stride >= 0 for stride in x.strides) else x.copy()


def channels_first_images(source: str, x: Tensor, channels: str | None) -> Tensor:
    """[N, C, H, W] of images [N, H, W], [N, H, W, C] or [N, C, H, W]; others as they are."""
    if x.dim() == 3:
        return x[:, None]
    if x.dim() != 4:
        return x
    channels_first, channels_last = x.shape[1] in IMAGE_CHANNEL_COUNTS, x.shape[3] in IMAGE_CHANNEL_COUNTS
    if channels is None and channels_first == channels_last:
        raise ConfigError(
            f"{source}: whether images {list(x.shape)} have their channels first or last cannot be inferred; "
            "set {channels}=first or last",
            mentions=("channels",),
        )
    return x.movedim(3, 1) if channels == "last" or (channels is None and channels_last) else x


def sample_chunk_slices(x: Any) -> list[slice]:
    """Slices of samples that are small enough to be checked at once."""
    step = max(1, NUMBERS_CHECKED_AT_ONCE // max(1, int(np.prod(x.shape[1:]))))
    return [slice(start, start + step) for start in range(0, len(x), step)]


def require_finite(samples: RawSamples, x: Tensor) -> None:
    """Refuse NaN and infinities, naming the first sample that has one."""
    for row_selection in sample_chunk_slices(x):
        nonfinite_mask = ~torch.isfinite(x[row_selection]).flatten(1).all(1)
        if nonfinite_mask.any():
            number = row_selection.start + int(nonfinite_mask.nonzero()[0, 0])
            value = x[number][~torch.isfinite(x[number])].flatten()[0].item()
            raise ConfigError(
                f"{samples.source}: {samples.sample_label(number)} holds {value} in x; exclude such samples, or impute "
                "the value"
            )


def client_names_of_samples(samples: RawSamples, count: int) -> list[str] | None:
    """[N] the name of each sample's client as in the data; None if the data name no clients.

    Raises:
        ConfigError: there is not one per sample, or one is missing.
    """
    if samples.clients is None:
        return None
    clients = to_array(samples.source, "clients", samples.clients)
    if clients.shape != (count,):
        raise ConfigError(
            f"{samples.source}: clients has the shape {list(clients.shape)} for {count} samples; give one client per "
            "sample"
        )
    check_scalar_entries(samples.source, "clients", clients, "give each sample's client as a word or a number")
    sample_clients = [client_or_label_name(value) for value in clients.tolist()]
    missing_position = next((number for number, name in enumerate(sample_clients) if name is None), None)
    if missing_position is not None:
        raise ConfigError(
            f"{samples.source}: {samples.sample_label(missing_position)} has no client; give one, or exclude the sample"
        )
    return [str(name) for name in sample_clients]


def check_scalar_entries(source: str, name: str, values: np.ndarray, remedy: str) -> None:
    """Raise an error for entries that are not a single value, such as the dictionaries of detection data sets.

    Args:
        source, name: their origin and name, for messages.
        values: [N, …] entries of any kind.
        remedy: what would work.
    """
    if values.dtype != object:
        return
    invalid_entry = next(
        (value for value in values.flat if not isinstance(value, SCALAR_TYPES) and not _is_pandas_missing(value)), None
    )
    if invalid_entry is None:
        return
    keys = (
        f" with the keys {', '.join(map(str, list(invalid_entry)[:4]))}" if isinstance(invalid_entry, Mapping) else ""
    )
    raise ConfigError(
        f"{source}: {name} holds {type(invalid_entry).__name__} objects{keys}, not one value each; {remedy}"
    )


def _is_pandas_missing(value: Any) -> bool:
    """Whether it marks a missing value, including pandas' NA and NaT, whose types are not imported here."""
    return type(value).__name__ in ("NAType", "NaTType")


def client_or_label_name(value: Any) -> str | None:
    """The name of a client or label; None if missing. An integer that was converted to 3.0 is named 3."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def sort_names(client_names: set[str]) -> list[str]:
    """Sorted names: integers by size, others alphabetically."""
    all_integers = all(name.isdecimal() or (name[:1] == "-" and name[1:].isdecimal()) for name in client_names)
    return sorted(client_names, key=lambda name: (int(name), name)) if all_integers else sorted(client_names)


def _kind_text(x: np.ndarray) -> str:
    """The kind of an array's entries, in words."""
    if x.dtype == object:
        return type(next(iter(x.flat))).__name__
    return {"U": "words", "S": "words", "c": "complex numbers", "M": "dates", "m": "durations"}.get(
        x.dtype.kind, str(x.dtype)
    )
