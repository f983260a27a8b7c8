"""Base class of your own data sets: converts samples of any source to a `Dataset`."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import Count, Fraction, OneOf
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.augment import CropFlip
from fedsim.data.datasets.dataset import Dataset
from fedsim.data.datasets.own import samples as tensors
from fedsim.data.datasets.own.samples import RawSamples, client_names_of_samples, sample_chunk_slices, sort_names
from fedsim.data.datasets.own.targets import TASKS, labels, per_position_labels, regression_targets

log = logging.getLogger(__name__)

DEFAULT_TEST_FRACTION = 0.2  # used if the data have no test samples

EncodeFunction = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


class UserDataset(Dataset):
    """Your own samples, checked: data that cannot be trained on raise an error before anything is written.

    Labels of any values become 0 … C − 1; their original names are in `label_names`. Clients of any names become 0 …
    m − 1; their names are in `client_names`.

    Args:
        task: 'classification', 'regression' for targets that are numbers (squared loss), or 'positions' for targets
            [N, …] with a label 0 … C − 1 for each position of the output, −100 for none.
        classes: C, if labels are 0 … C − 1 already, not all of which need to occur; None numbers the labels that occur.
        inputs: 'numbers', 'tokens' or 'pixels'; None: floating-point inputs are numbers and bytes are pixels.
        channels: of images, 'first' or 'last'; None: inferred from the shape.
        standardise: whether features (of pixels: channels) get mean 0 and variance 1 over the training samples.
        test_fraction: share of every client's samples (of all samples, if they belong to no client) held out for
            testing, ⌊share · n_i⌋ at random; None: 0.2 if the data have no test samples, else none.
        min_samples: clients with fewer training samples (before samples are held out) are excluded with all their
            samples.
        seed: of the held-out samples; the same for every replicate.
        augment: random crop and flip of training images.
    """

    def __init__(  # noqa: PLR0913 (the parameters are configuration keys)
        self,
        name: str,
        train: RawSamples,
        test: RawSamples | None,
        *,
        task: Annotated[str, OneOf(*TASKS)] = "classification",
        classes: Count | None = None,
        inputs: Annotated[str, OneOf(*tensors.INPUT_KINDS)] | None = None,
        channels: Annotated[str, OneOf(*tensors.CHANNEL_POSITIONS)] | None = None,
        standardise: bool = False,
        test_fraction: Fraction | None = None,
        min_samples: Count = 1,
        seed: int = 0,
        augment: CropFlip | None = None,
        encode: EncodeFunction | None = None,
    ) -> None:
        if classes == 1:
            raise ConfigError(key="classes", value=1, needs="is fewer than two classes; give at least 2")
        splits = [train] if test is None else [train, test]
        input_tensors = [tensors.input_array(source, inputs, channels, encode is not None) for source in splits]
        require_equal_shapes(splits[-1], "inputs", input_tensors)
        targets, class_count, label_names = read_targets(splits, [len(x) for x in input_tensors], task, classes)
        owners, test_owners, clients = owners_of(splits, [len(x) for x in input_tensors], min_samples)
        x, y, is_memory_mapped = input_tensors[0], targets[0], any(split.memory_mapped for split in splits)
        test_x, test_y = (None, None) if test is None else (input_tensors[1], targets[1])
        if test_x is not None and test_y is not None and test_owners is not None:
            test_x, test_y, test_owners = training_client_samples(test_x, test_y, test_owners)
        kept_indices = torch.arange(len(x)) if owners is None else (owners >= 0).nonzero()[:, 0]
        fraction = held_out_fraction(test_fraction, test)
        if fraction:
            test_indices, kept_indices = held_out_indices(kept_indices, owners, fraction, seed)
            test_x, test_y, test_owners = (
                x[test_indices],
                y[test_indices],
                None if owners is None else owners[test_indices],
            )
        if len(kept_indices) < len(x) and not is_memory_mapped:  # a memory map is not copied
            x, y, owners = x[kept_indices], y[kept_indices], None if owners is None else owners[kept_indices]
        if encode is not None:
            x, test_x = encode(x, test_x)
        mean = std = None
        if standardise and x.dtype == torch.uint8:
            mean, std = channel_statistics(x, kept_indices if is_memory_mapped else None)
        elif standardise:
            check_standardisable(x, is_memory_mapped)
            x, test_x = standardise_features(x, test_x)
        super().__init__(
            name,
            x,
            y,
            test_x,
            test_y,
            classes=class_count,
            loss="squared" if class_count is None else "cross_entropy",
            mean=mean,
            std=std,
            owners=owners,
            test_owners=test_owners,
            augment=augment,
            client_names=clients,
            label_names=label_names,
            assignable_samples=kept_indices if len(kept_indices) < len(x) else None,
            memory_mapped=is_memory_mapped,
        )


def read_targets(
    sources: list[RawSamples], counts: list[int], task: str, classes: int | None
) -> tuple[list[Tensor], int | None, tuple[str, ...] | None]:
    """The targets of each part as tensors, the number of classes, and the names of the labels; None for none."""
    if task == "classification":
        targets, names = labels(sources, counts, classes)
        return targets, len(names), names
    class_count = None
    if task == "positions":
        targets, class_count = per_position_labels(sources, counts, classes)
    else:
        targets = [regression_targets(source, count) for source, count in zip(sources, counts, strict=True)]
    require_equal_shapes(sources[-1], "targets", targets)
    return targets, class_count, None


def training_client_samples(x: Tensor, y: Tensor, owners: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The test samples of clients that train; those of other clients, marked by −1, are excluded."""
    trained_indices = (owners >= 0).nonzero()[:, 0]
    if len(trained_indices) == len(owners):
        return x, y, owners
    log.info("dataset: %d test samples of clients that do not train are excluded", len(owners) - len(trained_indices))
    return x[trained_indices], y[trained_indices], owners[trained_indices]


