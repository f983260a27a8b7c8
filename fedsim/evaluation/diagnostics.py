"""Additional metrics of clients, measured on request (`diagnostics=[…]`).

| name | columns | cost |
|---|---|---|
| fairness | variance, Jain's index and best tenth of the clients' accuracies | none |
| worst5, best20 | mean over this percentage of the clients | none |
| absent | accuracy of clients absent in the last round, and of clients that never participated | one per client |
| drift | distance of clients' models from the server's model after local training | one pass over their models |
| presence | number of clients present; accuracy of clients present and of clients that have left for good | none |
| staleness | rounds since each client participated: τ_max, τ_avg | three numbers per client |
| power | how far the evaluated model moves the data distribution | shifting a sample of every client twice |
| stability | distance to the best model on the data that the evaluated model induces | one minimisation of the risk |
| utility | decrease of clients' losses per round in which they were available | two numbers per client |

Accuracies are measured on each client's held-out test samples, else on validation samples, else on a subsample of its
training data; the column name states which. Without labels, losses are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.evaluation.spread import FAIRNESS_MEASURES, WORST_OR_BEST_PATTERN

DIAGNOSTIC_NAMES = ("fairness", "absent", "drift", "presence", "staleness", "utility")
PERFORMATIVE_DIAGNOSTICS = (
    "power",
    "stability",
)  # of data that react to the model (`fedsim.evaluation.performative.answer`)


def check_diagnostics(names: Any) -> None:
    """Check a list of diagnostics.

    Raises:
        ConfigError: it is not a list of valid names.
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"diagnostics={names!r} must be a list, such as [fairness,staleness]")
    for name in names:
        match = WORST_OR_BEST_PATTERN.fullmatch(str(name))
        if match is None:
            checks.check_choice("diagnostics", name, (*DIAGNOSTIC_NAMES, *PERFORMATIVE_DIAGNOSTICS, "worst5", "best20"))
        elif not 1 <= int(match[2]) <= 100:
            raise ConfigError(f"diagnostics={name}: the percentage of clients must be 1 to 100, such as worst5")
    if len(set(names)) < len(names):
        raise ConfigError(f"diagnostics={list(names)} contains a name twice")


def spread_diagnostic_names(names: Sequence[str]) -> list[str]:
    """The diagnostics about the spread over clients, by their names in `spread`."""
    share_names = [name for name in names if WORST_OR_BEST_PATTERN.fullmatch(name)]
    return list(dict.fromkeys([*(FAIRNESS_MEASURES if "fairness" in names else ()), *share_names]))
