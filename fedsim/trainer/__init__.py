"""Runs a local rule on all active rows: how, never what."""

from fedsim.trainer.batches import Batches
from fedsim.trainer.report import Report
from fedsim.trainer.trainer import Trainer

__all__ = ["Batches", "Report", "Trainer"]
