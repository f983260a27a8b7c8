"""Where training under a shift may end: the performatively stable point and the performatively optimal one."""

from fedsim.evaluation.performative.nash import nash_point
from fedsim.evaluation.performative.optimal import optimal_point
from fedsim.evaluation.performative.risk import Risk
from fedsim.evaluation.performative.stable import stable_point

__all__ = ["Risk", "nash_point", "optimal_point", "stable_point"]
