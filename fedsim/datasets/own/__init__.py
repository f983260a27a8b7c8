"""Data of one's own: arrays, tables, folders of images, data sets of others."""

from fedsim.datasets.own.arrays import ArrayFiles, Arrays
from fedsim.datasets.own.data import OwnData

__all__ = ["ArrayFiles", "Arrays", "OwnData"]
