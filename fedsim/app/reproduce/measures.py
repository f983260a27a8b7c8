"""What a run gives: one number per replicate, read from its metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedsim.core import checks
from fedsim.plots.runs import Run

TOLERANCE = 1e-9  # of a target: 0.7 is reached by 0.7 however it was computed


@dataclass
class Measure:
    """A number per replicate: the end of a run, how many rounds something took, or how fast it fell.

    Attributes:
        metric: a column of metrics.csv; or 'a or b', or 'newcomers a' (see `Run.curve`).
        last: mean over the evaluations of the last so many rounds; 0 takes the last evaluation alone.
        window: instead of the last rounds these, [first, last]: what a paper says of the middle of training.
        ahead_of: instead of a mean, the round until which the replicate is ahead of that of the same recipe's run at
            these labels, axis → label: where its lead, summed over the evaluations, is largest; 0 if it never leads.
        spread: instead of the mean over those evaluations their standard deviation: how much a replicate oscillates.
        largest: instead of the end, the largest value of any evaluation.
        until: 'above' or 'below': instead of a mean, the first evaluated round at which the replicates' mean is on this
            side of the target (nan where it never is).
        stays: with `until`: … and from which on it stays there: what only swings through does not count.
        target: with `until`: a number; or
        share, best_over: … this share of the best run along an axis, rounded down to tenths (fedawe Table 8).
        order_from: instead of a mean, the slope of the logarithm of the replicates' mean over that of the round, from
            this round on: −½ for a distance whose square is O(1/T).
        every: with `until`: only evaluations at multiples of so many rounds count.
        percent: multiply by 100.
        times: or by this factor: 2 for a paper that does not halve its squared loss.
        unit: behind the number, in tables and on axes.
    """

    metric: str
    last: int = 0
    window: tuple[int, int] | None = None
    ahead_of: dict[str, str] | None = None
    spread: bool = False
    largest: bool = False
    until: str | None = None
    stays: bool = False
    target: float | None = None
    share: float = 1.0
    best_over: str | None = None
    order_from: int | None = None
    every: int = 1
    percent: bool = False
    times: float = 1.0
    unit: str = ""

    def __post_init__(self) -> None:
        if self.until is not None:
            checks.choice("until", self.until, ("above", "below"))
            if (self.target is None) == (self.best_over is None):
                raise ValueError(f"until={self.until} needs either target or best_over")

    def __call__(self, run: Run, rivals: list[Run] | None = None) -> np.ndarray:
        """[R] values; a single one with `until` or `order_from`.

        Args:
            run: a finished run.
            rivals: with `best_over`: the runs along that axis; with `ahead_of`: the one it is compared with.
        """
        rounds, values = run.curve(self.metric)
        if self.ahead_of is not None:
            return self._ahead(rounds, values, rivals or [])
        if self.until is not None:
            looked = rounds % self.every == 0
            mean, target = values[looked].mean(1), self._target(rivals or [run])
            there = mean >= target - TOLERANCE if self.until == "above" else mean <= target + TOLERANCE
            if self.stays:
                there = np.logical_and.accumulate(there[::-1])[::-1]
            return np.array([float(rounds[looked][there][0]) if there.any() else math.nan])
        if self.order_from is not None:
            late = rounds >= self.order_from
            if late.sum() < 2:
                return np.array([math.nan])
            return np.array([np.polyfit(np.log(rounds[late]), np.log(values[late].mean(1)), 1)[0]])
        if self.largest:
            return values.max(0) * self._factor
        window = rounds > rounds[-1] - self.last if self.last else rounds == rounds[-1]
        if self.window is not None:
            window = (rounds >= self.window[0]) & (rounds <= self.window[1])
            if not window.any():
                return np.full(values.shape[1], math.nan)
        return (values[window].std(0) if self.spread else values[window].mean(0)) * self._factor

    def _ahead(self, rounds: np.ndarray, values: np.ndarray, rivals: list[Run]) -> np.ndarray:
        if not rivals or rivals[0].replicates != values.shape[1]:
            return np.full(values.shape[1], math.nan)
        seen, theirs = rivals[0].curve(self.metric)
        shared = np.isin(rounds, seen) & (rounds > 0)
        lead = np.cumsum(values[shared] - theirs[np.isin(seen, rounds[shared])], axis=0)
        return np.where(lead.max(0) > 0, rounds[shared][lead.argmax(0)], 0).astype(float)

    @property
    def _factor(self) -> float:
        return self.times * (100 if self.percent else 1)

    def _target(self, rivals: list[Run]) -> float:
        if self.target is not None:
            return self.target
        best = max(Measure(self.metric, last=self.last)(run).mean() for run in rivals)
        return self.share * math.floor(10 * best + TOLERANCE) / 10
