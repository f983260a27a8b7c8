"""The three convolutional networks of FedAWE's experiments (fedawe Table 6), Kaiming-initialised.

Every weight but the last layer's is He-normal, every bias zero. The last layer's weight is PyTorch's default, uniform
on ±1/√fan_in, and so is its bias with last_bias='default' (their authors' program initialises all layers but the last).
"""

from __future__ import annotations

import itertools
from typing import Annotated

from torch import Tensor, nn

from fedsim.core.constraints import Fraction, OneOf, validate_arguments


def _convolution_layers(channels: int) -> list[nn.Module]:
    """C(in, 32)-R-M-C(32, 32)-R-M: kernel 3, stride 1, padding 1; 2×2 max pooling."""
    layers: list[nn.Module] = []
    for source in (channels, 32):
        layers += [nn.Conv2d(source, 32, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return layers


LastBias = Annotated[str, OneOf("zero", "default")]


@validate_arguments
class _ConvNet(nn.Module):
    """Two convolutions, then fully connected layers; dropout before each of them where `dropout` > 0."""

    samplewise = True

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        hidden: tuple[int, ...],
        dropout: Fraction = 0.0,
        last_bias: LastBias = "zero",
    ) -> None:
        super().__init__()
        channels, height, width = shape
        layers = [*_convolution_layers(channels), nn.Flatten()]
        widths = [32 * (height // 4) * (width // 4), *hidden, classes]
        for position, (a, b) in enumerate(itertools.pairwise(widths)):
            layers += [nn.Dropout(dropout)] if dropout else []
            layers += [nn.Linear(a, b)] + ([nn.ReLU()] if position < len(hidden) else [])
        self.layers = nn.Sequential(*layers)
        *hidden_layers, output_layer = [m for m in self.layers if isinstance(m, nn.Conv2d | nn.Linear)]
        for module in hidden_layers:
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        for module in hidden_layers if last_bias == "default" else [*hidden_layers, output_layer]:
            assert module.bias is not None
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class SVHNCNN(_ConvNet):
    """C-R-M-C-R-M-L(128)-R-L(10)."""

    def __init__(self, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, last_bias: LastBias = "zero") -> None:
        super().__init__(shape, classes, (128,), last_bias=last_bias)


class CIFAR10CNN(_ConvNet):
    """C-R-M-C-R-M-L(256)-R-L(64)-R-L(10)."""

    def __init__(self, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, last_bias: LastBias = "zero") -> None:
        super().__init__(shape, classes, (256, 64), last_bias=last_bias)


class CINIC10CNN(_ConvNet):
    """C-R-M-C-R-M-D-L(512)-R-D-L(256)-R-D-L(10), dropout 0.2."""

    def __init__(
        self,
        shape: tuple[int, ...] = (3, 32, 32),
        classes: int = 10,
        dropout: Fraction = 0.2,
        last_bias: LastBias = "zero",
    ) -> None:
        super().__init__(shape, classes, (512, 256), dropout, last_bias)
