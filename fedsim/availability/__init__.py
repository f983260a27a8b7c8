"""Availability processes: which clients can participate in a round, with probabilities p_i^t = p_i · f_i(t)."""

from fedsim.availability.arrivals import Arrivals
from fedsim.availability.availability import Availability, Population
from fedsim.availability.correlated import CommonFactor, CommonShock
from fedsim.availability.cyclic import Cyclic
from fedsim.availability.log import TraceLog
from fedsim.availability.markov import Markov
from fedsim.availability.probabilities import (
    ClassCorrelated,
    Groups,
    LabelOrdered,
    Lognormal,
    Probability,
    Uniform,
)
from fedsim.availability.processes import Bernoulli, Full, Multiset, UniformK, bernoulli
from fedsim.availability.separation import MinimumSeparation
from fedsim.availability.sessions import DeviceSessions
from fedsim.availability.trace import Trace
from fedsim.availability.trace_table import TraceTable
from fedsim.availability.trajectories import InterleavedSine, Jitter, Sine, Staircase, Stationary, Trajectory

__all__ = [
    "Arrivals",
    "Availability",
    "Bernoulli",
    "ClassCorrelated",
    "CommonFactor",
    "CommonShock",
    "Cyclic",
    "DeviceSessions",
    "Full",
    "Groups",
    "InterleavedSine",
    "Jitter",
    "LabelOrdered",
    "Lognormal",
    "Markov",
    "MinimumSeparation",
    "Multiset",
    "Population",
    "Probability",
    "Sine",
    "Staircase",
    "Stationary",
    "Trace",
    "TraceLog",
    "TraceTable",
    "Trajectory",
    "Uniform",
    "UniformK",
    "bernoulli",
]
