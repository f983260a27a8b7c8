"""Low-rank adapters of linear layers (LoRA: Hu et al., ICLR 2022), for models whose other parameters are frozen.

Frozen parameters are in no client's row: they are kept once, for all clients and replicates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.core.constraints import Count, Positive, validate_arguments
from fedsim.core.errors import ConfigError
from fedsim.models.dense import MLP

RESIDUAL = "lora_residual"


class LoRALinear(nn.Module):
    """y = W x + b + (α/r) (B A + R) x, where W and b are those of a linear layer and frozen; A [r, in] starts at random
    and B [out, r] at zero.

    R [out, in] is optional and starts at zero. Clients receive it and do not train it: only a strategy changes it.

    Args:
        layer: the linear layer.
        rank: r.
        alpha: α.
        train_a: whether A is trained; else it is frozen, and the same for all clients and replicates.
        residual: whether there is R.
    """

    received_parameters = (RESIDUAL,)

    def __init__(self, layer: nn.Linear, rank: int, alpha: float, train_a: bool = True, residual: bool = False) -> None:
        super().__init__()
        if rank > min(layer.in_features, layer.out_features):
            raise ConfigError(
                key="rank", value=rank,
                needs=f"exceeds {min(layer.in_features, layer.out_features)}, the smaller dimension of a layer of "
                f"{layer.in_features} inputs and {layer.out_features} outputs",
            )  # fmt: skip
        self.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        bound = 1 / math.sqrt(layer.in_features)  # as in PyTorch's linear layers and in peft's A
        self.lora_A = nn.Parameter(torch.empty(rank, layer.in_features).uniform_(-bound, bound), requires_grad=train_a)
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank))
        self.lora_residual = nn.Parameter(torch.zeros_like(layer.weight)) if residual else None
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        low_rank_output = F.linear(F.linear(x, self.lora_A), self.lora_B)
        if self.lora_residual is not None:
            low_rank_output = low_rank_output + F.linear(x, self.lora_residual.detach())
        return F.linear(x, self.weight, self.bias) + self.scaling * low_rank_output


def add_adapters(
    module: nn.Module,
    rank: int = 4,
    alpha: float = 8.0,
    layers: str = "",
    trained: str | None = None,
    train_a: bool = True,
    residual: bool = False,
) -> nn.Module:
    """The module with adapters at its linear layers, in place; its other parameters are frozen.

    Args:
        module: such as a pre-trained backbone.
        rank, alpha, train_a, residual: see `LoRALinear`.
        layers: a regular expression: linear layers in whose name it is found get an adapter.
        trained: likewise, parameters in whose name it is found are trained as they are, such as those of a new head.

    Raises:
        ConfigError: no linear layer matches.
    """
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained is not None and re.search(trained, name) is not None)
    linear = [
        name
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear and not any(p.requires_grad for p in layer.parameters())
    ]
    adapted_layers = [name for name in linear if re.search(layers, name)]
    if not adapted_layers or "" in adapted_layers:
        raise ConfigError(
            f"model: adapters are for the linear layers of a module, and {layers!r} matches none of those of "
            f"{type(module).__name__}, {', '.join(filter(None, linear)) or 'which has none'}"
        )
    for name in adapted_layers:
        parent, _, leaf = name.rpartition(".")
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        parent_layer = module.get_submodule(parent)
        setattr(parent_layer, leaf, LoRALinear(layer, rank, alpha, train_a, residual))
        if isinstance(parent_layer, nn.TransformerEncoderLayer):
            # in evaluation its fused kernel would read `weight` of the linear layers and ignore their adapters
            parent_layer.activation_relu_or_gelu = 0
    return module


@validate_arguments
class LoRAMLP(nn.Module):
    """A multi-layer perceptron that is frozen at its random start, with an adapter at each linear layer, [B, *shape] →
    [B, classes]. To adapt a pre-trained module of one's own, see `add_adapters`.

    Args:
        hidden: width of each hidden layer.
        rank: r of the adapters.
        alpha: α; adapters are multiplied by α/r.
        train_a: whether A is trained (FedIT); else B alone (FFA-LoRA).
        residual: whether there are columns that a strategy adds residuals to, for strategy=fedex_lora and flora.
    """

    samplewise = True

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int = 1,
        hidden: Sequence[Count] = (200, 200),
        rank: Count = 4,
        alpha: Positive = 8.0,
        train_a: bool = True,
        residual: bool = False,
    ) -> None:
        super().__init__()
        self.layers = add_adapters(MLP(shape, classes, hidden).layers, rank, alpha, "", None, train_a, residual)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output
