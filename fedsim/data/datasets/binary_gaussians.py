"""Two Gaussian classes, the synthetic data of strategic classification (profl §6, Table 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedsim.core import checks
from fedsim.core.constraints import Count, NonNegative
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.stream import StreamDataset

Centre = float | Sequence[float] | Sequence[Sequence[float]]


class BinaryGaussians(StreamDataset):
    """y is 0 or 1 with probability ½ each, x | y ~ N(c_y, σ² I), loss logistic; the constant feature is the bias.

    profl Table 2: c_1 = −1, c_0 = 1, σ = 0.5, one feature; "different D_i": X_1 and X_2 have the centres
    c_1 = (−1, −0.8), two features. γ = (≈ 0, ≈ 3) with `shift=group_mean`.

    Args:
        clients: m.
        positive, negative: c_1 and c_0: one number for every feature, or d numbers, one a feature; rows of d numbers
            are dealt out to the clients in turn.
        dimension: d features.
        std: σ.
    """

    def __init__(
        self,
        clients: Count = 10,
        positive: Centre = -1.0,
        negative: Centre = 1.0,
        dimension: Count = 1,
        std: NonNegative = 0.5,
    ) -> None:
        self.noise_std = std
        rows = [
            client_centres(key, c, clients, dimension) for key, c in (("negative", negative), ("positive", positive))
        ]
        self.centres = torch.tensor(rows, dtype=torch.float64).transpose(0, 1).contiguous()  # [m, 2, d]
        super().__init__("binary_gaussians", clients, (dimension,), dimension, classes=2, loss="logistic")

    def compose_samples(self, clients: Tensor, normals: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
        y = (uniforms >= 0.5).to(torch.int64)
        centres = self.centres[clients].to(normals.dtype)  # [c, 2, d]
        centre = centres.gather(1, y[..., None].expand(-1, -1, centres.shape[2]))
        return {"x": centre + self.noise_std * normals, "y": y}


def client_centres(key: str, value: Centre, clients: int, dimension: int) -> list[list[float]]:
    """[m][d] a class's centre for each client; rows are repeated as often as needed."""
    values_per_dimension: list[Any] = list(value) if isinstance(value, Sequence) else [value] * dimension
    rows = (
        values_per_dimension
        if values_per_dimension and all(isinstance(row, Sequence) for row in values_per_dimension)
        else [values_per_dimension]
    )
    for row in rows:
        if isinstance(row, str) or not isinstance(row, Sequence) or len(row) != dimension:
            raise ConfigError(
                key=key,
                value=value,
                needs=f"must be a number, {{dimension}}={dimension} numbers, one for each feature, or "
                "rows of so many, one for each client in turn, such as [[-1],[-0.8]]",
                mentions=("dimension",),
            )
    return [[checks.check_finite(key, number) for number in rows[i % len(rows)]] for i in range(clients)]
