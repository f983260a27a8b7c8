"""Errors of numerical routines that refuse their input: a decomposition that does not converge, a singular matrix,
numbers that are not finite. If a diverged model caused them, they are treated as divergence."""

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


def is_numerical_error(error: BaseException) -> bool:
    """Return whether a numerical routine refused its input."""
    if isinstance(error, (LIN_ALG_ERROR, np.linalg.LinAlgError, ArithmeticError)):
        return not isinstance(error, ZeroDivisionError)
    return type(error) in (RuntimeError, ValueError) and NUMERICAL_ERROR_PATTERN.search(str(error)) is not None
