"""Errors by which numerical routines refuse numbers: a decomposition that does not converge, a matrix that is singular
or not finite. Where they come from a model that diverged they are a divergence like any other."""

from __future__ import annotations

import re

import numpy as np
import torch

# Routines that check for such numbers raise plain RuntimeErrors (`torch.linalg.eig`, `torch.multinomial`) or
# ValueErrors (`torch.distributions`, SciPy); others hand them to a library that does (`torch.linalg.lstsq`).
NUMERICAL_ERROR_PATTERN = re.compile(
    r"\b(nans?|infs?|infinit\w+|non-?finite|not finite)\b|linalg\.\w+: .*illegal value|CUSOLVER_STATUS_", re.IGNORECASE
)


LIN_ALG_ERROR: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def is_numerical(error: BaseException) -> bool:
    """Whether a numerical routine refused the numbers that it was given."""
    if isinstance(error, (LIN_ALG_ERROR, np.linalg.LinAlgError, ArithmeticError)):
        return not isinstance(error, ZeroDivisionError)
    return type(error) in (RuntimeError, ValueError) and NUMERICAL_ERROR_PATTERN.search(str(error)) is not None
