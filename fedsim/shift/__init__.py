"""Performative shifts: how a client's data react to the deployed model."""

from fedsim.shift.contribution import Contribution
from fedsim.shift.demand import Demand
from fedsim.shift.direction import ResponseDirection
from fedsim.shift.elastic import Elastic
from fedsim.shift.group_mean import GroupMean
from fedsim.shift.location import Location
from fedsim.shift.players import Players
from fedsim.shift.response import Response
from fedsim.shift.shift import NoShift, Shift
from fedsim.shift.strategic import Strategic

__all__ = [
    "Contribution",
    "Demand",
    "Elastic",
    "GroupMean",
    "Location",
    "NoShift",
    "Players",
    "Response",
    "ResponseDirection",
    "Shift",
    "Strategic",
]
