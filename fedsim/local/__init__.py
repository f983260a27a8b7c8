"""Local training rules (one step of one client) and learning-rate schedules."""

from fedsim.local.apfl import APFL
from fedsim.local.dfo import DFO
from fedsim.local.ditto import Ditto
from fedsim.local.fedala import FedALA
from fedsim.local.fedlc import FedLC
from fedsim.local.fedntd import FedNTD
from fedsim.local.fedpac import FedPAC
from fedsim.local.fedproto import FedProto
from fedsim.local.fedrep import FedRep
from fedsim.local.fedrod import FedRoD
from fedsim.local.moon import MOON
from fedsim.local.optimisers import Adam, Momentum
from fedsim.local.perfedavg import PerFedAvg
from fedsim.local.performative import PFL, PoFL
from fedsim.local.pfedme import PFedMe
from fedsim.local.play import Play
from fedsim.local.plugin import PlugIn
from fedsim.local.profl import PG, ProFL
from fedsim.local.rrm import RRM
from fedsim.local.rule import AdamMoments, Carry, GradientStep, HeavyBall, LocalRule, Objective
from fedsim.local.sam import SAM
from fedsim.local.schedules import Constant, Cosine, Inverse, InverseSqrt, PerStep, Schedule
from fedsim.local.sgd import SGD
from fedsim.local.stateful import StatefulPerfGD

__all__ = [
    "APFL",
    "DFO",
    "MOON",
    "PFL",
    "PG",
    "RRM",
    "SAM",
    "SGD",
    "Adam",
    "AdamMoments",
    "Carry",
    "Constant",
    "Cosine",
    "Ditto",
    "FedALA",
    "FedLC",
    "FedNTD",
    "FedPAC",
    "FedProto",
    "FedRep",
    "FedRoD",
    "GradientStep",
    "HeavyBall",
    "Inverse",
    "InverseSqrt",
    "LocalRule",
    "Momentum",
    "Objective",
    "PFedMe",
    "PerFedAvg",
    "PerStep",
    "Play",
    "PlugIn",
    "PoFL",
    "ProFL",
    "Schedule",
    "StatefulPerfGD",
]
