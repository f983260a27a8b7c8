"""User-defined metrics: metrics of torchmetrics by name, and your own functions and classes."""

from fedsim.evaluation.metrics.collection import UserMetrics, target_of
from fedsim.evaluation.metrics.entries import parse_metrics, possible_columns

__all__ = ["UserMetrics", "parse_metrics", "possible_columns", "target_of"]
