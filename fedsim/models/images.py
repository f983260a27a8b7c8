"""Models of images: LEAF's network for handwriting, a small vision transformer, and torchvision's classifiers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from fedsim.core import checks
from fedsim.core.constraints import Count, Fraction, OneOf, validate_arguments
from fedsim.core.errors import ConfigError
from fedsim.core.torchvision_import import import_torchvision
from fedsim.models.attention import attention_blocks

NORM_KINDS = ("batch", "group", "none")
GROUP_NORM_GROUPS = 2  # of a group normalisation (Hsieh et al., ICML 2020, §5)


@validate_arguments
class LeafCNN(nn.Module):
    """LEAF's network for FEMNIST (Caldas et al., 2018): two 5×5 convolutions with pooling, a layer of 2048.

    Args:
        hidden: width of that layer.
    """

    samplewise = True

    def __init__(self, shape: tuple[int, ...] = (1, 28, 28), classes: int = 62, hidden: Count = 2048) -> None:
        super().__init__()
        channels, height, width = shape
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (height // 4) * (width // 4), hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@validate_arguments
class ViT(nn.Module):
    """A small vision transformer (Dosovitskiy et al., ICLR 2021): patches, a class token, blocks of attention.

    Args:
        patch: side of a patch, which must divide the image's.
        width, heads, layers: of the blocks; a feed-forward layer is four times as wide.
        dropout: in attention and after every sublayer.
    """

    first_stages: ClassVar[dict[str, tuple[str, ...]]] = {"embed": ("patches", "first", "position")}

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        patch: Count = 4,
        width: Count = 64,
        heads: Count = 4,
        layers: Count = 2,
        dropout: Fraction = 0.0,
    ) -> None:
        super().__init__()
        channels, height, breadth = shape
        if height % patch or breadth % patch:
            raise ConfigError(key="patch", value=patch, needs=f"must divide the images' sides, {height} and {breadth}")
        self.blocks = nn.Sequential(*attention_blocks(width, heads, layers, dropout))
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 1 + height // patch * (breadth // patch), width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def embed(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, 1 + patches, width], with positions."""
        patches = self.patches(x).flatten(2).mT
        return torch.cat([self.first.expand(len(x), -1, -1), patches], 1) + self.position

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x))[:, 0]))


@validate_arguments
def from_torchvision(
    name: str,
    classes: int,
    shape: tuple[int, ...] = (3, 224, 224),
    norm: Annotated[str, OneOf(*NORM_KINDS)] = "batch",
    small_images: bool = False,
    weights: str | None = None,
    **options: Any,
) -> nn.Module:
    """Build a classifier of torchvision by its name.

    Args:
        name: such as 'resnet18', 'mobilenet_v3_small', 'efficientnet_b0'.
        classes: outputs.
        shape: of an image.
        norm: 'batch' as it is; 'group': batch normalisations become group normalisations of two groups; 'none': they
            are left out.
        small_images: a residual network's first convolution is 3×3 with stride 1, without the pooling after it, as
            CIFAR's usually are (He et al., CVPR 2016, §4.2).
        weights: of torchvision, such as 'DEFAULT'; the last layer is drawn anew.
        **options: of the model.
    """
    models = import_torchvision().models
    checks.check_choice("name", name, models.list_models(module=models))
    if weights is not None:
        checks.check_choice("weights", weights, [entry.name for entry in models.get_model_weights(name)] + ["DEFAULT"])
    arguments = {"num_classes": classes} if weights is None else {"weights": weights}
    module: nn.Module = models.get_model(name, **arguments, **options)
    if weights is not None:
        _replace_last_layer(module, classes)
    if small_images:
        first_convolution = getattr(module, "conv1", None)
        if not isinstance(first_convolution, nn.Conv2d) or not hasattr(module, "maxpool"):
            raise ConfigError(f"{{small_images}}=true is for residual networks, not {name}", mentions=("small_images",))
        module.conv1 = nn.Conv2d(shape[0], first_convolution.out_channels, 3, padding=1, bias=False)
        module.maxpool = nn.Identity()
        nn.init.kaiming_normal_(module.conv1.weight, mode="fan_out", nonlinearity="relu")
    return module if norm == "batch" else _replace_normalisation(module, norm)


def _replace_last_layer(module: nn.Module, classes: int) -> None:
    """Replace the last linear layer in place."""
    name, last_layer = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)][-1]
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, nn.Linear(last_layer.in_features, classes))


def _replace_normalisation(module: nn.Module, norm: str) -> nn.Module:
    """Replace all batch normalisations."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            parent, _, leaf = name.rpartition(".")
            replacement = nn.GroupNorm(GROUP_NORM_GROUPS, layer.num_features) if norm == "group" else nn.Identity()
            setattr(module.get_submodule(parent), leaf, replacement)
    return module
