"""Runs a local rule on all active rows, by one of several executors."""

from fedsim.trainer.execution import Execution
from fedsim.trainer.full_data_query import FullDataQuery
from fedsim.trainer.joint_executor import LockstepExecutor
from fedsim.trainer.local_task import LocalResult, LocalTask, TaskGenerator, run_to_completion
from fedsim.trainer.trainer import Trainer
from fedsim.trainer.trainers import TrainerFactory

__all__ = [
    "Execution",
    "FullDataQuery",
    "LocalResult",
    "LocalTask",
    "LockstepExecutor",
    "TaskGenerator",
    "Trainer",
    "TrainerFactory",
    "run_to_completion",
]
