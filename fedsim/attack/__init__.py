"""Clients that lie: what they send in the place of their rows."""

from fedsim.attack.base import Attack, Nobody, Omniscient
from fedsim.attack.rows import ALIE, IPM, MinMax, Noise, SignFlip

__all__ = ["ALIE", "IPM", "Attack", "MinMax", "Nobody", "Noise", "Omniscient", "SignFlip"]
