"""Runs a local rule on all active rows: how, never what."""

from fedsim.trainer.asking import Asking
from fedsim.trainer.company import Company
from fedsim.trainer.execution import Execution
from fedsim.trainer.trainer import Trainer
from fedsim.trainer.trainers import Trainers
from fedsim.trainer.work import Done, Steps, Work, alone

__all__ = ["Asking", "Company", "Done", "Execution", "Steps", "Trainer", "Trainers", "Work", "alone"]
