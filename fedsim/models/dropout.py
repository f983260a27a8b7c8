"""Dropout whose mask is a function of (client, round, step, layer, position), so it is right for every executor.

`nn.Dropout` draws from a global stream: under vmap or in a chunk a client's mask would depend on its neighbours. Layers
of this kind can serve several clients at once (`fedsim.trainer.stepping`); use one for each place, since one that is
used twice repeats its mask. Any other call for random numbers is answered by `fedsim.models.randomness`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsim.core import rng
from fedsim.core.errors import ConfigError

_CHANNELWISE_DROPOUT_LAYERS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class KeyedDropout(nn.Module):
    """Zeroes entries (or whole channels) with probability p and scales the rest by 1 / (1 − p), in training only.

    The key is a client's [], or those of c clients [c] whose samples follow one another in the batch.
    """

    key: Tensor

    def __init__(self, p: float, layer: int, channelwise: bool = False, device: torch.device | None = None) -> None:
        super().__init__()
        self.p, self.layer, self.channelwise = p, layer, channelwise
        self.register_buffer("key", torch.zeros((), dtype=torch.int64, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return torch.zeros_like(x)
        clients = 1 if self.key.dim() == 0 else len(self.key)
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.channelwise else x.shape
        counters = torch.arange(shape.numel() // clients, dtype=torch.int32, device=x.device)
        is_dropped = rng.bernoulli_draws(rng.fold_in(self.key, self.layer)[..., None], counters, self.p).reshape(shape)
        return x * is_dropped.logical_not_().to(x.dtype).mul_(1 / (1 - self.p))


def key_dropouts(module: nn.Module, device: torch.device | None = None) -> list[str]:
    """Replace every dropout layer of `module` in place, with key buffers on the device; return the buffers' names.

    Raises:
        ConfigError: for layers whose randomness cannot be keyed.
    """
    names: list[str] = []
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if isinstance(child, nn.RNNBase) and child.dropout > 0:
            raise ConfigError(
                f"model: layer {name!r} ({type(child).__name__}) applies dropout={child.dropout} inside, which cannot "
                "be keyed by client; set it to 0 and put nn.Dropout beside it"
            )
        if isinstance(child, (nn.Dropout, *_CHANNELWISE_DROPOUT_LAYERS)):
            parent, _, leaf = name.rpartition(".")
            channelwise = isinstance(child, _CHANNELWISE_DROPOUT_LAYERS)
            keyed_layer = KeyedDropout(child.p, len(names), channelwise, device)
            setattr(module.get_submodule(parent), leaf, keyed_layer)
            names.append(f"{name}.key")
    return names
