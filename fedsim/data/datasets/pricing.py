"""Demands that depend on prices, one law per retailer or a mixture of consumer groups (profl §6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.core import checks, rng
from fedsim.core.constraints import Count, NonNegative, Real
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.stream import StreamDataset


class Pricing(StreamDataset):
    """Base demands z ~ N(μ_{0,i}, σ² I); the model is the prices θ, the loss −θᵀz. `shift=demand` lowers z by γ_i θ.

    Args:
        clients: m retailers.
        dimension: d goods.
        low, high: μ₀ is uniform on [low, high]^d (profl Table 4: [6, 7]).
        per_client: whether every retailer draws its own μ_{0,i}; the paper writes one μ₀.
        std: σ.
        seed: of the draw; all replicates have the same means.
    """

    uniforms = 0

    def __init__(
        self,
        clients: Count = 10,
        dimension: Count = 5,
        low: Real = 6.0,
        high: Real = 7.0,
        per_client: bool = False,
        std: NonNegative = 1.0,
        seed: int = 0,
    ) -> None:
        if low > high:
            raise ConfigError(key="low", value=low, needs=f"exceeds {{high}}={high}; swap them", mentions=("high",))
        self.noise_std = std
        size = (clients if per_client else 1, dimension)
        draws = rng.generator(seed, rng.Purpose.DATA).uniform(low, high, size)
        self.means = torch.as_tensor(draws).expand(clients, dimension).contiguous()
        super().__init__("pricing", clients, (dimension,), dimension, loss="negative_revenue")

    def compose_samples(self, clients: Tensor, normals: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
        return {"x": self.means[clients].to(normals.dtype)[:, None] + self.noise_std * normals}


class PricingGroups(StreamDataset):
    """A mixture of K consumer groups with fixed demands N(μ_{i,k}, σ² I); `shift=contribution` moves their fractions.

    Every sample contains a draw from each group ('component_x' [B, K, d]) and a uniform number that selects one, so
    fractions can react to a model without new randomness. Loss: zθ is minimised by default (profl Fig. 5a, 6b).

    Args:
        clients: m.
        means: μ_k, K of them, a number or d numbers each; the same for every client except for the spread.
        spread: half-width of the uniform law of every μ_{i,k} around μ_k.
        std: σ (profl Table 4: 0.5, as N(±0.5, 0.25)).
        fractions: K base fractions, before any model is deployed; None for equal ones.
        loss: 'inner_product' (zθ) or 'negative_revenue' (−zθ).
        seed: of the draw.
    """

    effective_if = (
        EffectiveIf(
            "seed",
            lambda component, run: component.settings["spread"] > 0,
            "{at}.spread above 0",
            attribute="settings.seed",
        ),
    )

    def __init__(
        self,
        clients: Count = 10,
        means: Sequence[float] | Sequence[Sequence[float]] = (0.5, -0.5),
        spread: NonNegative = 0.0,
        std: NonNegative = 0.5,
        fractions: Sequence[float] | None = None,
        loss: str = "inner_product",
        seed: int = 0,
    ) -> None:
        self.settings = {"seed": seed, "spread": spread}
        self.noise_std = std
        self.fractions = base_group_fractions(fractions, len(means))
        centres = torch.as_tensor(means, dtype=torch.float64).reshape(len(means), -1)
        groups, dimension = centres.shape
        draws = rng.generator(seed, rng.Purpose.DATA).uniform(-1.0, 1.0, (clients, groups, dimension))
        self.group_means = centres + spread * torch.as_tensor(draws)
        super().__init__("pricing_groups", clients, (dimension,), groups * dimension, loss=loss)

    def compose_samples(self, clients: Tensor, normals: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
        means = self.group_means[clients].to(normals.dtype)[:, None]
        component = means + self.noise_std * normals.reshape(*normals.shape[:2], *means.shape[2:])
        group = groups_from_uniforms(self.fractions.to(normals.dtype), uniforms)
        x = component.gather(2, group[..., None, None].expand(-1, -1, 1, component.shape[3]))[:, :, 0]
        return {"x": x, "group": group, "uniform": uniforms, "component_x": component}


def base_group_fractions(fractions_or_none: Sequence[float] | None, groups: int, key: str = "means") -> Tensor:
    """[K] float64 fractions of the groups before any model is deployed."""
    if groups < 2:
        raise ConfigError(f"dataset.{key} has {groups} entries; a mixture needs at least two groups")
    if fractions_or_none is None:
        return torch.full((groups,), 1.0 / groups, dtype=torch.float64)
    fractions = torch.tensor([checks.check_fraction("fractions", f) for f in fractions_or_none], dtype=torch.float64)
    if len(fractions) != groups or abs(float(fractions.sum()) - 1) > 1e-9:
        raise ConfigError(
            f"{{fractions}}={list(fractions_or_none)} must be {groups} numbers that sum to 1", mentions=("fractions",)
        )
    return fractions


def groups_from_uniforms(fractions: Tensor, uniforms: Tensor) -> Tensor:
    """The group each uniform number falls into: fractions [..., K] (broadcast), uniforms [...] → int64 [...]."""
    edges = fractions.cumsum(-1)[..., :-1]
    return (uniforms[..., None] >= edges).sum(-1)
