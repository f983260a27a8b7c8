"""Simulated (virtual) time: durations of clients' rounds, partial work, and delayed updates."""

from fedsim.availability.clock.clock import Clock, DeadlineAvailability, Devices, NoClock
from fedsim.availability.clock.delay import ConstantDelay, Delay, GeometricDelay, LognormalDelay, NoDelay, UniformDelay
from fedsim.availability.clock.events import Events
from fedsim.availability.clock.work import AllWork, GeometricWork, GrowingWork, UniformWork, Work

__all__ = [
    "AllWork",
    "Clock",
    "ConstantDelay",
    "DeadlineAvailability",
    "Delay",
    "Devices",
    "Events",
    "GeometricDelay",
    "GeometricWork",
    "GrowingWork",
    "LognormalDelay",
    "NoClock",
    "NoDelay",
    "UniformDelay",
    "UniformWork",
    "Work",
]
