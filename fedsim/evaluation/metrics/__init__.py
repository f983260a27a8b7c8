"""Metrics that a user adds: torchmetrics' by name, and functions and classes of one's own."""

from fedsim.evaluation.metrics.collection import Metrics, target_of
from fedsim.evaluation.metrics.entries import parse_metrics, possible_columns

__all__ = ["Metrics", "parse_metrics", "possible_columns", "target_of"]
