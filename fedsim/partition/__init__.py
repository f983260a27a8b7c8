"""Who holds which samples: a ragged index table per replicate."""

from fedsim.partition.base import Partition, Skew, Table
from fedsim.partition.class_split import ClassSplit
from fedsim.partition.dirichlet import Dirichlet
from fedsim.partition.even import IID, Equal
from fedsim.partition.features import FeatureNoise, FeatureRotation
from fedsim.partition.flwr import Flwr
from fedsim.partition.grouped import Grouped
from fedsim.partition.hierarchical import Hierarchical
from fedsim.partition.matched import Matched
from fedsim.partition.natural import Natural
from fedsim.partition.quantity import Quantity

__all__ = [
    "IID",
    "ClassSplit",
    "Dirichlet",
    "Equal",
    "FeatureNoise",
    "FeatureRotation",
    "Flwr",
    "Grouped",
    "Hierarchical",
    "Matched",
    "Natural",
    "Partition",
    "Quantity",
    "Skew",
    "Table",
]
