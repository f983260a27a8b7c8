"""Fingerprints of a run's content that its settings do not determine: data, shares, availability records, frozen
parameters.

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

MAX_FINGERPRINTED_NUMBERS = {True: 2**28, False: 2**24}  # of an array: whole ones (True), and others
NUMBERS_PER_BLOCK = 2**20  # of them at a time
FINGERPRINT_TOLERANCE = 1e-6  # tolerance of sums, relative to the norm of the array


def content_fingerprints(run: Setup) -> dict[str, list[Any]]:
    """Return the fingerprints of everything in this run that may come from a file, by name."""
    fingerprints = {name: fingerprint(values) for name, values in _arrays_by_name(run)}
    for number, table in enumerate(run.partition_tables):
        for part_name, split_table in (("", table), ("'s validation samples", table.validation)):
            if split_table is not None:
                shape = [len(split_table.offsets) + len(split_table.order)]
                fingerprints[f"the partition{part_name} of replicate {number}"] = [
                    shape,
                    _digest(split_table.offsets, split_table.order, dtype=np.int64),
                ]
    return fingerprints


def check_content(
    path: Path, recorded_fingerprints: dict[str, Any], current_fingerprints: dict[str, list[Any]]
) -> None:
    """Refuse to resume from a checkpoint of other content; content without a fingerprint in the checkpoint is not
    compared.

    Raises:
        CheckpointError: something differs; the message says what.
    """
    for array_name in sorted(recorded_fingerprints.keys() & current_fingerprints.keys()):
        if not fingerprints_match(recorded_fingerprints[array_name], current_fingerprints[array_name]):
            raise CheckpointError(
                f"checkpoint {path} was written with other content: {array_name} changed since; restore what "
                "the run started with, or choose another out"
            )
    for array_name in (
        sorted(recorded_fingerprints.keys() ^ current_fingerprints.keys()) if recorded_fingerprints else ()
    ):
        raise CheckpointError(
            f"checkpoint {path} was written with other content: {array_name} is "
            f"{'new' if array_name in current_fingerprints else 'gone'}; restore "
            "what the run started with, or choose another out"
        )


def _arrays_by_name(simulation: Setup) -> Iterator[tuple[str, np.ndarray]]:
    for array_name, array_value in vars(simulation.dataset).items():
        if not array_name.startswith("_") and array_name != "optimum":  # derived from the other arrays
            values_by_name = array_value if isinstance(array_value, dict) else {"": array_value}
            for part_name, array in values_by_name.items():
                if isinstance(array, (Tensor, np.ndarray)):
                    yield f"{array_name}{part_name and f'.{part_name}'} of the data", _host_subsample(array)
    yield from _arrays_from_files(simulation)
    for array_name, array_value in simulation.parameter_naming.constants.items():
        yield f"{array_name}, a frozen part of the model,", _host_subsample(array_value)


def _arrays_from_files(run: Setup) -> Iterator[tuple[str, np.ndarray]]:
    """Return the arrays that availability, clock and drift have read from files."""
    for name, values in run.availability.loaded_arrays().items():
        yield f"the record of availability ({name})", values
    for name, values in run.round_clock.clock.loaded_arrays().items():
        yield f"the table of devices ({name})", values
    for name, values in run.data.drift.loaded_arrays().items():
        yield f"the recorded drift ({name})", values


def _host_subsample(values: Tensor | np.ndarray) -> np.ndarray:
    """Return a host copy of at most so many numbers of a tensor, whole rows."""
    is_integral = values.dtype.kind not in "fc" if isinstance(values, np.ndarray) else not values.is_floating_point()
    step = max(1, -(-int(np.prod(values.shape)) // MAX_FINGERPRINTED_NUMBERS[is_integral])) if len(values.shape) else 1
    rows = values[::step] if step > 1 else values
    if isinstance(rows, np.ndarray):
        return rows
    rows = rows.detach().cpu()
    return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()


def fingerprint(values: np.ndarray) -> list[Any]:
    """Return shape and digest of integers; for other numbers the shape, how many are finite, their norm, and two
    sums."""
    shape = list(values.shape)
    if values.dtype.kind in "biuSU":
        return [shape, _digest(values)]
    flat = values.reshape(-1)
    checksum_sums = np.zeros(3)
    finite_count = 0
    for number, block_start in enumerate(range(0, len(flat), NUMBERS_PER_BLOCK)):
        block = flat[block_start : block_start + NUMBERS_PER_BLOCK].astype(np.float64)
        finite_mask = np.isfinite(block)
        finite_count += int(finite_mask.sum())
        block = np.where(finite_mask, block, 0.0)
        weights = np.random.default_rng(number).uniform(0.5, 1.5, (2, len(block)))
        checksum_sums += [block @ block, *(weights @ block)]
    return [shape, finite_count, float(np.sqrt(checksum_sums[0])), float(checksum_sums[1]), float(checksum_sums[2])]


def _digest(*arrays: np.ndarray, dtype: type | None = None) -> str:
    """Return the digest of the arrays' bytes, one array after another, as `dtype`. Blocks are copied one by one, since
    the data of a large population would not fit into memory twice."""
    digest = hashlib.blake2b(digest_size=12)
    for array in arrays:
        rows = array.reshape(1) if array.ndim == 0 else array
        rows_per_block = max(1, NUMBERS_PER_BLOCK * len(rows) // max(1, rows.size))
        for block_start in range(0, len(rows), rows_per_block):
            digest.update(np.ascontiguousarray(rows[block_start : block_start + rows_per_block], dtype).tobytes())
    return digest.hexdigest()


def fingerprints_match(recorded_fingerprints: Any, current_fingerprints: list[Any]) -> bool:
    """Return whether two fingerprints are of the same content."""
    if not isinstance(recorded_fingerprints, list) or len(recorded_fingerprints) != len(current_fingerprints):
        return False
    if len(current_fingerprints) == 2 or recorded_fingerprints[:2] != current_fingerprints[:2]:
        return bool(recorded_fingerprints == current_fingerprints)
    length = abs(current_fingerprints[2])
    return all(
        isinstance(a, (int, float)) and abs(a - b) <= FINGERPRINT_TOLERANCE * length
        for a, b in zip(recorded_fingerprints[2:], current_fingerprints[2:], strict=True)
    )
