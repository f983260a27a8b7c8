"""Entries under `metrics`: parsed and checked as far as possible without data and without torchmetrics."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.evaluation.columns import EVALUATED_MODEL_DESCRIPTIONS, columns_of_other_model

METRIC_FORMS_TEXT = (
    "names of torchmetrics' metrics, such as [f1_score,auroc], or {name: …, ARGUMENTS} or {_target_: package.function}"
)
METRIC_DIRECTIONS = ("higher", "lower")
ENTRY_KEYS = ("name", "_target_", "column", "better")  # all others are arguments
CLIENT_SUMMARY_SUFFIXES = ("median", "worst10")  # over clients, after a column's name
BUILT_IN_COLUMNS = ("loss", "accuracy")  # names of built-in columns


@dataclass(frozen=True)
class RequestedMetric:
    """One requested metric.

    Attributes:
        column: its name in columns: test_COLUMN, train_COLUMN, …
        name: of torchmetrics' functional metric; or
        target: a callable (output, target) → number or [B], or a class; or its dotted path.
        better_direction: 'higher' or 'lower'; None: as defined by the metric itself.
        arguments: of the metric.
    """

    column: str
    name: str | None = None
    target: Callable[..., Any] | str | None = None
    better_direction: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The metric as written by a user."""
        argument_text = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        return (self.name or _callable_path(self.target)) + (f"({argument_text})" if argument_text else "")


def parse_metrics(metrics: Any) -> list[RequestedMetric]:
    """The requested metrics.

    Raises:
        ConfigError: an entry is not a metric, or its column name is taken.
    """
    if isinstance(metrics, (str, Mapping)) or not isinstance(metrics, Iterable):
        raise ConfigError(f"metrics={metrics!r} must be a list of {METRIC_FORMS_TEXT}")
    parsed_entries = [_parse_metric_entry(metric) for metric in metrics]
    columns = [entry.column for entry in parsed_entries]
    for column in columns:
        base_column = re.sub(r"_(median|worst10|by_client)$", "", column)
        if (
            columns.count(column) > 1
            or base_column in BUILT_IN_COLUMNS
            or (base_column != column and base_column in columns)
        ):
            reason = "is the name of two metrics" if base_column in columns[1:] else "is the name of a built-in column"
            raise ConfigError(f"metrics: {column} {reason}; choose another with {{name: …, column: NAME}}")
    return parsed_entries


def possible_columns(metrics: Any) -> set[str]:
    """All columns that these metrics may have in a run."""
    columns = set()
    for entry in parse_metrics(metrics):
        over_clients = f"client_{entry.column}_worst10"
        evaluated = {f"test_{entry.column}", f"train_{entry.column}", over_clients}
        columns |= evaluated.union(
            *(columns_of_other_model(model, evaluated).values() for model in EVALUATED_MODEL_DESCRIPTIONS)
        )
        for model in ("global", "localized", "personal"):
            validation_column = f"{model}_validation_{entry.column}"
            columns |= {validation_column, *(f"{validation_column}_{summary}" for summary in CLIENT_SUMMARY_SUFFIXES)}
    return columns


def _parse_metric_entry(metric: Any) -> RequestedMetric:
    if callable(metric):
        metric = {"_target_": metric}
    elif isinstance(metric, str):
        metric = {"name": metric}
    if not isinstance(metric, Mapping) or len({"name", "_target_"} & metric.keys()) != 1:
        raise ConfigError(f"metrics: {metric!r} is not a metric; give {METRIC_FORMS_TEXT}")
    arguments = {str(key): value for key, value in metric.items() if key not in ENTRY_KEYS}
    name, target = metric.get("name"), metric.get("_target_")
    if target is None and (not isinstance(name, str) or not name):
        raise ConfigError(f"metrics: name={name!r} must be a word, such as f1_score")
    if target is not None and not isinstance(target, str) and not callable(target):
        raise ConfigError(f"metrics: _target_={target!r} must be the path of a function or class")
    column = metric.get("column")
    if column is None:
        column = name or _callable_path(target).rpartition(".")[2]
    if not isinstance(column, str) or not re.fullmatch(r"[A-Za-z]\w*", column, re.ASCII):
        raise ConfigError(f"metrics: column={column!r} must consist of letters, digits and underscores; set column")
    better_direction = metric.get("better")
    if better_direction is not None:
        checks.check_choice("metrics: better", better_direction, METRIC_DIRECTIONS)
    return RequestedMetric(column, name, target, better_direction, arguments)


def _callable_path(target: Any) -> str:
    """The name of a callable."""
    if isinstance(target, str):
        return target
    while isinstance(target, functools.partial):
        target = target.func
    definition = target if hasattr(target, "__qualname__") else type(target)
    return f"{definition.__module__}.{definition.__qualname__}"
