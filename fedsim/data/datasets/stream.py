"""The interface of a stream: fresh samples for every batch, as a function of standard normals and a uniform number."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.data.datasets.dataset import Dataset


class StreamDataset(Dataset):
    """Samples z = g_i(n, u) of client i, n standard normal and u uniform on [0, 1).

    Args:
        name: its name in reports.
        clients: m.
        shape: of one input.
        normals: number of normals per sample.
        **options: of every data set.

    Attributes:
        uniforms: number of uniform numbers per sample, 1 or 0.
    """

    uniforms = 1

    def __init__(self, name: str, clients: int, shape: tuple[int, ...], normals: int, **options: Any) -> None:
        self.clients, self.normals = clients, normals
        super().__init__(name, torch.empty(0, *shape), **options)

    @abstractmethod
    def compose_samples(self, clients: Tensor, normals: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
        """g_i: clients [c], normals [c, B, w], uniforms [c, B] (or [c, 0]) → 'x' [c, B, …], 'y', …."""

    @property
    def stream(self) -> bool:
        return True

    @property
    def natural_clients(self) -> int:
        return self.clients

    def draw(self, clients: Tensor, keys: Tensor, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        counters = torch.arange(size * self.normals, device=keys.device).reshape(size, self.normals)
        normals = rng.normal(keys[:, None, None], counters, dtype)
        if not self.uniforms:
            return self.compose_samples(clients, normals, normals.new_empty(len(keys), 0))
        slots = torch.arange(size, device=keys.device)
        return self.compose_samples(clients, normals, rng.uniform(rng.fold_in(keys, 1)[:, None], slots, dtype))

    def num_exact_samples(self, size: int) -> int:
        """`size` rounded up to an even number of at least 4·w, so that the normals can be whitened."""
        return 2 * max(-(-size // 2), 2 * self.normals)

    def exact(self, clients: Tensor, keys: Tensor, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Like `draw`, with base noise whose sample moments match its law: for reference points, not for training.

        The normals come in pairs ±n (odd moments vanish), whitened (second moments are the identity's), so a mean of a
        function that is at most quadratic in them equals its expectation; the uniforms are the midpoints of `size`
        equal strata, in order. `size` is rounded up by `num_exact_samples`.
        """
        half_size = self.num_exact_samples(size) // 2
        counters = torch.arange(half_size * self.normals, device=keys.device).reshape(half_size, self.normals)
        normals = rng.normal(keys[:, None, None], counters, dtype)
        factor = torch.linalg.cholesky(normals.mT @ normals / half_size)
        whitened_noise = torch.linalg.solve_triangular(factor, normals.mT, upper=False).mT
        pairs = torch.stack([whitened_noise, -whitened_noise], dim=2).reshape(len(keys), 2 * half_size, self.normals)
        strata = (torch.arange(2 * half_size, device=keys.device, dtype=dtype) + 0.5) / (2 * half_size)
        return self.compose_samples(clients, pairs, strata.expand(len(keys), -1))
