"""Who holds which samples: a ragged index table per replicate."""

from fedsim.partition.base import Partition, Table
from fedsim.partition.class_split import ClassSplit
from fedsim.partition.dirichlet import Dirichlet
from fedsim.partition.even import IID, Equal
from fedsim.partition.natural import Natural

__all__ = ["IID", "ClassSplit", "Dirichlet", "Equal", "Natural", "Partition", "Table"]
