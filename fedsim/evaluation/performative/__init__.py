"""Reference points of training under a shift: the performatively stable and the performatively optimal point."""

from fedsim.evaluation.performative.nash import nash_point
from fedsim.evaluation.performative.optimal import optimal_point
from fedsim.evaluation.performative.risk import Risk
from fedsim.evaluation.performative.stable import stable_point

__all__ = ["Risk", "nash_point", "optimal_point", "stable_point"]
