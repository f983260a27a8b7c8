"""The columns of metrics.csv and their descriptions, in file order, from `fedsim.evaluation.registry`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedsim.evaluation import registry
from fedsim.evaluation.registry import (
    EVALUATED_MODEL_DESCRIPTIONS,
    HIGHER,
    UNKNOWN_DIRECTION_TEXT,
    MetricDescription,
    columns_of_other_model,
    describe_metric,
)


def descriptions(metrics: Mapping[str, MetricDescription]) -> dict[str, str]:
    """Column → description."""
    return {column: metric.description for column, metric in metrics.items()}


RUN_POSITION_COLUMNS, MEASURED_COLUMNS, WORK_COLUMNS, TIME_COLUMNS = map(
    descriptions, (registry.PROGRESS_COLUMNS, registry.MODEL_METRICS, registry.WORK_COLUMNS, registry.CLOCK_COLUMNS)
)
COLUMN_DESCRIPTIONS = (
    RUN_POSITION_COLUMNS
    | descriptions(registry.EVALUATED_MODEL_METRICS)
    | descriptions(registry.OVER_TIME)
    | WORK_COLUMNS
    | TIME_COLUMNS
)

# in the names of columns about the spread over clients
SPREAD_SUFFIXES = ("median", "worst", "best", "variance", "jain", "absent", "unseen", "present", "departed")


def is_fraction(metric: str) -> bool:
    """Return whether a column is a fraction that is shown in per cent."""
    return describe_metric(metric).unit == "%"


def is_higher_better(metric: str, column_descriptions: Mapping[str, str] | None = None) -> bool:
    """Whether higher is better; for a user's metric, according to its description, else its name."""
    return describe_metric(metric, column_descriptions).better == HIGHER


def validation_metric(columns: Iterable[str]) -> str | None:
    """The column for model selection: the validation accuracy (or else loss) of the server's model, or of clients' own
    models if there is no other; None without validation samples.
    """
    candidates = [
        name
        for name in columns
        if "validation_" in name and not any(spread_suffix in name for spread_suffix in SPREAD_SUFFIXES)
    ]
    return min(
        candidates,
        key=lambda name: (not name.startswith(("global", "validation")), not is_higher_better(name)),
        default=None,
    )


__all__ = [
    "COLUMN_DESCRIPTIONS",
    "EVALUATED_MODEL_DESCRIPTIONS",
    "MEASURED_COLUMNS",
    "RUN_POSITION_COLUMNS",
    "TIME_COLUMNS",
    "UNKNOWN_DIRECTION_TEXT",
    "WORK_COLUMNS",
    "columns_of_other_model",
    "descriptions",
    "is_fraction",
    "is_higher_better",
    "validation_metric",
]
