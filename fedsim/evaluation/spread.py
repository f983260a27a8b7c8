"""Measures of the spread over clients of one number per client. Worst and best tenths and the variance are those of
q-FFL (Li et al., ICLR 2020, Tables 1 and 2), there in per cent; the index is that of Jain, Chiu and Hawe (1984).
Clients have equal weights.
"""

from __future__ import annotations

import re

import numpy as np

TENTH_PERCENT = 10
WORST_OR_BEST_PATTERN = re.compile(r"(worst|best)(\d+)")
FAIRNESS_MEASURES = (f"best{TENTH_PERCENT}", "variance", "jain")  # in addition to the worst tenth


def spread(values: np.ndarray, name: str, higher_is_better: bool) -> float:
    """'worst10', 'best5' (per cent of the clients, at least one of them), 'variance' or 'jain' of [n] numbers.

    Args:
        values: one per client; NaN is excluded.
        name: of the measure.
        higher_is_better: whether higher is better.
    """
    valid_values = values[~np.isnan(values)].astype(np.float64)
    if not len(valid_values):
        return float("nan")
    if name == "variance":
        return float(valid_values.var())
    if name == "jain":
        square = float((valid_values**2).sum())
        return float(valid_values.sum() ** 2 / (len(valid_values) * square)) if square else float("nan")
    match = WORST_OR_BEST_PATTERN.fullmatch(name)
    assert match is not None
    count = max(1, len(valid_values) * int(match[2]) // 100)
    lowest_first = np.sort(valid_values)
    is_low_end = (match[1] == "worst") == higher_is_better
    return float((lowest_first[:count] if is_low_end else lowest_first[-count:]).mean())


def measure_description(name: str) -> str:
    """The description of a measure of `spread`."""
    if name == "variance":
        return "variance over clients"
    if name == "jain":
        return "Jain's index over clients, (Σ a)² / (n Σ a²): 1 if all are equal, 1/n if all but one are zero"
    match = WORST_OR_BEST_PATTERN.fullmatch(name)
    assert match is not None
    return f"mean over the {int(match[2])} % of the clients where it is {match[1]}"
