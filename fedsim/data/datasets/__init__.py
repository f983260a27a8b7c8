"""Data sets: tensors that are stored once, in their compact original type, on the device."""

from fedsim.data.datasets.adult import Adult
from fedsim.data.datasets.augment import CropFlip
from fedsim.data.datasets.binary_gaussians import BinaryGaussians
from fedsim.data.datasets.cinic10 import CINIC10
from fedsim.data.datasets.credit import GiveMeSomeCredit
from fedsim.data.datasets.dataset import Dataset
from fedsim.data.datasets.digits import Digits
from fedsim.data.datasets.emnist import EMNIST, FEMNIST
from fedsim.data.datasets.gaussian import GaussianMean
from fedsim.data.datasets.houses import HousePrices, RegressionGroups
from fedsim.data.datasets.market import Market
from fedsim.data.datasets.own import (
    LEAF,
    ArrayFiles,
    Arrays,
    Hub,
    ImageFolder,
    Table,
    TextTable,
    TorchData,
    UserDataset,
)
from fedsim.data.datasets.pricing import Pricing, PricingGroups
from fedsim.data.datasets.quadratics import Quadratics
from fedsim.data.datasets.stream import StreamDataset
from fedsim.data.datasets.synthetic import Synthetic
from fedsim.data.datasets.text import Text
from fedsim.data.datasets.vision import CIFAR10, CIFAR100, MNIST, SVHN, FashionMNIST

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "CINIC10",
    "EMNIST",
    "FEMNIST",
    "LEAF",
    "MNIST",
    "SVHN",
    "Adult",
    "ArrayFiles",
    "Arrays",
    "BinaryGaussians",
    "CropFlip",
    "Dataset",
    "Digits",
    "FashionMNIST",
    "GaussianMean",
    "GiveMeSomeCredit",
    "HousePrices",
    "Hub",
    "ImageFolder",
    "Market",
    "Pricing",
    "PricingGroups",
    "Quadratics",
    "RegressionGroups",
    "StreamDataset",
    "Synthetic",
    "Table",
    "Text",
    "TextTable",
    "TorchData",
    "UserDataset",
]
