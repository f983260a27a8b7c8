"""The columns of metrics.csv and what each is, in the order of the file.

Everything here is taken from `fedsim.evaluation.registry`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedsim.evaluation import registry
from fedsim.evaluation.registry import HIGHER, MODELS, UNDIRECTED, MetricDescription, columns_of_other_model, describe


def descriptions(metrics: Mapping[str, MetricDescription]) -> dict[str, str]:
    """Column → what it is."""
    return {column: metric.description for column, metric in metrics.items()}


PLACE, MEASURED, WORK, TIME = map(descriptions, (registry.PLACE, registry.MEASURED, registry.WORK, registry.TIME))
COLUMNS = PLACE | descriptions(registry.EVALUATED) | WORK | TIME

# In the names of those that say how clients differ.
SPREADS = ("median", "worst", "best", "variance", "jain", "absent", "unseen")


def fraction(metric: str) -> bool:
    """Is it a fraction that people read in per cent?"""
    return describe(metric).unit == "%"


def is_higher_better(metric: str, meanings: Mapping[str, str] | None = None) -> bool:
    """Is more of it better? Its meaning says so of a metric that a user adds, where that is known; else its name."""
    return describe(metric, meanings).better == HIGHER


def validation_metric(columns: Iterable[str]) -> str | None:
    """The column by which a model may be chosen: the mean of the server's model on validation samples, its accuracy
    before its loss, that of clients' own models where there is no other; None where there are no such samples."""
    candidates = [name for name in columns if "validation_" in name and not any(word in name for word in SPREADS)]
    return min(
        candidates,
        key=lambda name: (not name.startswith(("global", "validation")), not is_higher_better(name)),
        default=None,
    )


__all__ = [
    "COLUMNS",
    "MEASURED",
    "MODELS",
    "PLACE",
    "TIME",
    "UNDIRECTED",
    "WORK",
    "columns_of_other_model",
    "descriptions",
    "fraction",
    "is_higher_better",
    "validation_metric",
]
