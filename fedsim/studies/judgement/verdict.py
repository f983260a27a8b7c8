"""What an advantage is due to, by intervals of paired differences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.studies.results.paired import PairedDifference

MECHANISM, TUNING, SEED, NOT_SHOWN = "mechanism", "tuning", "seed", "not shown"
LEVEL = 0.05  # of an interval, for the first try


@dataclass(frozen=True)
class Evidence:
    """Differences between challenger and one reference, positive where the challenger is better.

    Attributes:
        held_out_best: [R] on held-out cells and seeds, to the best of the reference's finalists there.
        held_out_chosen: [R] likewise, to the trial that tuning chose for the reference.
        held_out_default: [R] likewise, to the reference with its default settings.
        tuned: [n] on the cells and seeds of tuning, between the two chosen trials.
        tuned_default: [n] likewise, to the reference with its default settings.
    """

    held_out_best: np.ndarray
    held_out_chosen: np.ndarray
    held_out_default: np.ndarray
    tuned: np.ndarray
    tuned_default: np.ndarray


def confidence_of(number: int) -> float:
    """Of the intervals in the try of this number: 1 − 0.05 / number."""
    if number < 1:
        raise ConfigError(f"try {number} must be at least 1")
    return 1 - LEVEL / number


def verdict(evidence: list[Evidence], margin: float, number: int = 1) -> str:
    """Judge a challenger.

    An advantage over a reference is shown by differences whose interval lies above the margin.

    'mechanism': held out, the challenger has an advantage over the best finalist of each reference.
    'tuning': it has not, but held out it has one over each reference with its default settings, or with its chosen
    ones.
    'seed': it has none of these, but on the cells and seeds of tuning it has one over each reference, with the chosen
    or with the default settings.
    'not shown': otherwise.

    Args:
        evidence: for each reference.
        margin: the smallest difference that matters.
        number: of this try, by which intervals are corrected.
    """
    confidence = confidence_of(number)

    def is_shown(name: str) -> bool:
        return all(lower_bound(getattr(of, name), confidence) > margin for of in evidence)

    if is_shown("held_out_best"):
        return MECHANISM
    if is_shown("held_out_chosen") or is_shown("held_out_default"):
        return TUNING
    if is_shown("tuned") or is_shown("tuned_default"):
        return SEED
    return NOT_SHOWN


def lower_bound(differences: np.ndarray, confidence: float) -> float:
    """Of the interval; −∞ if a difference is not finite or there are fewer than two."""
    if len(differences) < 2 or not np.isfinite(differences).all():
        return -np.inf
    return PairedDifference(differences, confidence).interval[0]
