"""Differences by seed. Replicates of equal seed share partition, availability and initial model by construction, so
what differs between two runs of the same seeds is what was changed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.core.errors import ConfigError


@functools.cache
def student_quantile(share: float, freedom: float) -> float:
    """Of Student's t; a board asks for the same one some ten thousand times."""
    from scipy import special  # here: pictures of a run need not wait for it

    return float(special.stdtrit(freedom, share))


@dataclass(frozen=True)
class PairedDifference:
    """Differences of two runs, replicate by replicate.

    Attributes:
        values: [n] one run's numbers less the other's, of the replicates that have both.
        confidence: of the interval.
    """

    values: np.ndarray
    confidence: float = 0.95

    @property
    def pairs(self) -> int:
        """n."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Mean difference; NaN without a pair."""
        return float(self.values.mean()) if self.pairs else math.nan

    @property
    def error(self) -> float:
        """Its standard error; 0 for one pair."""
        return float(self.values.std(ddof=1)) / math.sqrt(self.pairs) if self.pairs > 1 else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Student's, mean ± t_{n−1} standard errors (Gosset 1908); NaN of fewer than two pairs."""
        if self.pairs < 2:
            return math.nan, math.nan
        half_width = student_quantile(0.5 + self.confidence / 2, self.pairs - 1) * self.error
        return self.mean - half_width, self.mean + half_width

    def better(self, rises: bool) -> int:
        """How many pairs are better; ties are not. `rises`: larger numbers are."""
        return int(((self.values > 0) if rises else (self.values < 0)).sum())

    def sentence(self, rises: bool, percent: bool = False) -> str:
        """What may be said; `percent`: numbers are fractions that are read in per cent."""
        pairs = f"{self.pairs} pair" + "s" * (self.pairs != 1)
        if self.pairs < 2:
            return "one pair says nothing of the spread" if self.pairs else "there is no pair"
        low, high = self.interval
        factor, unit = (100, " percentage points") if percent else (1, "")
        half_width = f"{factor * low:.4g} to {factor * high:.4g}{unit}"
        summary = f"better in {self.better(rises)} of {pairs}, {100 * self.confidence:g} % interval {half_width}"
        if low <= 0 <= high:
            return f"{summary}: not significant"
        return f"{summary}: {'better' if (low > 0) == rises else 'worse'}"


def paired_difference(
    first: np.ndarray,
    second: np.ndarray,
    seeds: Sequence[int] | None,
    other_seeds: Sequence[int] | None,
    confidence: float = 0.95,
) -> PairedDifference:
    """Of two runs' numbers [R] by their seeds; replicates whose number is NaN (given up, target not reached) are left
    out with their partners.

    Raises:
        ConfigError: the runs have other seeds.
    """
    if seeds is None or other_seeds is None or list(seeds) != list(other_seeds) or len(first) != len(second):
        seeds_text = " and ".join("unknown" if s is None else str(list(s)) for s in (seeds, other_seeds))
        raise ConfigError(f"differences by seed need the same seeds on both sides, and they are {seeds_text}")
    difference = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    return PairedDifference(difference[np.isfinite(difference)], confidence)
