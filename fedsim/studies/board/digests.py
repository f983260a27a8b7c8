"""What makes two runs fair to compare: the same data, splits, traces, initial models and batches, told by digests.

Whole numbers (who holds what, who is there, which samples are met) have a digest. Numbers that are computed have sums,
which agree to a tolerance, as `fedsim.run.content` has them.
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


def digests(simulation: Simulation) -> DigestsByName:
    """Of a run that has not begun: every name of NAMES, data in several parts; of a rule that pools all data in one
    client its models alone."""
    rounds = simulation.rounds
    all_rows = np.arange(simulation.federation.replicates * simulation.federation.clients)
    seeds = simulation.federation.seeds
    models = fingerprint(simulation.model.initial(seeds).detach().cpu().double().numpy())
    if simulation.trainer.rule.pooled:
        return {"models": models}
    splits = [
        array.astype(np.int64)
        for table in simulation.tables
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
        "splits": _count_and_digest(splits),
        "traces": _count_and_digest([simulation.availability.counts(t).astype(np.int64) for t in range(rounds)]),
        "batches": fingerprint(np.stack([_first_batch(simulation, t, all_rows) for t in {0, rounds - 1}])),
    }


def _count_and_digest(arrays: list[np.ndarray]) -> list[Any]:
    """How many arrays, and a digest of all, their shapes with them."""
    digest = hashlib.blake2b(digest_size=12)
    for array in arrays:
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return [[len(arrays)], digest.hexdigest()]


def _first_batch(simulation: Simulation, t: int, positions: np.ndarray) -> np.ndarray:
    """[R·m] the sum of the numbers that each client meets in its first step of a round."""
    all_active = np.ones((simulation.federation.replicates, simulation.federation.clients))
    cohort = simulation.federation.cohort(all_active, all_active, t)
    batch = (
        simulation.trainer.batches.plan(cohort, t).chunk(positions).batch(0, 0, len(positions), simulation.model.dtype)
    )
    return np.asarray(batch["x"].detach().cpu().double().flatten(1).sum(1).numpy())


def check_digests(label: str, digests: DigestsByName, committed: DigestsByName, shared_digests: list[str]) -> None:
    """Refuse a row made with other traces, splits, data, initial models or batches than the cell's.

    Raises:
        ConfigError: they differ; the message says in what.
    """
    names = [name for name in digests if name in committed and name.partition(":")[0] in shared_digests]
    mismatches = [name for name in names if not fingerprints_match(committed[name], digests[name])]
    if mismatches:
        raise ConfigError(
            f"{label} was made with other {', '.join(mismatches)} than the rows it would stand beside; make it with "
            "the board's own settings, seeds and version"
        )
