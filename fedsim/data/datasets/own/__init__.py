"""Your own data: arrays, tables, folders of images, data sets of other libraries."""

from fedsim.data.datasets.own.arrays import ArrayFiles, Arrays
from fedsim.data.datasets.own.data import UserDataset
from fedsim.data.datasets.own.hub import Hub
from fedsim.data.datasets.own.image_folder import ImageFolder
from fedsim.data.datasets.own.leaf import LEAF
from fedsim.data.datasets.own.table import Table
from fedsim.data.datasets.own.text_table import TextTable
from fedsim.data.datasets.own.torch_dataset import TorchData

__all__ = ["LEAF", "ArrayFiles", "Arrays", "Hub", "ImageFolder", "Table", "TextTable", "TorchData", "UserDataset"]
