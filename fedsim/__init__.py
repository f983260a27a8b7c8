"""fedsim: a simulator for federated learning. A federation is a matrix: rows are clients, columns parameters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedsim.core.errors import CheckpointError, ConfigError, DivergenceError, MissingDataError

if TYPE_CHECKING:
    from fedsim.evaluation import EvaluationOptions
    from fedsim.run import Simulation, Stop
    from fedsim.run.together import run_together
    from fedsim.run.tracking import Result, Tracking
    from fedsim.studies.results import load
    from fedsim.trainer import Execution

__version__ = "0.2.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DivergenceError",
    "EvaluationOptions",
    "Execution",
    "MissingDataError",
    "Result",
    "Simulation",
    "Stop",
    "Tracking",
    "__version__",
    "load",
    "run_together",
]

# These names import PyTorch, which takes seconds; help and shell completion do not need it.
_HOMES = {
    "EvaluationOptions": "fedsim.evaluation",
    "Execution": "fedsim.trainer",
    "Result": "fedsim.run.tracking",
    "Simulation": "fedsim.run",
    "Stop": "fedsim.run",
    "Tracking": "fedsim.run.tracking",
    "load": "fedsim.studies.results",
    "run_together": "fedsim.run.together",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedsim' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
