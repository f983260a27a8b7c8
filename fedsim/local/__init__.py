"""What one client does in one local step, and how its learning rate moves."""

from fedsim.local.base import LocalRule, Objective
from fedsim.local.schedules import Constant, Inverse, InverseSqrt, PerStep, Schedule
from fedsim.local.sgd import SGD

__all__ = ["SGD", "Constant", "Inverse", "InverseSqrt", "LocalRule", "Objective", "PerStep", "Schedule"]
