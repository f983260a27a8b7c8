"""Prediction and loss: any `nn.Module`, seen as a function of one row of parameters."""

from fedsim.models.cnn import CIFAR10CNN, CINIC10CNN, SVHNCNN
from fedsim.models.linear import Linear
from fedsim.models.losses import LOSSES
from fedsim.models.mean import Mean
from fedsim.models.mlp import MLP
from fedsim.models.row_model import RowModel

__all__ = ["CIFAR10CNN", "CINIC10CNN", "LOSSES", "MLP", "SVHNCNN", "Linear", "Mean", "RowModel"]
