"""What a run is made of beside its settings: data, shares, records of availability, frozen parts.

A file of the same name may hold others tomorrow, and a run that went on with those would be neither the one nor the
other. Whole numbers (labels, pixels, tokens, who holds what) have a digest. Other numbers, whose last bits differ from
one processor to the next where they are computed, have sums by random weights, which agree to a tolerance. Of very much
every k-th row is looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import CheckpointError

if TYPE_CHECKING:
    from fedsim.run.setup import Setup

MAX_FINGERPRINTED_NUMBERS = {True: 2**28, False: 2**24}  # numbers of one array that are looked at: whole ones, others
NUMBERS_PER_BLOCK = 2**20  # of them at a time
FINGERPRINT_TOLERANCE = 1e-6  # of sums, relative to the length of the array as a vector


def content_fingerprints(run: Setup) -> dict[str, list[Any]]:
    """What stands in for everything of this run that may have come from a file, by what it is called."""
    return {name: fingerprint(values) for name, values in _arrays_by_name(run)}


def check_content(path: Path, recorded: dict[str, Any], current: dict[str, list[Any]]) -> None:
    """Refuse to go on with a checkpoint of other content; what the checkpoint does not know of is not compared.

    Raises:
        CheckpointError: something differs; the message says what.
    """
    for name in sorted(recorded.keys() & current.keys()):
        if not fingerprints_match(recorded[name], current[name]):
            raise CheckpointError(
                f"checkpoint {path} was written with other content: {name} changed since; restore what the run began "
                "with, or choose another out"
            )
    for name in sorted(recorded.keys() ^ current.keys()) if recorded else ():
        raise CheckpointError(
            f"checkpoint {path} was written with other content: {name} is {'new' if name in current else 'gone'}; "
            "restore "
            "what the run began with, or choose another out"
        )


def _arrays_by_name(run: Setup) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in vars(run.dataset).items():
        if not name.startswith("_") and name != "optimum":  # which follows from the others
            values_by_name = value if isinstance(value, dict) else {"": value}
            for part_name, array in values_by_name.items():
                if isinstance(array, (Tensor, np.ndarray)):
                    yield f"{name}{part_name and f'.{part_name}'} of the data", _host_array(array)
    for number, table in enumerate(run.tables):
        for part_name, split_table in (("", table), ("'s validation samples", table.validation)):
            if split_table is not None:
                description = f"the partition{part_name} of replicate {number}"
                yield (
                    description,
                    np.concatenate([split_table.offsets.astype(np.int64), split_table.order.astype(np.int64)]),
                )
    for name, values in run.availability.record_of().items():
        yield f"the record of availability ({name})", values
    for name, value in run.naming.constants.items():
        yield f"{name}, a frozen part of the model,", _host_array(value)


def _host_array(values: Tensor | np.ndarray) -> np.ndarray:
    """On the host, at most so many numbers of it, whole rows."""
    is_integral = values.dtype.kind not in "fc" if isinstance(values, np.ndarray) else not values.is_floating_point()
    step = max(1, -(-int(np.prod(values.shape)) // MAX_FINGERPRINTED_NUMBERS[is_integral])) if len(values.shape) else 1
    rows = values[::step] if step > 1 else values
    if isinstance(rows, np.ndarray):
        return rows
    rows = rows.detach().cpu()
    return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()


def fingerprint(values: np.ndarray) -> list[Any]:
    """Shape and digest of whole numbers; else shape, how many are finite, their length as a vector, and two sums."""
    shape = list(values.shape)
    if values.dtype.kind in "biuSU":
        return [shape, hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=12).hexdigest()]
    flat = values.reshape(-1)
    sums = np.zeros(3)
    finite = 0
    for number, block_start in enumerate(range(0, len(flat), NUMBERS_PER_BLOCK)):
        block = flat[block_start : block_start + NUMBERS_PER_BLOCK].astype(np.float64)
        finite_mask = np.isfinite(block)
        finite += int(finite_mask.sum())
        block = np.where(finite_mask, block, 0.0)
        weights = np.random.default_rng(number).uniform(0.5, 1.5, (2, len(block)))
        sums += [block @ block, *(weights @ block)]
    return [shape, finite, float(np.sqrt(sums[0])), float(sums[1]), float(sums[2])]


def fingerprints_match(recorded: Any, current: list[Any]) -> bool:
    """Do two of what `fingerprint` gives say the same?"""
    if not isinstance(recorded, list) or len(recorded) != len(current):
        return False
    if len(current) == 2 or recorded[:2] != current[:2]:
        return bool(recorded == current)
    length = abs(current[2])
    return all(
        isinstance(a, (int, float)) and abs(a - b) <= FINGERPRINT_TOLERANCE * length
        for a, b in zip(recorded[2:], current[2:], strict=True)
    )
