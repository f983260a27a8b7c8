"""Blocks of attention, as the vision transformer and the language model stack them."""

from __future__ import annotations

from torch import nn

from fedsim.core.errors import ConfigError


def attention_blocks(width: int, heads: int, layers: int, dropout: float) -> nn.ModuleList:
    """Encoder layers [B, L, width] → [B, L, width], normalisation first; a feed-forward layer is four times as wide.

    Raises:
        ConfigError: for a width that the heads cannot share.
    """
    if width % heads:
        raise ConfigError(
            f"{{width}}={width} must be a multiple of {{heads}}={heads}",
            mentions=("width", "heads"),
        )
    return nn.ModuleList(
        nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
        for _ in range(layers)
    )
