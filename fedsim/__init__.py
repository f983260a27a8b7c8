"""fedsim: federated learning as it really is. A federation is a matrix: rows are clients, columns parameters."""

from fedsim.errors import CheckpointError, ConfigError, DivergenceError, MissingDataError
from fedsim.simulation import Simulation
from fedsim.tracking import Result, Tracking

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DivergenceError",
    "MissingDataError",
    "Result",
    "Simulation",
    "Tracking",
    "__version__",
]
