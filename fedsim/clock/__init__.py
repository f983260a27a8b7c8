"""Time that is not measured but simulated: how long clients take, how much of their work they do."""

from fedsim.clock.clock import Clock, CutOffByTheClock, Devices, NoClock
from fedsim.clock.work import AllWork, UniformWork, Work

__all__ = ["AllWork", "Clock", "CutOffByTheClock", "Devices", "NoClock", "UniformWork", "Work"]
