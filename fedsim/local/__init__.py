"""What one client does in one local step, and how its learning rate moves."""

from fedsim.local.base import LocalRule, Objective
from fedsim.local.performative import PFL, PoFL
from fedsim.local.profl import PG, ProFL
from fedsim.local.schedules import Constant, Inverse, InverseSqrt, PerStep, Schedule
from fedsim.local.sgd import SGD

__all__ = [
    "PFL",
    "PG",
    "SGD",
    "Constant",
    "Inverse",
    "InverseSqrt",
    "LocalRule",
    "Objective",
    "PerStep",
    "PoFL",
    "ProFL",
    "Schedule",
]
