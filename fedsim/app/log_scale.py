"""`log(…)` in overrides: values with a constant ratio, or an interval on a logarithmic scale.

Annotations are evaluated here, since Hydra looks at those of `log`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser import overrides_parser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep

LOG = "log"  # also Hydra's tag of a logarithmic scale


def rounded_to_two_digits(value: float) -> float:
    """Return a number rounded to two significant digits."""
    return float(f"{value:.2g}")


def log(low: int | float, high: int | float, count: int = 0) -> Any:
    """Return the values of `log(0.001,1,8)`, 8 with a constant ratio, or the interval `log(0.001,1)` on a
    logarithmic scale."""
    if not 0 < low < high or count < 0 or count == 1:
        raise ValueError(f"log({low},{high},{count}) needs 0 < low < high and at least two values")
    if not count:
        return IntervalSweep(start=float(low), end=float(high), tags={LOG})
    import numpy as np  # imported here: help imports this module and does not need NumPy

    return ChoiceSweep(list=[rounded_to_two_digits(value) for value in np.geomspace(low, high, count)], tags={LOG})


@contextlib.contextmanager
def accept_log_intervals() -> Iterator[None]:
    """Within the block Hydra accepts `log(…)` in overrides."""
    create_functions = overrides_parser.create_functions

    def create_functions_with_log() -> Any:
        functions = create_functions()
        if LOG not in functions.definitions:
            functions.register(LOG, log)
        return functions

    overrides_parser.create_functions = create_functions_with_log
    try:
        yield
    finally:
        overrides_parser.create_functions = create_functions
