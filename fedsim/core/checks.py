"""Checks of single settings. Each returns the value or raises a `ConfigError` with key, value and remedy.

What holds for a parameter by itself is declared beside it (`fedsim.core.constraints`), not checked in a constructor.
"""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fedsim.core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


def nearest_name_hint(name: str, choices: Iterable[str]) -> str:
    """Return '; did you mean …?' for the known word that is most similar to `name`, or for those that contain it;
    '' if there is none."""
    lower_case_name, options = name.lower(), {option.lower(): option for option in choices}
    close_matches = difflib.get_close_matches(lower_case_name, options, n=1, cutoff=0.6)
    if not close_matches and len(name) > 2:
        close_matches = sorted((option for option in options if lower_case_name in option), key=len)
    return did_you_mean(options[option] for option in close_matches)


def did_you_mean(words: Iterable[str]) -> str:
    """Return '; did you mean …?' with at most three words; '' without words."""
    quoted = [repr(word) for word in words][:3]
    return f"; did you mean {' or '.join(filter(None, [', '.join(quoted[:-1]), quoted[-1]]))}?" if quoted else ""


def check_choice(config_key: str, config_value: Any, options: Iterable[str]) -> str:
    """Check that a value is one of the options."""
    options = list(options)
    if config_value not in options:
        options_text = ", ".join(options)
        raise ConfigError(
            key=config_key,
            value=config_value,
            needs=f"is unknown; choose one of {options_text}{nearest_name_hint(str(config_value), options)}",
        )
    return str(config_value)


def check_whole_number(key: str, value: Any, minimum: int = 1) -> int:
    """Check that a value is a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ConfigError(key=key, value=value, needs=f"must be a whole number of at least {minimum}")
    return int(value)


def check_finite(key: str, value: Any) -> float:
    """Check that a value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not abs(float(value)) < float("inf"):
        raise ConfigError(key=key, value=value, needs="must be a finite number")
    return float(value)


def check_number_per_client(
    label: str, values: Any, n: int, whole_numbers: bool = False, minimum: float = 0
) -> np.ndarray:
    """Check an array [n] of numbers of at least `minimum`, whole ones if required; `label` names its source in
    messages."""
    import numpy as np  # imported here: the command line's help imports these checks and does not need NumPy

    kind = "whole numbers" if whole_numbers else "numbers"
    if (
        not isinstance(values, np.ndarray)
        or values.shape != (n,)
        or values.dtype.kind not in ("iu" if whole_numbers else "iuf")
    ):
        description = (
            f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        )
        raise ConfigError(f"{label} must return an array of {n} {kind}, one for each client, and returns {description}")
    if values.size and not values.min() >= minimum:
        raise ConfigError(f"{label} must return {kind} of at least {minimum:g}, and returns {values.min():g}")
    return values


def check_positive(key: str, value: Any) -> float:
    """Check that a value is a finite number above zero."""
    if not check_finite(key, value) > 0:
        raise ConfigError(key=key, value=value, needs="must be positive")
    return float(value)


def check_not_negative(key: str, value: Any) -> float:
    """Check that a value is a finite number of at least zero."""
    if not check_finite(key, value) >= 0:
        raise ConfigError(key=key, value=value, needs="must not be negative")
    return float(value)


def check_fraction(key: str, value: Any) -> float:
    """Check that a value is a number in [0, 1]."""
    if not 0.0 <= check_finite(key, value) <= 1.0:
        raise ConfigError(key=key, value=value, needs="must lie between 0 and 1")
    return float(value)
