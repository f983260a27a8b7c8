"""Data of one's own: arrays, tables, folders of images, data sets of other libraries."""

from fedsim.datasets.own.arrays import ArrayFiles, Arrays
from fedsim.datasets.own.data import OwnData
from fedsim.datasets.own.hub import Hub
from fedsim.datasets.own.image_folder import ImageFolder
from fedsim.datasets.own.leaf import LEAF
from fedsim.datasets.own.table import Table
from fedsim.datasets.own.torch_dataset import TorchData

__all__ = ["LEAF", "ArrayFiles", "Arrays", "Hub", "ImageFolder", "OwnData", "Table", "TorchData"]
