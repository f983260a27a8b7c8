"""Who can take part in a round: p_i^t = p_i · f_i(t), then a draw of who shows up."""

from fedsim.availability.base import Availability, Population
from fedsim.availability.probabilities import ClassCorrelated, Groups, Probability, Uniform
from fedsim.availability.processes import Bernoulli, Full, UniformK
from fedsim.availability.trajectories import InterleavedSine, Jitter, Sine, Staircase, Stationary, Trajectory

__all__ = [
    "Availability",
    "Bernoulli",
    "ClassCorrelated",
    "Full",
    "Groups",
    "InterleavedSine",
    "Jitter",
    "Population",
    "Probability",
    "Sine",
    "Staircase",
    "Stationary",
    "Trajectory",
    "Uniform",
    "UniformK",
]
