"""Gaussian mean estimation: every batch is a fresh draw from N(m_i, σ²) (p-fedavg §4)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import Count, NonNegative, Real
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.heterogeneity import match_moments
from fedsim.data.datasets.stream import StreamDataset


class GaussianMean(StreamDataset):
    """A stream of scalars z ~ N(m_i, σ²), loss ½(θ − z)². With the `location` shift, z ~ N(m_i + ε_i θ, σ²).

    Args:
        clients: m.
        mean, variance: m̄ = Σ w_i m_i and Var(m) = Σ w_i (m_i − m̄)² over clients; drawn m_i have them exactly.
        std: σ of the noise.
        means: explicit m_i instead of drawing them.
        weight_variance: Var(w_i) of the clients' weights, drawn from a Dirichlet distribution of this variance
            (p-fedavg Fig. 7: 0.01); 0 weighs all by 1/m.
        seed: of the draws; all replicates have the same means and weights.
    """

    effective_if = (
        EffectiveIf(
            "mean",
            lambda component, run: component.settings["means"] is None,
            "{at}.means=null, which gives all means",
            attribute="settings.mean",
        ),
        EffectiveIf(
            "variance",
            lambda component, run: component.settings["means"] is None,
            "{at}.means=null, which gives all means",
            attribute="settings.variance",
        ),
        EffectiveIf(
            "weight_variance", lambda component, run: run.strategy.weighting == "data", "strategy.weighting=data"
        ),
    )

    uniforms = 0

    def __init__(
        self,
        clients: Count = 25,
        mean: Real = 10.0,
        variance: NonNegative = 0.6,
        std: NonNegative = 1.0,
        means: list[Real] | None = None,
        weight_variance: NonNegative = 0.0,
        seed: int = 0,
    ) -> None:
        self.settings = {"mean": mean, "variance": variance, "means": means, "seed": seed}
        self.weight_variance = weight_variance
        weights = draw_dirichlet_weights(clients, weight_variance, seed)
        if means is None:
            draws = rng.generator(seed, rng.Purpose.DATA).standard_normal(clients)
            self.means = torch.as_tensor(match_moments("variance", mean, variance, weights, draws))
        else:
            if len(means) != clients:
                raise ConfigError(
                    f"{{means}} has {len(means)} entries, but clients={clients}; give one per client",
                    mentions=("means",),
                )
            self.means = torch.tensor(means, dtype=torch.float64)
        self.noise_std = std
        optimum = self.means.mean().reshape(1)
        super().__init__(
            "gaussian_mean", clients, (1,), 1, loss="half_squared_distance", optimum=optimum, weights=weights
        )

    def client_means(self) -> Tensor:
        return self.means[:, None]

    def compose_samples(self, clients: Tensor, normals: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
        return {"x": self.means[clients].to(normals.dtype)[:, None, None] + self.noise_std * normals}


def draw_dirichlet_weights(clients: int, variance: float, seed: int) -> np.ndarray:
    """[m] weights that sum to 1, from the symmetric Dirichlet distribution in which each has this variance."""
    if variance == 0:
        return np.full(clients, 1 / clients)
    max_weight = (1 - 1 / clients) / clients  # one client has all the weight
    if variance >= max_weight:
        raise ConfigError(
            key="weight_variance", value=variance, needs=f"must be below {max_weight:.3g} for clients={clients}"
        )
    concentration = (max_weight / variance - 1) / clients
    return rng.generator(seed, rng.Purpose.DATA, 1).dirichlet(np.full(clients, concentration))
