"""Successive halving: after how many rounds trials are compared, and how many of them continue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.core import checks


@dataclass(frozen=True)
class SuccessiveHalving:
    """Successive halving (Jamieson and Talwalkar 2016).

    The trials are compared at rungs, each after eta times as many rounds as the rung before; the last rung is after all
    rounds. There are as many rungs as it takes to reach `finalists` trials, and no more than `rungs`.

    Attributes:
        eta: of the trials compared at a rung, one in eta continues; 1: no trial is dropped.
        rungs: the most rungs, the last one included.
        finalists: the fewest trials that continue.
        federation_size: the most trials in one federation, whose models are all in memory; None: no limit.
        smaller_rates: share of the continuing trials that are chosen for learning rates below the best one's; 0: all
            are the best at the rung.
    """

    eta: int = 3
    rungs: int = 4
    finalists: int = 3
    federation_size: int | None = None
    smaller_rates: float = 0.5

    def __post_init__(self) -> None:
        checks.check_whole_number("eta", self.eta)
        checks.check_whole_number("rungs", self.rungs)
        checks.check_whole_number("finalists", self.finalists)
        if self.federation_size is not None:
            checks.check_whole_number("federation_size", self.federation_size)
        checks.check_fraction("smaller_rates", self.smaller_rates)

    def num_reductions(self, trials: int) -> int:
        """How often trials are dropped."""
        if self.eta == 1 or trials <= self.finalists:
            return 0
        needed_reductions = math.ceil(math.log(trials / self.finalists) / math.log(self.eta) - 1e-9)
        return min(needed_reductions, self.rungs - 1)

    def first_rung_rounds(self, rounds: int, trials: int) -> int:
        """Completed rounds at the first rung, where evaluations may be after each round."""
        return int(max(1, round(rounds / self.eta ** self.num_reductions(trials))))

    def rung_rounds(self, rounds: int, eval_every: int, trials: int) -> list[int]:
        """Completed rounds at each rung: multiples of `eval_every`, and all rounds."""
        first_rung = eval_every * max(1, round(self.first_rung_rounds(rounds, trials) / eval_every))
        rungs = [first_rung * self.eta**number for number in range(self.num_reductions(trials))]
        return [*(completed_rounds for completed_rounds in rungs if completed_rounds < rounds), rounds]

    def num_continuing(self, num_compared: int) -> int:
        """How many of the compared trials continue."""
        return num_compared if self.eta == 1 else max(self.finalists, math.ceil(num_compared / self.eta))


def continuing_candidates(
    scores: Sequence[float],
    candidates: Sequence[int],
    halving: SuccessiveHalving,
    rates: Sequence[float] | None = None,
    progress: float = 1.0,
) -> list[int]:
    """Which candidates continue beyond a rung.

    If gradients are noisy, the best learning rate decreases with the number of rounds: it is proportional to 1 / R, up
    to a logarithm, and without noise it does not depend on R. The trial that is best after a share of the rounds can
    thus have a rate that is too large for all rounds, by up to the inverse of this share. Of the continuing trials, the
    share `halving.smaller_rates` has rates at equal distances, on a logarithmic scale, within this range.

    Args:
        scores: of the trials compared at the rung so far, larger ones better; −∞ for a trial that failed.
        candidates: positions of those that have just come there. The others were compared before, and count.
        halving: the schedule.
        rates: the learning rate of each trial, a product if there are several; None: trials have no rates.
        progress: completed rounds, as a share of all.

    Returns:
        The candidates among the `halving.num_continuing` that continue of all, in their order; of equal ones the first.
    """
    order = [position for position in range(len(scores)) if math.isfinite(scores[position])]
    order.sort(key=lambda position: -scores[position])  # stable
    count = halving.num_continuing(len(scores))
    reserved = 0 if rates is None or halving.eta == 1 else int(halving.smaller_rates * count)
    continuing = order[: count - reserved]
    if rates is not None and reserved and order:
        distances = np.log(np.asarray(rates)[order] / rates[order[0]])  # from the best trial's, in the order of scores
        for target in np.linspace(math.log(progress), 0.0, reserved, endpoint=False):
            smaller = [
                (round(abs(distance - target), 6), rank)
                for rank, distance in enumerate(distances)
                if distance < -1e-6 and order[rank] not in continuing
            ]
            if smaller:
                continuing.append(order[min(smaller)[1]])
        next_best = [position for position in order if position not in continuing]
        continuing += next_best[: count - len(continuing)]
    return [position for position in candidates if position in continuing]
