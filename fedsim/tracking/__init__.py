"""What a person sees of a run: metrics.csv, TensorBoard, a progress line, and what is known of each client."""

from fedsim.tracking.observer import EvaluationEvent, Observer, RunEnded, RunStarted
from fedsim.tracking.options import Tracking
from fedsim.tracking.result import Result
from fedsim.tracking.services import MLflow, Trackio, WandB
from fedsim.tracking.tensorboard import TensorBoard

__all__ = [
    "EvaluationEvent",
    "MLflow",
    "Observer",
    "Result",
    "RunEnded",
    "RunStarted",
    "TensorBoard",
    "Tracking",
    "Trackio",
    "WandB",
]
