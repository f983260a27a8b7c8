"""Byzantine clients: attacks on the rows that they send, or on the labels that they train on."""

from fedsim.uplink.attack.attack import Attack, NoAttack, Omniscient
from fedsim.uplink.attack.hidden import Mimic, MinMax, MinSum
from fedsim.uplink.attack.labels import LabelFlip
from fedsim.uplink.attack.rows import ALIE, IPM, Noise, SignFlip

__all__ = [
    "ALIE",
    "IPM",
    "Attack",
    "LabelFlip",
    "Mimic",
    "MinMax",
    "MinSum",
    "NoAttack",
    "Noise",
    "Omniscient",
    "SignFlip",
]
