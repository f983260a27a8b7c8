"""Numbers rounded to their error: the standard error's first digit decides how many digits of a mean are printed."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_EXPONENT_NUMBER, MAX_EXPONENT_NUMBER = (
    1e6,
    1e-4,
)  # numbers from LARGE on and below SMALL are printed with powers of ten


def num_decimals(error: float) -> int:
    """Return the decimal places (negative left of the point) for one significant digit of an error.

    An error that begins with 1 has two digits: 0.034 → 2, 0.014 → 3.

    Raises:
        ValueError: the error is not a positive number.
    """
    if not (math.isfinite(error) and error > 0):
        raise ValueError(f"{error} is no error")
    exponent = math.floor(math.log10(error))
    leading_digits = round(error / 10**exponent, 6)
    return (1 if leading_digits < 2 else 0) - exponent


def fixed_decimals(value: float, decimals: int) -> str:
    """Format a number with the given decimals; negative ones round left of the point, and zero has no sign."""
    text = f"{round(value, decimals):.{max(decimals, 0)}f}"
    return text.removeprefix("-") if not text.strip("-0.") else text


@dataclass(frozen=True)
class RoundedText:
    """A rounded mean and its spread after ±, as text.

    Attributes:
        mean, spread: the numbers; '' for an unknown spread.
        exponent: the power of ten by which both were divided.
    """

    mean: str
    spread: str
    exponent: int = 0

    @property
    def latex(self) -> str:
        """The text in LaTeX's mathematics."""
        numbers = rf"{self.mean} \pm {self.spread}" if self.spread else self.mean
        if not self.exponent:
            return f"${numbers}$"
        return (
            rf"$({numbers}) \times 10^{{{self.exponent}}}$"
            if self.spread
            else (rf"${numbers} \times 10^{{{self.exponent}}}$")
        )


def round_to_error(mean: float, spread: float, error: float, significant: int = 4) -> RoundedText:
    """Round a mean and its spread to the last significant digit given by the error.

    Args:
        mean, spread: the numbers; a spread that is NaN is left out.
        error: the standard error of the mean; where it is NaN or 0, `significant` digits are shown.
        significant: see `error`.
    """
    size = max(abs(mean), *(number for number in (spread, error, 0.0) if not math.isnan(number)))
    exponent = (
        max(math.floor(math.log10(size)), -300) if size and not MAX_EXPONENT_NUMBER <= size < MIN_EXPONENT_NUMBER else 0
    )
    mean, spread, error = (number / 10.0**exponent for number in (mean, spread, error))
    if math.isfinite(error) and error > 0:
        decimals = num_decimals(error)
    else:
        digits = math.floor(math.log10(abs(mean))) if mean else 0
        decimals = max(significant - 1 - digits, 0)
        while decimals and round(mean, decimals - 1) == round(mean, decimals):
            decimals -= 1
    return RoundedText(
        fixed_decimals(mean, decimals), "" if math.isnan(spread) else fixed_decimals(spread, decimals), exponent
    )
