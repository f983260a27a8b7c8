"""Aggregation strategies: the memory of server and clients, and the next global model."""

from fedsim.strategies.ace import ACE, ACED
from fedsim.strategies.adaptive_window import AdaptiveWindow
from fedsim.strategies.afa import AFACD, AFACS
from fedsim.strategies.afl import AFL
from fedsim.strategies.amplified_fedavg import AmplifiedFedAvg
from fedsim.strategies.amplified_scaffold import AmplifiedScaffold
from fedsim.strategies.area import AREA
from fedsim.strategies.ca2fl import CA2FL
from fedsim.strategies.ca_fed import CAFed
from fedsim.strategies.cfl import CFL
from fedsim.strategies.debiasing import Debiasing
from fedsim.strategies.dsgd import DSGD
from fedsim.strategies.f3ast import F3AST
from fedsim.strategies.fedamp import FedAMP
from fedsim.strategies.fedasync import FedAsync
from fedsim.strategies.fedau import FedAU
from fedsim.strategies.fedavg import FedAvg, FedAvgAll, FedAvgKnown
from fedsim.strategies.fedavgm import FedAvgM
from fedsim.strategies.fedawe import FedAWE
from fedsim.strategies.fedbuff import FedBuff
from fedsim.strategies.feddc import FedDC
from fedsim.strategies.feddrift import FedDrift
from fedsim.strategies.feddyn import FedDyn
from fedsim.strategies.fedexp import FedExP
from fedsim.strategies.fedfomo import FedFomo
from fedsim.strategies.fedlaavg import FedLaAvg
from fedsim.strategies.fednova import FedNova
from fedsim.strategies.fedopt import FedOpt
from fedsim.strategies.fedpac import FedPAC
from fedsim.strategies.fedpbc import FedPBC
from fedsim.strategies.fedprox import FedProx
from fedsim.strategies.fedstale import FedStale
from fedsim.strategies.fedvarp import FedVARP
from fedsim.strategies.flash import Flash
from fedsim.strategies.focus import Focus
from fedsim.strategies.hetlora import HetLoRA
from fedsim.strategies.ifca import IFCA
from fedsim.strategies.krum import Bulyan, Krum, MultiKrum
from fedsim.strategies.local_only import LocalOnly
from fedsim.strategies.lora import FedExLoRA, FlexLoRA, FLoRA
from fedsim.strategies.mifa import MIFA
from fedsim.strategies.mime_lite import MimeLite
from fedsim.strategies.mimic import MimiC
from fedsim.strategies.oort import Oort
from fedsim.strategies.p_fedavg import PFedAvg
from fedsim.strategies.per_replicate import PerReplicateStrategy, ReplicateRows
from fedsim.strategies.power_of_choice import PowerOfChoice
from fedsim.strategies.q_ffl import QFFL
from fedsim.strategies.robust import RFA, CentredClipping, Median, NormBound, Robust, TrimmedMean
from fedsim.strategies.robust_server import RobustServer
from fedsim.strategies.rolora import RoLoRA
from fedsim.strategies.scaffnew import Scaffnew
from fedsim.strategies.scaffold import Scaffold
from fedsim.strategies.strategy import KeepsClientModels, ServerRateStrategy, State, Strategy

__all__ = [
    "ACE",
    "ACED",
    "AFACD",
    "AFACS",
    "AFL",
    "AREA",
    "CA2FL",
    "CFL",
    "DSGD",
    "F3AST",
    "IFCA",
    "MIFA",
    "QFFL",
    "RFA",
    "AdaptiveWindow",
    "AmplifiedFedAvg",
    "AmplifiedScaffold",
    "Bulyan",
    "CAFed",
    "CentredClipping",
    "Debiasing",
    "FLoRA",
    "FedAMP",
    "FedAU",
    "FedAWE",
    "FedAsync",
    "FedAvg",
    "FedAvgAll",
    "FedAvgKnown",
    "FedAvgM",
    "FedBuff",
    "FedDC",
    "FedDrift",
    "FedDyn",
    "FedExLoRA",
    "FedExP",
    "FedFomo",
    "FedLaAvg",
    "FedNova",
    "FedOpt",
    "FedPAC",
    "FedPBC",
    "FedProx",
    "FedStale",
    "FedVARP",
    "Flash",
    "FlexLoRA",
    "Focus",
    "HetLoRA",
    "KeepsClientModels",
    "Krum",
    "LocalOnly",
    "Median",
    "MimeLite",
    "MimiC",
    "MultiKrum",
    "NormBound",
    "Oort",
    "PFedAvg",
    "PerReplicateStrategy",
    "PowerOfChoice",
    "ReplicateRows",
    "RoLoRA",
    "Robust",
    "RobustServer",
    "Scaffnew",
    "Scaffold",
    "ServerRateStrategy",
    "State",
    "Strategy",
    "TrimmedMean",
]
