"""The basis of the other layers: rows and their sums, randomness, ranks, and errors.

Imports PyTorch only where rows are asked for: help and shell completion do without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedsim.core.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    MissingDataError,
    NoReferenceError,
    OutputError,
    PeerError,
    RunError,
)

if TYPE_CHECKING:
    from fedsim.core.federation import WEIGHTINGS, Cohort, Federation
    from fedsim.core.memory import Memory
    from fedsim.core.ranks import ProcessRanks
    from fedsim.core.report import Report

__all__ = [
    "WEIGHTINGS",
    "CheckpointError",
    "Cohort",
    "ConfigError",
    "DivergenceError",
    "Federation",
    "Memory",
    "MissingDataError",
    "NoReferenceError",
    "OutputError",
    "PeerError",
    "ProcessRanks",
    "Report",
    "RunError",
]

_HOMES = {
    "WEIGHTINGS": "federation",
    "Cohort": "federation",
    "Federation": "federation",
    "Memory": "memory",
    "ProcessRanks": "ranks",
    "Report": "report",
}


def __getattr__(name: str) -> Any:
    """Import a name on first access (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedsim.core' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedsim.core.{_HOMES[name]}"), name)
