"""Runs a local rule on all active rows: how, never what."""

from fedsim.trainer.asking import Asking
from fedsim.trainer.execution import Execution
from fedsim.trainer.trainer import Trainer
from fedsim.trainer.trainers import Trainers

__all__ = ["Asking", "Execution", "Trainer", "Trainers"]
