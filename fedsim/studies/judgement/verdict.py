"""What an advantage is due to, by intervals of paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.studies.results.paired import PairedDifference

MECHANISM_VERDICT, TUNING_VERDICT, SEED_VERDICT, NOT_SHOWN_VERDICT = "mechanism", "tuning", "seed", "not shown"
VERDICTS = (MECHANISM_VERDICT, TUNING_VERDICT, SEED_VERDICT, NOT_SHOWN_VERDICT)  # the strongest first
TOTAL_ERROR_LEVEL = 0.05  # the probability of an error in one try or more


@dataclass(frozen=True)
class Evidence:
    """Differences between challenger and one reference, positive where the challenger is better.

    Attributes:
        held_out_best: [R] on held-out cells and seeds, to the best of the reference's trials there.
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


def confidence_of_attempt(attempt: int, num_kinds: int = 1) -> float:
    """Of the intervals in the try of this number, with so many kinds of environments: 1 − 0.05 / (k (k + 1) · kinds).

    The levels 0.05 / (k (k + 1)) of all tries add up to 0.05, however many there are.
    """
    if attempt < 1:
        raise ConfigError(f"try {attempt} must be at least 1")
    return 1 - TOTAL_ERROR_LEVEL / (attempt * (attempt + 1) * num_kinds)


def strongest_verdict(verdicts: Sequence[str]) -> str:
    """The strongest of the verdicts of several kinds of environments."""
    return min(verdicts, key=VERDICTS.index)


def judge_evidence(evidence: Sequence[Evidence], margin: float, confidence: float) -> str:
    """Judge a challenger in environments of one kind.

    An advantage over a reference is shown by differences whose interval lies above the margin.

    'mechanism': held out, the challenger has an advantage over the best trial of each reference.
    'tuning': it has not, but held out it has one over each reference with its default settings, or with its chosen
    ones.
    'seed': it has none of these, but on the cells and seeds of tuning it has one over each reference, with the chosen
    or with the default settings.
    'not shown': otherwise.

    Args:
        evidence: for each reference.
        margin: the smallest difference that matters.
        confidence: of the intervals.
    """

    def is_advantage_shown(name: str) -> bool:
        return all(lower_bound(getattr(baseline_evidence, name), confidence) > margin for baseline_evidence in evidence)

    if is_advantage_shown("held_out_best"):
        return MECHANISM_VERDICT
    if is_advantage_shown("held_out_chosen") or is_advantage_shown("held_out_default"):
        return TUNING_VERDICT
    if is_advantage_shown("tuned") or is_advantage_shown("tuned_default"):
        return SEED_VERDICT
    return NOT_SHOWN_VERDICT


def lower_bound(differences: np.ndarray, confidence: float) -> float:
    """Of the interval; −∞ if a difference is not finite or there are fewer than two."""
    if len(differences) < 2 or not np.isfinite(differences).all():
        return -np.inf
    return PairedDifference(differences, confidence).confidence_interval[0]
