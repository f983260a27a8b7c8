"""Models of tokens [B, L]: LEAF's recurrent language model, a small transformer, and a classifier of texts."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedsim.core.constraints import Count, Fraction, IntegerAtLeast, validate_arguments
from fedsim.models.attention import attention_blocks


@validate_arguments
class CharLSTM(nn.Module):
    """LEAF's next-character model (Caldas et al., 2018): an embedding, LSTM layers, a linear layer.

    [B, L] → [B, classes], the character after the last, or with `every` [B, L, classes], after each.

    Args:
        classes: size of the alphabet.
        embedding, hidden, layers: 8, 256 and 2 in LEAF.
        every: predict at every position; None: as the data set's labels are in a run, else after the last alone.
    """

    def __init__(
        self, classes: int, embedding: Count = 8, hidden: Count = 256, layers: Count = 2, every: bool | None = None
    ) -> None:
        super().__init__()
        self.every = bool(every)
        self.embedding = nn.Embedding(classes, embedding)
        self.recurrence = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden_states, _ = self.recurrence(self.embedding(tokens))
        return self.head(hidden_states if self.every else hidden_states[:, -1])


@validate_arguments
class Transformer(nn.Module):
    """A decoder-only language model: learned positions, blocks of causal attention, normalisation first.

    [B, L] → [B, L, classes], or with every=false [B, classes], the token after the last.

    Args:
        shape: (L,), the longest sequence.
        classes: size of the vocabulary.
        width, heads, layers: of the blocks; a feed-forward layer is four times as wide.
        dropout: in attention and after every sublayer.
        every: predict at every position; None: as the data set's labels are in a run, else at every position.
    """

    causal_mask: Tensor
    first_stages: ClassVar[dict[str, tuple[str, ...]]] = {"embed": ("token", "position")}

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        width: Count = 64,
        heads: Count = 4,
        layers: Count = 2,
        dropout: Fraction = 0.0,
        every: bool | None = None,
    ) -> None:
        super().__init__()
        self.every = every is None or every
        self.blocks = attention_blocks(width, heads, layers, dropout)
        self.token, self.position = nn.Embedding(classes, width), nn.Embedding(shape[0], width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        future_mask = torch.full((shape[0], shape[0]), float("-inf")).triu(1)
        self.register_buffer("causal_mask", future_mask, persistent=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, L] → [B, L, width], with positions."""
        embedded: Tensor = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return embedded

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        length = x.shape[1]
        for block in self.blocks:
            x = block(x, src_mask=self.causal_mask[:length, :length])
        return self.head(self.norm(x if self.every else x[:, -1]))


@validate_arguments
class TextClassifier(nn.Module):
    """A transformer encoder whose mean over the words of a text is classified, [B, L] → [B, classes].

    Token 0 is padding: it is not attended to and does not enter the mean. A text of padding alone has the mean 0.

    Args:
        shape: (L,), the longest text.
        classes: number of labels.
        num_tokens: size of the vocabulary, with padding.
        width, heads, layers: of the blocks; a feed-forward layer is four times as wide. Without layers, the mean of the
            embeddings of words is classified, whatever their order.
        dropout: in attention and after every sublayer.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        num_tokens: int,
        width: Count = 64,
        heads: Count = 4,
        layers: Annotated[int, IntegerAtLeast(0)] = 2,
        dropout: Fraction = 0.0,
    ) -> None:
        super().__init__()
        self.blocks = attention_blocks(width, heads, layers, dropout)
        self.token = nn.Embedding(num_tokens, width)
        self.position = nn.Embedding(shape[0], width) if layers else None
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x, is_word = self.token(tokens), tokens != 0
        if self.position is not None:
            x = x + self.position.weight[: tokens.shape[1]]
        # A text of padding alone would have no position to attend to, and its attention would be NaN.
        attention_bias = torch.zeros_like(x[..., 0]).masked_fill(~is_word & is_word.any(1, keepdim=True), float("-inf"))
        for block in self.blocks:
            x = block(x, src_key_padding_mask=attention_bias)
        weight = is_word.to(x)[..., None]
        return self.head((self.norm(x) * weight).sum(1) / weight.sum(1).clamp(min=1))
