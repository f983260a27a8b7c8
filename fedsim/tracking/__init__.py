"""What a person sees of a run: metrics.csv, TensorBoard, a progress line, summary.json, checkpoints."""

from fedsim.tracking.options import Tracking
from fedsim.tracking.result import Result
from fedsim.tracking.tracker import Tracker

__all__ = ["Result", "Tracker", "Tracking"]