def require_equal_shapes(test: RawSamples, sample_noun: str, tensor_list: list[Tensor]) -> None:
    """Check that training and test samples have equal shape and kind."""
    kinds = [(x.shape[1:], x.is_floating_point()) for x in tensor_list]
    if kinds[0] != kinds[-1]:
        shapes = [f"{list(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}" for x in tensor_list]
        raise ConfigError(
            f"{test.source}: test {sample_noun} are {shapes[-1]}, training {sample_noun} {shapes[0]}; "
            "make them the same"
        )


def owners_of(
    sources: list[RawSamples], counts: list[int], min_samples: int
) -> tuple[Tensor | None, Tensor | None, tuple[str, ...] | None]:
    """The clients to which samples belong.

    Returns:
        [N] the client of every training sample, −1 for clients with too few samples; [N_test] the client of each test
        sample, −1 likewise, or None if test samples belong to no client; the clients' names. All None if samples do not
        belong to clients.
    """
    names_by_part = [client_names_of_samples(source, count) for source, count in zip(sources, counts, strict=True)]
    of_train, of_test = names_by_part[0], names_by_part[1] if len(names_by_part) > 1 else None
    if of_train is None:
        if of_test is not None:
            raise ConfigError(
                f"{sources[-1].source}: test samples have clients but training samples have none; give both"
            )
        if min_samples > 1:
            raise ConfigError(
                key="min_samples",
                value=min_samples,
                needs="needs samples that belong to clients, and these do not; set it to 1",
            )
        return None, None, None
    sizes = collections.Counter(of_train)
    client_names = sort_names({name for name, size in sizes.items() if size >= min_samples})
    if not client_names:
        raise ConfigError(
            f"{{min_samples}}={min_samples} leaves no client, since the largest client of {sources[0].source} has "
            f"{max(sizes.values())} samples; lower it",
            mentions=("min_samples",),
        )
    if len(client_names) < len(sizes):
        log.info(
            "dataset: %d clients with fewer than %d samples are excluded", len(sizes) - len(client_names), min_samples
        )
    number = {name: index for index, name in enumerate(client_names)}
    owners = torch.tensor([number.get(name, -1) for name in of_train])
    if of_test is None or not number.keys() & set(of_test):
        return owners, None, tuple(client_names)
    return owners, torch.tensor([number.get(name, -1) for name in of_test]), tuple(client_names)


