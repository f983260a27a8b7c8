"""Data of which a fraction reacts to earlier deployments: D_t = Σ_k a_k D(θ_{t−k})."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from fedsim.core import rng
from fedsim.core.errors import ConfigError

MAX_IGNORED_WEIGHT = 1e-3  # share of the geometric weights that the oldest stored model represents
MAX_STORED_MODELS = 1000  # models kept
Batch = dict[str, Tensor]


class LagMixture:
    """The weights a_k, and samples that each react to one model: the lag k of a sample is drawn with these weights.

    Args:
        weights: λ ∈ [0, 1), a_k = (1 − λ) λ^k: a fraction 1 − λ of the samples reacts to each deployment, the others do
            not change, D_t = λ D_{t−1} + (1 − λ) D(θ_t). Models older than the L-th are replaced by the L-th, λ^{L−1} ≤
            10⁻³. Or a list a_0, a_1, ….

    Attributes:
        weights: [L] float64.
    """

    def __init__(self, weights: float | Sequence[float]) -> None:
        if isinstance(weights, (str, bytes)) or not isinstance(weights, Sequence):
            decay = float(weights)
            length = (
                1
                if decay == 0
                else math.inf
                if decay == 1
                else 1 + math.ceil(math.log(MAX_IGNORED_WEIGHT) / math.log(decay))
            )
            if length > MAX_STORED_MODELS:
                raise ConfigError(
                    f"{{mixture}}={decay:g} asks for more than {MAX_STORED_MODELS} earlier models; lower it",
                    mentions=("mixture",),
                )
            powers = decay ** torch.arange(int(length), dtype=torch.float64)
            self.weights = torch.cat([(1 - decay) * powers[:-1], powers[-1:]])
            return
        self.weights = torch.tensor(list(weights), dtype=torch.float64)
        if not len(self.weights) or abs(float(self.weights.sum()) - 1) > 1e-9 or not self.weights[0]:
            raise ConfigError(
                f"{{mixture}}={list(weights)} must be shares of the newest deployment, which is not 0, of the one "
                "before, …, that sum to 1",
                mentions=("mixture",),
            )

    def __len__(self) -> int:
        return len(self.weights)

    def deployment_lags(self, key: Tensor, size: int) -> Tensor:
        """[B] int64 how many deployments ago the model was to which each of a client's samples reacts; key []."""
        edges = self.weights.cumsum(0)[:-1].to(key.device)
        uniform = rng.uniform(key, torch.arange(size, device=key.device), torch.float64)
        return (uniform[:, None] >= edges).sum(1)

    def shift_batch(
        self, shift: Callable[[Batch, Tensor], Batch], batch: Batch, past_models: Tensor, key: Tensor
    ) -> Batch:
        """One client's batch, each of its samples moved on its own by its model; past [L, d], the newest first."""
        theta = past_models[self.deployment_lags(key, len(batch["x"]))]
        samples = {name: value[:, None] for name, value in batch.items() if value.dim()}
        client_entries = {name: value for name, value in batch.items() if not value.dim()}

        def shift_one_sample(sample: Batch, theta: Tensor) -> Batch:
            shifted_samples = shift(client_entries | sample, theta)
            return {name: value for name, value in shifted_samples.items() if name not in client_entries}

        return client_entries | {
            name: value.flatten(0, 1) for name, value in vmap(shift_one_sample)(samples, theta).items()
        }
