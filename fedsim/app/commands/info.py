"""`fedsim info`: facts that a bug report should begin with."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Iterator

from packaging.requirements import Requirement

from fedsim.app.commands import COMMAND_DESCRIPTIONS

DISTRIBUTION_NAME = "fedsim-torch"


def main(arguments: list[str]) -> None:
    """Print versions, devices, threads, extras and the folders of data."""
    argparse.ArgumentParser("fedsim info", description=f"Show {COMMAND_DESCRIPTIONS['info']}.").parse_args(arguments)
    for name, value in environment_facts():
        print(f"{name:12} {value}")


def environment_facts() -> Iterator[tuple[str, str]]:
    """Yield name and value of each line."""
    import torch

    import fedsim
    from fedsim.app.commands.data import data_root_and_origin, datasets
    from fedsim.models.precision import bfloat16_units_text
    from fedsim.run.tracking.environment import commit_hash, package_versions

    revision = commit_hash()
    yield "fedsim", fedsim.__version__ + (f", commit {revision[:12]}{'+' * revision.endswith('+')}" if revision else "")
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for name, version in package_versions().items():
        if name != DISTRIBUTION_NAME:
            yield name, version or "not installed"
    yield "cpu", f"{usable_cores()} cores, {gigabytes_text(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}"
    yield "bfloat16", f"units of the processor: {bfloat16_units_text()}"
    variable = os.environ.get("OMP_NUM_THREADS")
    yield "threads", f"{torch.get_num_threads()} (OMP_NUM_THREADS{f'={variable}' if variable else ' is not set'})"
    for number in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(number)
        yield (
            f"cuda:{number}",
            f"{torch.cuda.get_device_name(number)}, {gigabytes_text(total_bytes)}, {gigabytes_text(free_bytes)} free",
        )
    if not torch.cuda.is_available():
        yield (
            "cuda",
            f"none (PyTorch was built {f'for CUDA {torch.version.cuda}' if torch.version.cuda else 'without it'})",
        )
    root, origin = data_root_and_origin(None)
    yield "data", f"{root} ({origin})"
    kinds = [(name, kind.files.existing_paths(root)) for name, kind in datasets().items() if kind.files]
    yield "  found", ", ".join(name for name, paths in kinds if paths) or "none"
    yield "  missing", ", ".join(name for name, paths in kinds if not paths) or "none"
    for name, missing_packages in missing_packages_by_extra().items():
        yield f"[{name}]", f"not installed: {', '.join(missing_packages)}" if missing_packages else "installed"


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gigabytes_text(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def missing_packages_by_extra() -> dict[str, list[str]]:
    """Return each extra of the package, and which of its distributions are missing."""
    try:
        extra_names = importlib.metadata.metadata(DISTRIBUTION_NAME).get_all("Provides-Extra") or []
        requirements = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION_NAME) or []]
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return {}
    base = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    extra_requirements = {
        name: [r for r in requirements if r not in base and r.marker and r.marker.evaluate({"extra": name})]
        for name in extra_names
    }
    return {
        name: [r.name for r in required_packages if not is_installed(r)]
        for name, required_packages in extra_requirements.items()
    }


def is_installed(requirement: Requirement) -> bool:
    """Return whether a distribution is installed in a suitable version."""
    try:
        return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False
