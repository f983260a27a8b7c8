"""The file that a benchmark writes: its rows, and the command, date, commit, machine and versions behind them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from fedsim.run.tracking.environment import environment_facts

ROOT = Path(__file__).resolve().parents[1]
MEASURED_CODE = ("fedsim", "configs", "scripts/bench*", "scripts/client_memory.py")  # what can change a figure


def save(path: str | Path | None, rows: Any, *, device: torch.device | None = None, **settings: Any) -> None:
    """Write the rows and where they come from, if a file was asked for; a file is complete or absent.

    Args:
        path: of the JSON file.
        rows: the figures.
        device: that was measured; default: the CPU.
        settings: of the benchmark, such as its number of repetitions.
    """
    if not path:
        return
    content = {"made": made(device or torch.device("cpu")), "settings": settings, "rows": rows}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(target)


def made(device: torch.device) -> dict[str, Any]:
    """Command, date, commit, machine and versions of the benchmark that runs."""
    facts = environment_facts(device)
    machine = {key: facts[key] for key in ("platform", "device", "gpu", "threads")} | hardware()
    return {
        "command": facts["command"],
        "date": facts["started"][:10],
        "commit": facts["commit"] or os.environ.get("FEDSIM_COMMIT"),  # of a copy of the checkout without .git
        "code": code(),
        "machine": machine,
        "versions": {"python": facts["python"]} | {name: v for name, v in facts["versions"].items() if v},
    }


def hardware() -> dict[str, Any]:
    """The processor's name, the cores that this process may use, and the memory in GiB, as far as Linux says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _line(Path("/proc/cpuinfo"), "model name"),
        "cores": cores,
        "memory_gib": round(int((_line(Path("/proc/meminfo"), "MemTotal") or "0 kB").split()[0]) / 2**20, 1) or None,
    }


def _line(path: Path, name: str) -> str | None:
    """What follows `name:` in a file of /proc."""
    if not path.exists():
        return None
    values = [line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith(name)]
    return values[0] if values else None


def code(root: Path = ROOT) -> str | None:
    """A checksum of the committed code that is measured; None if it has uncommitted changes or there is no checkout.

    Unlike the commit it does not change if only pages, tests or figures do.
    """
    paths = [f":(glob){path}" if "*" in path else path for path in MEASURED_CODE]
    paths = [*paths, ":(glob)scripts/bench_peers/**"]
    git = ["git", "--no-optional-locks", "-C", str(root)]
    try:
        changed = subprocess.run([*git, "status", "--porcelain", "--", *paths], capture_output=True, check=True).stdout
        files = subprocess.run([*git, "ls-files", "--stage", "--", *paths], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if changed.strip() or not files else hashlib.sha256(files).hexdigest()[:16]
