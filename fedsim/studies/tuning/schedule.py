"""Successive halving: after how many rounds trials are compared, and how many of them continue."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedsim.core import checks


@dataclass(frozen=True)
class Halving:
    """Successive halving (Jamieson and Talwalkar 2016).

    The trials are compared at rungs, each after eta times as many rounds as the rung before; the last rung is after all
    rounds. There are as many rungs as it takes to reach `finalists` trials, and no more than `rungs`.

    Attributes:
        eta: of the trials compared at a rung, one in eta continues; 1: no trial is dropped.
        rungs: the most rungs, the last one included.
        finalists: the fewest trials that continue.
        federation_size: the most trials in one federation, whose models are all in memory; None: no limit.
    """

    eta: int = 3
    rungs: int = 4
    finalists: int = 3
    federation_size: int | None = None

    def __post_init__(self) -> None:
        checks.whole_number("eta", self.eta)
        checks.whole_number("rungs", self.rungs)
        checks.whole_number("finalists", self.finalists)
        if self.federation_size is not None:
            checks.whole_number("federation_size", self.federation_size)

    def reductions(self, trials: int) -> int:
        """How often trials are dropped."""
        if self.eta == 1 or trials <= self.finalists:
            return 0
        needed = math.ceil(math.log(trials / self.finalists) / math.log(self.eta) - 1e-9)
        return min(needed, self.rungs - 1)

    def first_rung(self, rounds: int, trials: int) -> int:
        """Completed rounds at the first rung, where evaluations may be after each round."""
        return int(max(1, round(rounds / self.eta ** self.reductions(trials))))

    def completed_rounds(self, rounds: int, eval_every: int, trials: int) -> list[int]:
        """Completed rounds at each rung: multiples of `eval_every`, and all rounds."""
        first = eval_every * max(1, round(self.first_rung(rounds, trials) / eval_every))
        rungs = [first * self.eta**number for number in range(self.reductions(trials))]
        return [*(completed for completed in rungs if completed < rounds), rounds]

    def survivors(self, compared: int) -> int:
        """How many of the compared trials continue."""
        return compared if self.eta == 1 else max(self.finalists, math.ceil(compared / self.eta))


def promoted(scores: list[float], candidates: list[int], halving: Halving) -> list[int]:
    """Which candidates continue beyond a rung.

    Args:
        scores: of the trials compared at the rung so far, larger ones better; −∞ for a trial that failed.
        candidates: positions of those that have just come there. The others were compared before, and count.
        halving: the schedule.

    Returns:
        The candidates among the best `halving.survivors` of all, in their order; of equal ones the first.
    """
    order = sorted(range(len(scores)), key=lambda position: -scores[position])  # stable
    best = {position for position in order[: halving.survivors(len(scores))] if math.isfinite(scores[position])}
    return [position for position in candidates if position in best]
