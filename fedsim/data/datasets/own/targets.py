"""Your own targets: labels of any type, mapped to 0 … C − 1, labels of positions, or numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import ConfigError
from fedsim.data.datasets.dataset import NO_LABEL
from fedsim.data.datasets.own.samples import (
    RawSamples,
    check_scalar_entries,
    client_or_label_name,
    sort_names,
    to_array,
)

TASKS = ("classification", "regression", "positions")


def regression_targets(samples: RawSamples, count: int) -> Tensor:
    """[N] or [N, k] float32 targets of regression."""
    y = _raw_targets(samples, count)
    try:
        targets = torch.from_numpy(np.asarray(y, dtype=np.float32))
    except (TypeError, ValueError):
        invalid_value = next((value for value in y.flatten().tolist() if not _is_numeric(value)), None)
        raise ConfigError(
            f"{samples.source}: the target {invalid_value!r} is not a number, which {{task}}=regression needs",
            mentions=("task",),
        ) from None
    bad_rows = (~torch.isfinite(targets)).reshape(count, -1).any(1).nonzero()
    if len(bad_rows):
        raise ConfigError(
            f"{samples.source}: the target of {samples.sample_label(int(bad_rows[0, 0]))} is missing or not finite"
        )
    return targets[:, 0] if targets.dim() == 2 and targets.shape[1] == 1 else targets


def labels(sources: list[RawSamples], counts: list[int], classes: int | None) -> tuple[list[Tensor], tuple[str, ...]]:
    """[N] int64 labels 0 … C − 1 of every part, and the name of each label in the data.

    Args:
        sources: training and test samples.
        counts: of their samples.
        classes: C, if labels are 0 … C − 1 already, not all of which need to occur; None numbers the labels that occur.

    Raises:
        ConfigError: a label is missing or a number with decimals, or there is only one class.
    """
    labels_by_part = [_sample_label_names(source, count) for source, count in zip(sources, counts, strict=True)]
    names = sort_names(set().union(*labels_by_part)) if classes is None else [str(label) for label in range(classes)]
    if len(names) < 2:
        raise ConfigError(
            f"{sources[0].source}: all labels are {names[0]!r}; classification needs at least two classes"
        )
    number = {name: index for index, name in enumerate(names)}
    for source, part_labels in zip(sources, labels_by_part, strict=True):
        unknown_position = next((position for position, name in enumerate(part_labels) if name not in number), None)
        if unknown_position is not None:
            raise ConfigError(
                f"{source.source}: {source.sample_label(unknown_position)} has the label "
                f"{part_labels[unknown_position]!r}, but "
                f"{{classes}}={classes} are 0 to {len(names) - 1}; correct it, or set {{classes}}=null",
                mentions=("classes",),
            )
    return [torch.tensor([number[name] for name in part_labels]) for part_labels in labels_by_part], tuple(names)


def per_position_labels(sources: list[RawSamples], counts: list[int], classes: int | None) -> tuple[list[Tensor], int]:
    """[N, …] int64 labels of positions, 0 … C − 1 or −100 for none, of every part, and C.

    Raises:
        ConfigError: they are no whole numbers in this range, or a sample has no position with a label.
    """
    targets = [_raw_targets(source, count) for source, count in zip(sources, counts, strict=True)]
    for source, y in zip(sources, targets, strict=True):
        if y.dtype.kind not in "iu" or y.ndim < 2:
            raise ConfigError(
                f"{source.source}: {{task}}=positions needs whole numbers [N, …], one per position, but y holds "
                f"{y.dtype} of shape {list(y.shape)}",
                mentions=("task",),
            )
    class_count = classes or 1 + max(int(y.max()) for y in targets)
    for source, y in zip(sources, targets, strict=True):
        is_label = (y >= 0) & (y < class_count)
        if not (is_label | (y == NO_LABEL)).all():
            position = int(np.argwhere(~is_label & (y != NO_LABEL))[0, 0])
            raise ConfigError(
                f"{source.source}: {source.sample_label(position)} has a label outside 0 to {class_count - 1}; a "
                f"position without a label is {NO_LABEL}"
            )
        has_label = is_label.reshape(len(y), -1).any(1)
        if not has_label.all():
            raise ConfigError(
                f"{source.source}: no position of {source.sample_label(int(np.flatnonzero(~has_label)[0]))} has a label"
            )
    return [torch.from_numpy(y.astype(np.int64)) for y in targets], class_count


def _sample_label_names(samples: RawSamples, count: int) -> list[str]:
    """[N] the name of each sample's label in the data."""
    y = _raw_targets(samples, count)
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1:
        raise ConfigError(f"{samples.source}: y has the shape {list(y.shape)}, but a label is one value per sample")
    values = y if y.dtype.kind == "f" else _parsed_numbers(y)
    if values is not None:
        integer_mask = np.isnan(values) | (values == np.floor(values)) & np.isfinite(values)
        if not integer_mask.all():
            position = int(np.flatnonzero(~integer_mask)[0])
            raise ConfigError(
                f"{samples.source}: {samples.sample_label(position)} has the target "
                f"{values[position]:g}, which is not a label; "
                "to predict numbers, set {task}=regression",
                mentions=("task",),
            )
    sample_labels = [client_or_label_name(value) for value in y.tolist()]
    missing_position = next((position for position, name in enumerate(sample_labels) if name is None), None)
    if missing_position is not None:
        raise ConfigError(
            f"{samples.source}: {samples.sample_label(missing_position)} has no label; add one, or exclude the sample"
        )
    return [str(name) for name in sample_labels]


def _raw_targets(samples: RawSamples, count: int) -> np.ndarray:
    """[N, …] before conversion."""
    if samples.y is None:
        raise ConfigError(f"{samples.source}: there are inputs but no targets; add y")
    y = to_array(samples.source, "y", samples.y)
    if not y.ndim or len(y) != count:
        raise ConfigError(f"{samples.source}: y holds {y.shape[0] if y.ndim else 1} targets for {count} samples")
    check_scalar_entries(
        samples.source, "y", y,
        "give one label, number, or array of fixed shape per sample, for instance with a Dataset that returns (image, "
        "target['labels'])",
    )  # fmt: skip
    return y


def _parsed_numbers(y: np.ndarray) -> np.ndarray | None:
    """[N] strings that are all numbers, as numbers."""
    if y.dtype.kind not in "UO":
        return None
    try:
        return y.astype(np.float64)
    except (TypeError, ValueError):
        return None


def _is_numeric(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
