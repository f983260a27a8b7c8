"""Where and how a run was made: versions, device, commit, command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


def commit_hash() -> str | None:
    """Return the commit of the checkout that fedsim runs from (with '+' if it has changes); None for an installed
    package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "--no-optional-locks", "-C", str(root)]  # `git status` would lock the index of the checkout
        head_commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed_files = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head_commit + ("+" if changed_files.strip() else "")


def package_versions() -> dict[str, str | None]:
    """Return distribution → version, None if it is not installed."""
    installed_versions: dict[str, str | None] = {}
    for package_name in (
        "fedsim-torch",
        "torch",
        "torchvision",
        "numpy",
        "hydra-core",
        "omegaconf",
        "tensorboard",
        "torchmetrics",
    ):
        try:
            installed_versions[package_name] = importlib.metadata.version(package_name)
        except importlib.metadata.PackageNotFoundError:
            installed_versions[package_name] = None
    return installed_versions


def _program_name(path: Path) -> str:
    """Return the name by which the program was called."""
    return f"python -m {path.parent.name}" if path.name == "__main__.py" else path.name


def environment_facts(device: torch.device, ranks: int = 1) -> dict[str, Any]:
    """Return facts about the machine and the program, for reports."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "command": " ".join([_program_name(Path(sys.argv[0])), *sys.argv[1:]]),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": str(device),
        "gpu": gpu,
        "ranks": ranks,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": package_versions(),
        "commit": commit_hash(),
    }
