"""How a client's data answer the deployed model."""

from fedsim.shift.base import NoShift, Shift
from fedsim.shift.location import Location

__all__ = ["Location", "NoShift", "Shift"]
