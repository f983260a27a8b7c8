"""What a run shows and writes: metrics.csv, TensorBoard, a progress line, and clients.npz."""

from fedsim.run.tracking.observer import EvaluationEvent, Observer, RunEnded, RunStarted
from fedsim.run.tracking.result import Result
from fedsim.run.tracking.run_config import RunConfig
from fedsim.run.tracking.services import MLflow, Trackio, WandB
from fedsim.run.tracking.tensorboard import TensorBoard
from fedsim.run.tracking.tracking_options import Tracking

__all__ = [
    "EvaluationEvent",
    "MLflow",
    "Observer",
    "Result",
    "RunConfig",
    "RunEnded",
    "RunStarted",
    "TensorBoard",
    "Tracking",
    "Trackio",
    "WandB",
]
