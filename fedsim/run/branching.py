"""Some replicates of a run continue as a run of their own: its checkpoint and metrics, without those of the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fedsim.core import checksums
from fedsim.core.files import check_regular_path, replacement_file
from fedsim.core.memory import IN_FLIGHT, QUEUE
from fedsim.run.checkpoint import CONTENT, NAME, VERSIONS
from fedsim.run.tracking.metrics_csv import (
    METRICS_FILENAME,
    MetricsCSV,
    checksum,
    read_column_descriptions,
    read_metrics,
)

OF_REPLICATES = ("samples", "participants", "links", "unanswered", "virtual", "staleness")  # of `Progress`


def branch(source: Path, target: Path, replicates: Sequence[int], total: int, identity: dict[str, Any]) -> bool:
    """Write checkpoint and metrics.csv of a run that has some of the replicates of another one.

    Args:
        source: folder of a run with a checkpoint.
        target: folder of the new run, which has none.
        replicates: of the source, in the order that they have in the target.
        total: replicates of the source.
        identity: what a resumed run must share with the target, see `Simulation.run`; with its seeds and the name of
            its strategy.

    Returns:
        False if updates or events are under way, which belong to replicates and cannot be divided; nothing is written.
    """
    with safe_open(check_regular_path(source / NAME), framework="pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    if any(name.startswith((f"{IN_FLIGHT}.", f"{QUEUE}.")) and len(rows) for name, rows in tensors.items()):
        return False
    progress = json.loads(header["progress"])
    for name in OF_REPLICATES:
        if progress[name]:
            progress[name] = [progress[name][replicate] for replicate in replicates]
    position = {replicate: number for number, replicate in enumerate(replicates)}
    progress["dropped"] = [
        entry | {"replicate": position[entry["replicate"]]}
        for entry in progress["dropped"]
        if entry["replicate"] in position
    ]
    rows = read_metrics(source / METRICS_FILENAME)
    rounds = [rows[first : first + total] for first in range(0, len(rows), total)]
    rows = [of[replicate] for of in rounds if of[0]["round"] <= progress["rounds"] for replicate in replicates]
    progress["rows"], progress["crc"] = len(rows), checksum(rows)
    target.mkdir(parents=True, exist_ok=True)
    metrics = MetricsCSV.open(target / METRICS_FILENAME, read_column_descriptions(source / METRICS_FILENAME))
    metrics.append(rows)
    metrics.on_disk()
    metrics.close()
    divided = {name: _of(rows, replicates, total) for name, rows in tensors.items()}
    entries = {"progress": progress, "identity": identity, CONTENT: {}}
    header = {key: header[key] for key in ("format", VERSIONS)} | {k: json.dumps(v) for k, v in entries.items()}
    with replacement_file(target / NAME, "wb", durable=True) as file:
        file.write(save(divided, metadata=checksums.with_checksums(header, divided)))
    return True


def _of(rows: Tensor, replicates: Sequence[int], total: int) -> Tensor:
    """The rows of some replicates, of [R·k, …]."""
    if not len(rows):
        return rows
    divided: Tensor = rows.unflatten(0, (total, -1))[list(replicates)].flatten(0, 1).contiguous()
    return divided
