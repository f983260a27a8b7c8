"""Checks of a `Dataset` made by hand, before a run: inconsistent attributes raise an error of one sentence."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.dataset import NO_LABEL, Dataset

INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_dataset(data: Dataset, loss: Any = None) -> None:
    """Check that the attributes of a data set are consistent: types, lengths, shapes, labels, owners, normalisation.

    Data sets of fedsim's own classes were checked when they were read; for these, only options common to all data sets,
    such as augmentation, are checked.

    Args:
        data: the data set.
        loss: the run's, where it is not the data set's own.

    Raises:
        ConfigError: naming the data set, the attribute, and what would work.
    """
    if not isinstance(data, Dataset):
        raise ConfigError(
            f"dataset is a {type(data).__name__}; give a fedsim.data.datasets.Dataset, or TorchData of yours"
        )
    prefix = f"dataset={data.name}"
    is_cropped = data.augment is not None and data.augment.active and isinstance(data.train_x, Tensor)
    if is_cropped and not data.stream and data.train_x.dim() != 4:
        raise ConfigError(
            f"{prefix}: dataset.augment crops and flips images [C, H, W], and inputs have the shape "
            f"{list(data.train_x.shape[1:])}; use dataset/augment=none"
        )
    if data.stream or (type(data) is not Dataset and type(data).__module__.startswith("fedsim.")):
        return
    _check_field_types(prefix, data)
    _check_lengths(prefix, data)
    _check_labels(prefix, data, data.loss if loss is None else loss)
    _check_owners(prefix, data)
    _check_pixel_normalisation(prefix, data)


def _check_field_types(source: str, data: Dataset) -> None:
    fields = {name: getattr(data, name) for name in ("train_x", "train_y", "test_x", "test_y")}
    fields |= {name: getattr(data, name) for name in ("owners", "test_owners", "assignable_samples", "optimum")}
    fields |= {f"more.{name}": value for name, value in data.more.items()}
    fields |= {f"test_more.{name}": value for name, value in data.test_more.items()}
    for name, value in fields.items():
        if isinstance(value, Tensor) or (value is None and name != "train_x"):
            continue
        raise ConfigError(f"{source}: {name} is a {type(value).__name__}; give a tensor, such as torch.as_tensor(…)")
    if data.train_x.dim() == 0 or not len(data.train_x):
        raise ConfigError(f"{source}: train_x holds no samples; give a tensor [N, …]")
    if data.train_x.is_complex():
        raise ConfigError(f"{source}: train_x is complex; give real numbers, such as torch.view_as_real(…)")


def _check_lengths(source: str, data: Dataset) -> None:
    for split, x, y in (("train", data.train_x, data.train_y), ("test", data.test_x, data.test_y)):
        if x is not None and y is not None and (y.dim() == 0 or len(y) != len(x)):
            targets = "one target" if y.dim() == 0 else f"{len(y)} targets"
            raise ConfigError(f"{source}: {split}_y holds {targets} for {len(x)} samples; give one each")
    if data.train_y is not None and (data.test_x is None) != (data.test_y is None):
        given_name, missing_name = ("test_x", "test_y") if data.test_y is None else ("test_y", "test_x")
        raise ConfigError(f"{source}: {given_name} is given and {missing_name} is None; give both, or neither")
    for name, train, test in (("x", data.train_x, data.test_x), ("y", data.train_y, data.test_y)):
        if train is None or test is None:
            continue
        if train.shape[1:] != test.shape[1:] or _input_kind(train) != _input_kind(test):
            descriptions = [
                f"{list(tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}" for tensor in (test, train)
            ]
            raise ConfigError(
                f"{source}: test_{name} has entries {descriptions[0]}, train_{name} "
                f"{descriptions[1]}; make them the same"
            )


def _input_kind(values: Tensor) -> tuple[bool, bool]:
    """The kind of the inputs: pixels, tokens or numbers."""
    return values.dtype == torch.uint8, values.is_floating_point()


def _check_labels(name: str, data: Dataset, loss: Any) -> None:
    if data.classes is None:
        return
    if isinstance(data.classes, bool) or not isinstance(data.classes, numbers.Integral) or data.classes < 1:
        raise ConfigError(f"{name}: classes={data.classes!r} must be a whole number of at least 1")
    if data.label_names is not None and len(data.label_names) != data.classes:
        raise ConfigError(f"{name}: label_names holds {len(data.label_names)} names for classes={data.classes}")
    for split, y in (("train_y", data.train_y), ("test_y", data.test_y)):
        if y is None:
            continue
        if loss == "cross_entropy" and (y.dtype != torch.int64) and (y.dim() == 1 or not y.is_floating_point()):
            raise ConfigError(
                f"{name}: {split} is {str(y.dtype).removeprefix('torch.')}, and labels are int64; give {split}.long()"
            )
        if y.dtype not in INTEGER_DTYPES or (y.dim() > 1 and loss != "cross_entropy"):
            continue
        invalid_mask = (y < 0) | (y >= data.classes)
        invalid_mask = invalid_mask & (y != NO_LABEL) if y.dim() > 1 else invalid_mask
        if invalid_mask.any():
            raise ConfigError(
                f"{name}: {split} holds the label {int(y[invalid_mask][0])}, but classes={data.classes} are 0 to "
                f"{data.classes - 1}; renumber the labels, or raise classes"
            )


def _check_owners(name: str, data: Dataset) -> None:
    _check_owner_numbers(name, data)
    if data.test_owners is not None and data.owners is None:
        raise ConfigError(f"{name}: test_owners is given and owners is None; give both, or neither")
    if data.assignable_samples is not None and len(data.assignable_samples):
        smallest, largest = int(data.assignable_samples.min()), int(data.assignable_samples.max())
        if smallest < 0 or largest >= len(data.train_x):
            raise ConfigError(f"{name}: assignable_samples names samples outside 0 to {len(data.train_x) - 1}")
    if data.owners is not None:
        _check_clients(name, data, data.owners)


def _check_owner_numbers(source: str, data: Dataset) -> None:
    """Check type, shape and number of client and sample numbers."""
    for name, owners, x in (
        ("owners", data.owners, data.train_x),
        ("test_owners", data.test_owners, data.test_x),
        ("assignable_samples", data.assignable_samples, None),
    ):
        if owners is None:
            continue
        if owners.dtype != torch.int64 or owners.dim() != 1:
            kind = f"{list(owners.shape)} {str(owners.dtype).removeprefix('torch.')}"
            raise ConfigError(f"{source}: {name} is {kind}; give whole numbers, int64 [N]")
        if name != "assignable_samples" and len(owners) != (0 if x is None else len(x)):
            raise ConfigError(f"{source}: {name} holds {len(owners)} numbers for {0 if x is None else len(x)} samples")


def _check_clients(name: str, data: Dataset, owners: Tensor) -> None:
    """Check that all attributes that refer to clients agree on the number of clients."""
    training_owners = owners if data.assignable_samples is None else owners[data.assignable_samples]
    if not len(training_owners):
        raise ConfigError(f"{name}: owners contains no client; clients are numbered 0 to m − 1")
    if int(training_owners.min()) < 0:
        raise ConfigError(f"{name}: owners holds {int(training_owners.min())}; clients are numbered 0 to m − 1")
    num_clients = int(owners.max()) + 1
    if data.test_owners is not None and len(data.test_owners) and int(data.test_owners.max()) >= num_clients:
        raise ConfigError(
            f"{name}: test_owners names client {int(data.test_owners.max())}, but owners has {num_clients} clients"
        )
    if data.client_names is not None and len(data.client_names) != num_clients:
        raise ConfigError(f"{name}: client_names holds {len(data.client_names)} names for {num_clients} clients")


def _check_pixel_normalisation(source: str, data: Dataset) -> None:
    if (data.mean is None) != (data.std is None):
        raise ConfigError(f"{source}: mean and std belong together; give both, or neither")
    if data.mean is None or data.std is None:
        return
    channels = data.train_x.shape[1] if data.train_x.dim() > 1 else 1
    for name, values in (("mean", data.mean), ("std", data.std)):
        if len(values) not in (1, channels):
            raise ConfigError(f"{source}: {name} holds {len(values)} numbers for {channels} channels; give one each")
        for value in values:
            (checks.check_positive if name == "std" else checks.check_finite)(f"{source}: {name}", value)
