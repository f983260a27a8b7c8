"""Digests of what two comparable runs share: data, splits, traces, initial models and batches.

Integers (the samples of each client, the available clients) are compared by a hash. Floating-point numbers are compared
by sums, up to a tolerance (`fedsim.run.content`).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.run.content import content_fingerprints, fingerprint, fingerprints_match
from fedsim.run.simulation import Simulation

DIGEST_NAMES = ("data", "splits", "traces", "models", "batches")
DigestsByName = dict[str, list[Any]]


def digest_inputs(simulation: Simulation) -> DigestsByName:
    """Return the digests of a run that has not started, by the names in `DIGEST_NAMES`; data have several digests.

    A rule that pools all data in one client has a digest of its models only.
    """
    rounds = simulation.rounds
    all_rows = np.arange(simulation.federation.num_replicates * simulation.federation.clients)
    seeds = simulation.federation.seeds
    models = fingerprint(simulation.model.initial(seeds).detach().cpu().double().numpy())
    if simulation.trainer.local_rule.pooled:
        return {"models": models}
    split_digests = [
        array.astype(np.int64)
        for table in simulation.partition_tables
        for subset in (table, table.validation)
        if subset is not None
        for array in (subset.offsets, subset.order)
    ]
    return {
        **{
            f"data: {name}": values
            for name, values in content_fingerprints(simulation).items()
            if name.endswith("of the data")
        },
        "models": models,
        "splits": _count_and_digest(split_digests),
        "traces": _count_and_digest([simulation.availability.counts(t).astype(np.int64) for t in range(rounds)]),
        "batches": fingerprint(np.stack([_first_batch_sums(simulation, t, all_rows) for t in {0, rounds - 1}])),
    }


def _count_and_digest(arrays: list[np.ndarray]) -> list[Any]:
    """Return the number of arrays, and a hash of their shapes and contents."""
    digest = hashlib.blake2b(digest_size=12)
    for array in arrays:
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return [[len(arrays)], digest.hexdigest()]


def _first_batch_sums(simulation: Simulation, t: int, positions: np.ndarray) -> np.ndarray:
    """Return the sum of the inputs in each client's first batch of a round [R·m]."""
    all_active = np.ones((simulation.federation.num_replicates, simulation.federation.clients))
    cohort = simulation.federation.make_cohort(all_active, all_active, t)
    batch = (
        simulation.trainer.batches.plan(cohort, t).chunk(positions).batch(0, 0, len(positions), simulation.model.dtype)
    )
    return np.asarray(batch["x"].detach().cpu().double().flatten(1).sum(1).numpy())


def check_matching_digests(
    board_label: str, current_digests: DigestsByName, committed_digests: DigestsByName, shared_digests: list[str]
) -> None:
    """Refuse a row made with other data, splits, traces, initial models or batches than the cell's other rows.

    Raises:
        ConfigError: they differ; the message names what differs.
    """
    compared_names = [
        name for name in current_digests if name in committed_digests and name.partition(":")[0] in shared_digests
    ]
    mismatches = [
        name for name in compared_names if not fingerprints_match(committed_digests[name], current_digests[name])
    ]
    if mismatches:
        raise ConfigError(
            f"{board_label} was made with other {', '.join(mismatches)} than the rows it would stand beside; "
            "make it with the board's own settings, seeds and version"
        )
