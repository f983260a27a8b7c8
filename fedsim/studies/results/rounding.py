"""Numbers rounded to their error: the standard error's first digit decides how many digits of a mean are printed."""

from __future__ import annotations

import math
from dataclasses import dataclass

LARGE, SMALL = 1e6, 1e-4  # from which on, and below which, powers of ten are printed


def num_decimals(error: float) -> int:
    """Decimal places (negative left of the point) that show one significant digit of an error, two where it begins
    with 1: 0.034 → 2, 0.014 → 3.

    Raises:
        ValueError: it is not a positive number.
    """
    if not (math.isfinite(error) and error > 0):
        raise ValueError(f"{error} is no error")
    exponent = math.floor(math.log10(error))
    leading = round(error / 10**exponent, 6)
    return (1 if leading < 2 else 0) - exponent


def fixed_decimals(value: float, decimals: int) -> str:
    """The number with so many decimals, of a negative count with zeros left of the point; zero has no sign."""
    text = f"{round(value, decimals):.{max(decimals, 0)}f}"
    return text.removeprefix("-") if not text.strip("-0.") else text


@dataclass(frozen=True)
class RoundedText:
    """A mean and what follows ±, as text.

    Attributes:
        mean, spread: '' for a spread that is not known.
        exponent: the power of ten by which both were divided.
    """

    mean: str
    spread: str
    exponent: int = 0

    @property
    def latex(self) -> str:
        """In LaTeX's mathematics."""
        numbers = rf"{self.mean} \pm {self.spread}" if self.spread else self.mean
        if not self.exponent:
            return f"${numbers}$"
        return (
            rf"$({numbers}) \times 10^{{{self.exponent}}}$"
            if self.spread
            else (rf"${numbers} \times 10^{{{self.exponent}}}$")
        )


def round_to_error(mean: float, spread: float, error: float, significant: int = 4) -> RoundedText:
    """A mean and its spread to the last digit that the error knows.

    Args:
        mean, spread: the numbers; a spread that is NaN is left out.
        error: the standard error of the mean; where it is NaN or 0, `significant` digits are shown.
        significant: see `error`.
    """
    size = max(abs(mean), *(number for number in (spread, error, 0.0) if not math.isnan(number)))
    exponent = max(math.floor(math.log10(size)), -300) if size and not SMALL <= size < LARGE else 0
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