def held_out_fraction(fraction: float | None, test: RawSamples | None) -> float:
    """The share of training samples that is held out for testing."""
    if fraction is None:
        return DEFAULT_TEST_FRACTION if test is None else 0.0
    if fraction and test is not None:
        raise ConfigError(
            f"{{test_fraction}}={fraction} holds samples out, but the data already have test samples; set it to null",
            mentions=("test_fraction",),
        )
    if fraction == 1:
        raise ConfigError(key="test_fraction", value=1, needs="leaves no training samples; lower it")
    return fraction


def held_out_indices(indices: Tensor, owners: Tensor | None, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the held-out samples, ⌊share · n_i⌋ at random of every client, and of the others; ascending."""
    draw = rng.generator(seed, rng.Purpose.DATA)
    owner = np.zeros(len(indices), dtype=np.int64) if owners is None else owners[indices].numpy()
    shuffled = np.lexsort((draw.random(len(owner)), owner))
    sizes = np.bincount(owner)
    position = np.empty(len(owner), dtype=np.int64)
    position[shuffled] = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    held_out_mask = torch.from_numpy(position < np.minimum((sizes * share + 1e-9).astype(np.int64), sizes - 1)[owner])
    if not held_out_mask.any():
        raise ConfigError(
            f"{{test_fraction}}={share} holds out no sample, since the largest client has {sizes.max()} samples; "
            "raise it, or set it to 0",
            mentions=("test_fraction",),
        )
    return indices[held_out_mask], indices[~held_out_mask]


def check_standardisable(x: Tensor, memory_mapped: bool) -> None:
    """Check that inputs can be standardised."""
    if not x.is_floating_point():
        raise ConfigError(
            "{standardise}=true scales numbers and pixels, but these are tokens; set it to false",
            mentions=("standardise",),
        )
    if memory_mapped:
        raise ConfigError(
            "{standardise}=true would read the whole file into memory; standardise the data before saving them, or "
            "save bytes",
            mentions=("standardise",),
        )


def standardise_features(train: Tensor, test: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Features of mean 0 and variance 1 over the training samples; a constant feature becomes 0."""
    mean, std = train.double().mean(0), train.double().std(0, correction=0)
    varying_mask = (train != train[:1]).any(0)  # rounding gives equal numbers a standard deviation slightly above 0
    scale = torch.where(varying_mask & (std > 0), 1 / std.clamp(min=torch.finfo(torch.float64).tiny), 0.0)

    def standardised(x: Tensor) -> Tensor:
        return ((x.double() - mean) * scale).to(torch.float32)

    return standardised(train), None if test is None else standardised(test)


def channel_statistics(x: Tensor, indices: Tensor | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of every channel of uint8 images [N, C, …], in units of [0, 1]."""
    channels = x.shape[1]
    total = torch.zeros(2, channels, dtype=torch.float64)
    count = 0
    for row_selection in sample_chunk_slices(x):
        chunk = (
            x[row_selection]
            if indices is None
            else x[indices[(indices >= row_selection.start) & (indices < row_selection.stop)]]
        )
        flat = chunk.double().div(255).transpose(0, 1).reshape(channels, -1)
        total += torch.stack([flat.sum(1), flat.square().sum(1)])
        count += flat.shape[1]
    mean = total[0] / count
    std = (total[1] / count - mean.square()).clamp(min=0).sqrt()
    return tuple(mean.tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())
