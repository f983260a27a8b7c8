"""User-defined metrics: metrics of torchmetrics by name, and your own functions and classes."""

from fedsim.evaluation.metrics.collection import Metrics, target_of
from fedsim.evaluation.metrics.entries import entries, possible_columns

__all__ = ["Metrics", "entries", "possible_columns", "target_of"]
