"""Compression of rows: fewer values, or fewer bits per value, and error feedback."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core import rng
from fedsim.core.constraints import Count, OneOf, PositiveFraction
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.uplink.stage import Encoding, Stage, StageContext

FEEDBACK_KINDS = ("none", "ef14", "ef21")
FeedbackKind = Annotated[str, OneOf(*FEEDBACK_KINDS)]


class Compressor(Stage):
    """Sends Q(G_i), or with error feedback also the compression errors of earlier rounds. Memory: one row per client.

    'ef14' (Seide et al. 2014; Karimireddy et al. 2019): e_i stores what was not sent, p = G_i + e_i, Q(p) arrives and
    e_i ← p − Q(p), so that Σ arrived + e_i = Σ G_i. 'ef21' (Richtárik, Sokolov and Fatkhullin 2021): client and server
    store g_i, Q(G_i − g_i) is sent, and g_i ← g_i + Q(G_i − g_i) is what arrives. The paper's server steps along the
    mean of all clients' g_i, including absent ones, which is strategy=mifa; FedAvg averages those of participating
    clients. Both memories start at zero, and do not change for absent clients.

    Args:
        feedback: 'none', 'ef14' or 'ef21'.
    """

    def __init__(self, feedback: FeedbackKind = "none") -> None:
        self.feedback = feedback

    def memory(self, federation: Federation, dimension: int) -> dict[str, Tensor]:
        return {} if self.feedback == "none" else {self.feedback: federation.zeros(dimension)}

    def setup(self, federation: Federation, availability: Availability, earlier_stages: Sequence[Stage]) -> None:
        if any(isinstance(stage, Compressor) and stage.feedback == "ef21" for stage in earlier_stages):
            raise ConfigError(
                f"uplink={type(self).__name__} comes after a stage with feedback=ef21, whose rows are put together on "
                "the server: there is nothing left to compress; take one stage, or feedback=ef14"
            )

    @abstractmethod
    def compress(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return Q(rows) [n, d]; keys [n] for random numbers."""

    def __call__(self, rows: Tensor, link: StageContext) -> Tensor:
        if self.feedback == "none":
            return self.compress(rows, link.keys)
        residual = link.gather(self.feedback)
        if self.feedback == "ef14":
            compensated_rows = rows + residual
            arrived_rows = self.compress(compensated_rows, link.keys)
            link.scatter("ef14", compensated_rows - arrived_rows)
            return arrived_rows
        arrived_rows = residual + self.compress(rows - residual, link.keys)
        link.scatter("ef21", arrived_rows)
        return arrived_rows


class Sparse(Compressor):
    """Sends k of a row's d numbers.

    Args:
        fraction: k = fraction · d, rounded, at least 1.
        k: number of values; None: given by the fraction.
        feedback: see `fedsim.uplink.Compressor`.
    """

    effective_if = (
        EffectiveIf(
            "fraction", lambda component, run: component.k is None, "{at}.k=null, which says how many columns itself"
        ),
    )

    def __init__(
        self, fraction: PositiveFraction = 0.01, k: Count | None = None, feedback: FeedbackKind = "none"
    ) -> None:
        super().__init__(feedback)
        self.fraction = fraction
        self.k = k

    def count(self, dimension: int) -> int:
        """k; at most d."""
        return min(dimension, max(1, round(self.fraction * dimension)) if self.k is None else self.k)


class TopK(Sparse):
    """Sends the k numbers of largest magnitude, the others arrive as zeros (Aji and Heafield 2017). Biased.

    The bytes are those of k values and of their places: 4 bytes each or a bit for every column, whatever is less.
    """

    def __init__(
        self, fraction: PositiveFraction = 0.01, k: Count | None = None, feedback: FeedbackKind = "ef14"
    ) -> None:
        super().__init__(fraction, k, feedback)

    def compress(self, rows: Tensor, keys: Tensor) -> Tensor:
        indices = rows.abs().topk(self.count(rows.shape[1]), dim=1, sorted=False).indices
        return torch.zeros_like(rows).scatter(1, indices, rows.gather(1, indices))

    def code(self, code: Encoding, plain_encoding: Encoding) -> Encoding:
        k = self.count(plain_encoding.values)
        position_bytes = min(4 * k, -(-plain_encoding.values // 8)) if k < plain_encoding.values else 0
        return replace(code, values=k, index_bytes=position_bytes)


class RandK(Sparse):
    """Sends k random columns, drawn anew for every client and round; the others arrive as zeros.

    Without feedback what arrives is multiplied by d/k: then its mean is the row, and its mean squared error (d/k − 1)
    times the row's square. With feedback it is not. The bytes are those of k values and of the 8 of a seed, which both
    ends draw the places from.
    """

    def compress(self, rows: Tensor, keys: Tensor) -> Tensor:
        d = rows.shape[1]
        k = self.count(d)
        indices = (
            rng.random_bits(keys[:, None], torch.arange(d, device=rows.device)).topk(k, dim=1, sorted=False).indices
        )
        scale = d / k if self.feedback == "none" else 1.0
        return torch.zeros_like(rows).scatter(1, indices, rows.gather(1, indices) * scale)

    def code(self, code: Encoding, plain_encoding: Encoding) -> Encoding:
        k = self.count(plain_encoding.values)
        return replace(code, values=k, index_bytes=8) if k < plain_encoding.values else code


class QSGD(Compressor):
    """Sends ‖G‖ and, for every value, its sign and level ℓ/L, rounded stochastically (Alistarh et al. 2017).

    The expectation of what arrives is the row, and its mean squared error is at most min(d/L², √d/L) times the squared
    norm of the row. The bytes are those of codes of fixed width, 1 + ⌈log₂(L + 1)⌉ bits per value, and of the norm; the
    paper's Elias codes are shorter if most levels are zero. Unbiased, hence without feedback.

    Args:
        levels: L.
    """

    def __init__(self, levels: Count = 16) -> None:
        super().__init__()
        self.levels = levels

    def compress(self, rows: Tensor, keys: Tensor) -> Tensor:
        norm = rows.norm(dim=1, keepdim=True)
        level = self.levels * rows.abs() / torch.where(norm > 0, norm, 1.0)
        uniform_numbers = rng.uniform(keys[:, None], torch.arange(rows.shape[1], device=rows.device), rows.dtype)
        return norm * rows.sign() * (level + uniform_numbers).floor() / self.levels

    def code(self, code: Encoding, plain_encoding: Encoding) -> Encoding:
        return replace(
            code,
            bits=1 + math.ceil(math.log2(self.levels + 1)),
            extra_bytes=code.extra_bytes + plain_encoding.bits // 8,
        )


class Sign(Compressor):
    """Sends the signs: (‖G‖₁/d) sign(G) arrives (Karimireddy et al. 2019), zero being positive. Biased.

    The bytes are one bit per value and one number.

    Args:
        feedback: see `fedsim.uplink.Compressor`.
        scaled: false: sign(G) alone, without the number (signSGD).
    """

    def __init__(self, feedback: FeedbackKind = "ef14", scaled: bool = True) -> None:
        super().__init__(feedback)
        self.scaled = scaled

    def compress(self, rows: Tensor, keys: Tensor) -> Tensor:
        signs = torch.where(rows < 0, -1.0, 1.0).to(rows.dtype)
        return rows.abs().mean(1, keepdim=True) * signs if self.scaled else signs

    def code(self, code: Encoding, plain_encoding: Encoding) -> Encoding:
        return Encoding(plain_encoding.values, 1, extra_bytes=plain_encoding.bits // 8 if self.scaled else 0)
