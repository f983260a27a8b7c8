"""Partition of samples over clients: a ragged index table per replicate."""

from fedsim.data.partition.class_split import ClassSplit
from fedsim.data.partition.dirichlet import Dirichlet
from fedsim.data.partition.even import IID, Equal
from fedsim.data.partition.features import FeatureNoise, FeatureRotation
from fedsim.data.partition.flwr import Flwr
from fedsim.data.partition.grouped import Grouped
from fedsim.data.partition.hierarchical import Hierarchical
from fedsim.data.partition.matched import Matched
from fedsim.data.partition.natural import Natural
from fedsim.data.partition.partition import Partition, Skew, Table
from fedsim.data.partition.quantity import Quantity

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
