"""Models and losses: a `nn.Module` as a function of one row of parameters."""

from fedsim.models.cnn import CIFAR10CNN, CINIC10CNN, SVHNCNN
from fedsim.models.dense import MLP, Linear, Mean
from fedsim.models.images import LeafCNN, ViT, from_torchvision
from fedsim.models.lora import LoRAMLP
from fedsim.models.losses import LOSSES
from fedsim.models.row_model import StatelessModel
from fedsim.models.text import CharLSTM, TextClassifier, Transformer

__all__ = [
    "CIFAR10CNN",
    "CINIC10CNN",
    "LOSSES",
    "MLP",
    "SVHNCNN",
    "CharLSTM",
    "LeafCNN",
    "Linear",
    "LoRAMLP",
    "Mean",
    "StatelessModel",
    "TextClassifier",
    "Transformer",
    "ViT",
    "from_torchvision",
]
