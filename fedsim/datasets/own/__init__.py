"""Data of one's own: arrays, tables, folders of images, data sets of others."""

from fedsim.datasets.own.arrays import ArrayFiles, Arrays
from fedsim.datasets.own.data import OwnData
from fedsim.datasets.own.leaf import LEAF
from fedsim.datasets.own.table import Table

__all__ = ["LEAF", "ArrayFiles", "Arrays", "OwnData", "Table"]
