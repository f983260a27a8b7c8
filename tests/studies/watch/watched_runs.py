"""Run folders for `fedsim watch`, written down instead of trained."""

from __future__ import annotations

import csv
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def write_run(
    folder: Path,
    columns: Mapping[str, Sequence[float]],
    settings: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
) -> Path:
    """A run with a value of each column every ten rounds; replicates are 0.01 apart. It replaces an older one."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.csv", "w", newline="") as file:
        file.writelines(f"# {name}: of a test\n" for name in columns)
        writer = csv.writer(file)
        writer.writerow(["round", "seed", *columns])
        for number in range(len(next(iter(columns.values())))):
            for apart, seed in enumerate(seeds):
                writer.writerow([10 * number, seed, *(v[number] + 0.01 * apart for v in columns.values())])
    OmegaConf.save({"rounds": 40, **(settings or {})}, folder / "config.yaml")
    return folder


def finish(folder: Path) -> None:
    """The summary that a run writes last."""
    (folder / "summary.json").write_text("{}")


def hold(folder: Path, pid: int = os.getpid()) -> None:
    """The lock file of a process of this machine."""
    began = Path(f"/proc/{pid}/stat")
    ticks = began.read_text().rpartition(")")[2].split()[19] if began.exists() else None
    owner = {"host": socket.gethostname(), "pid": pid, "began": ticks, "since": "now"}
    (folder / ".lock").write_text(json.dumps(owner))


def record(folder: Path, number: int, status: str, message: str = "", overrides: Sequence[str] = ("lr=0.1",)) -> None:
    """What the sweep above a run's folder has recorded of it."""
    records = folder.parent / ".runs"
    records.mkdir(parents=True, exist_ok=True)
    content = {"number": number, "overrides": overrides, "folder": str(folder), "status": status, "message": message}
    (records / f"{number}.json").write_text(json.dumps(content))
