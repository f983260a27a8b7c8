"""What samples exist: tensors kept once, as compact as they come, moved to the device as they are."""

from fedsim.datasets.augment import CropFlip
from fedsim.datasets.base import Dataset
from fedsim.datasets.cinic10 import CINIC10
from fedsim.datasets.digits import Digits
from fedsim.datasets.gaussian import GaussianMean
from fedsim.datasets.quadratics import Quadratics
from fedsim.datasets.synthetic import Synthetic
from fedsim.datasets.vision import CIFAR10, MNIST, SVHN, FashionMNIST

__all__ = [
    "CIFAR10",
    "CINIC10",
    "MNIST",
    "SVHN",
    "CropFlip",
    "Dataset",
    "Digits",
    "FashionMNIST",
    "GaussianMean",
    "Quadratics",
    "Synthetic",
]
