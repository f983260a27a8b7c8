"""Continue some replicates of a run as a run of their own, by writing its checkpoint and metrics without the others."""

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
from fedsim.run.checkpoint import CONTENT_ENTRY, NAME, VERSIONS_ENTRY
from fedsim.run.tracking.metrics_csv import (
    METRICS_FILENAME,
    MetricsCSV,
    metrics_checksum,
    read_column_descriptions,
    read_metrics,
)

PER_REPLICATE_COUNTS = (
    "samples",
    "participants",
    "links",
    "unanswered",
    "virtual",
    "joules",
    "staleness",
)  # of `Progress`


def write_replicate_subset(
    source_folder: Path,
    target_folder: Path,
    replicates: Sequence[int],
    total_replicates: int,
    run_identity: dict[str, Any],
) -> bool:
    """Write the checkpoint and metrics.csv of a run that consists of some replicates of another one.

    Args:
        source_folder: folder of a run with a checkpoint.
        target_folder: folder of the new run, which has none.
        replicates: of the source, in the order that they have in the target.
        total_replicates: replicates of the source.
        run_identity: what a resumed run must share with the target, see `Simulation.run`; with its seeds and the name
            of its strategy.

    Returns:
        False if updates or events are under way, which belong to replicates and cannot be divided; nothing is written.
    """
    with safe_open(check_regular_path(source_folder / NAME), framework="pt") as checkpoint_file:
        file_header = checkpoint_file.metadata()
        tensors = {entry_name: checkpoint_file.get_tensor(entry_name) for entry_name in checkpoint_file.keys()}  # noqa: SIM118 (not a mapping)
    if any(entry_name.startswith((f"{IN_FLIGHT}.", f"{QUEUE}.")) and len(rows) for entry_name, rows in tensors.items()):
        return False
    progress = json.loads(file_header["progress"])
    for entry_name in PER_REPLICATE_COUNTS:
        if progress[entry_name]:
            progress[entry_name] = [progress[entry_name][replicate] for replicate in replicates]
    position = {replicate: number for number, replicate in enumerate(replicates)}
    progress["dropped"] = [
        entry | {"replicate": position[entry["replicate"]]}
        for entry in progress["dropped"]
        if entry["replicate"] in position
    ]
    rows = read_metrics(source_folder / METRICS_FILENAME)
    rounds = [rows[first_row : first_row + total_replicates] for first_row in range(0, len(rows), total_replicates)]
    rows = [
        replicate_rows[replicate]
        for replicate_rows in rounds
        if replicate_rows[0]["round"] <= progress["rounds"]
        for replicate in replicates
    ]
    progress["rows"], progress["crc"] = len(rows), metrics_checksum(rows)
    target_folder.mkdir(parents=True, exist_ok=True)
    metrics = MetricsCSV.open(
        target_folder / METRICS_FILENAME, read_column_descriptions(source_folder / METRICS_FILENAME)
    )
    metrics.append(rows)
    metrics.flush_to_disk()
    metrics.close()
    divided_rows = {
        entry_name: _rows_of_replicates(rows, replicates, total_replicates) for entry_name, rows in tensors.items()
    }
    entries = {"progress": progress, "identity": run_identity, CONTENT_ENTRY: {}}
    file_header = {key: file_header[key] for key in ("format", VERSIONS_ENTRY)} | {
        k: json.dumps(v) for k, v in entries.items()
    }
    with replacement_file(target_folder / NAME, "wb", durable=True) as checkpoint_file:
        checkpoint_file.write(save(divided_rows, metadata=checksums.add_checksums(file_header, divided_rows)))
    return True


def _rows_of_replicates(rows: Tensor, replicates: Sequence[int], total: int) -> Tensor:
    """Return the rows of some replicates out of [R·k, …]."""
    if not len(rows):
        return rows
    selected_rows: Tensor = rows.unflatten(0, (total, -1))[list(replicates)].flatten(0, 1).contiguous()
    return selected_rows
