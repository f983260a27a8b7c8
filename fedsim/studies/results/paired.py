"""Differences by seed: replicates of equal seed share partition, availability and initial model by construction."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.core.errors import ConfigError


@functools.cache
def student_quantile(share: float, degrees_of_freedom: float) -> float:
    """Return a quantile of Student's t; cached, since a board needs the same one some ten thousand times."""
    from scipy import special  # here: pictures of a run need not wait for it

    return float(special.stdtrit(degrees_of_freedom, share))


@dataclass(frozen=True)
class PairedDifference:
    """The differences of two runs, replicate by replicate.

    Attributes:
        values: [n] differences, first − second, of the replicates that have both numbers.
        confidence: confidence level of the interval.
    """

    values: np.ndarray
    confidence: float = 0.95

    @property
    def num_pairs(self) -> int:
        """The number of pairs n."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """The mean difference; NaN without pairs."""
        return float(self.values.mean()) if self.num_pairs else math.nan

    @property
    def standard_error(self) -> float:
        """The standard error of the mean; 0 for one pair."""
        return float(self.values.std(ddof=1)) / math.sqrt(self.num_pairs) if self.num_pairs > 1 else 0.0

    @property
    def confidence_interval(self) -> tuple[float, float]:
        """Student's interval, mean ± t_{n−1} standard errors (Gosset 1908); NaN for fewer than two pairs."""
        if self.num_pairs < 2:
            return math.nan, math.nan
        half_width = student_quantile(0.5 + self.confidence / 2, self.num_pairs - 1) * self.standard_error
        return self.mean - half_width, self.mean + half_width

    def num_better_pairs(self, higher_is_better: bool) -> int:
        """Return the number of pairs that are better, without ties; `higher_is_better`: larger numbers are better."""
        return int(((self.values > 0) if higher_is_better else (self.values < 0)).sum())

    def summary_sentence(self, higher_is_better: bool, percent: bool = False) -> str:
        """Return a sentence about the difference; `percent`: numbers are fractions that are shown in per cent."""
        pairs = f"{self.num_pairs} pair" + "s" * (self.num_pairs != 1)
        if self.num_pairs < 2:
            return "one pair says nothing of the spread" if self.num_pairs else "there is no pair"
        low, high = self.confidence_interval
        factor, unit = (100, " percentage points") if percent else (1, "")
        half_width = f"{factor * low:.4g} to {factor * high:.4g}{unit}"
        summary = (
            f"better in {self.num_better_pairs(higher_is_better)} of {pairs}, {100 * self.confidence:g} % "
            f"interval {half_width}"
        )
        if low <= 0 <= high:
            return f"{summary}: not significant"
        return f"{summary}: {'better' if (low > 0) == higher_is_better else 'worse'}"


def paired_difference(
    first: np.ndarray,
    second: np.ndarray,
    seeds: Sequence[int] | None,
    other_seeds: Sequence[int] | None,
    confidence: float = 0.95,
) -> PairedDifference:
    """Return the differences by seed of two runs' numbers [R].

    Replicates whose number is not finite (diverged, target not reached) are left out together with their partners.

    Raises:
        ConfigError: the runs have different seeds.
    """
    if seeds is None or other_seeds is None or list(seeds) != list(other_seeds) or len(first) != len(second):
        seeds_text = " and ".join("unknown" if s is None else str(list(s)) for s in (seeds, other_seeds))
        raise ConfigError(f"differences by seed need the same seeds on both sides, and they are {seeds_text}")
    difference = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    return PairedDifference(difference[np.isfinite(difference)], confidence)
