"""House prices and sales of retailers: linear regressions whose targets react to the model (profl §6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import Count, NonNegative, Real
from fedsim.core.effects import EffectiveIf
from fedsim.core.heterogeneity import PerClientNumbers, numbers_per_client
from fedsim.data.datasets.pricing import base_group_fractions, groups_from_uniforms
from fedsim.data.datasets.stream import StreamDataset


class HousePrices(StreamDataset):
    """x ~ N(μ, σ² I), y = a_iᵀx + n, n ~ N(0, σ_n²); loss ½(θᵀx − y)². `shift=response` lowers y by γ_i θᵀx.

    The constants are those of Izzo et al.'s programs, which profl says it follows; use model=linear model.bias=false
    model.ridge=3.3333.

    Args:
        clients: m districts.
        dimension: d features.
        mean, std: μ and σ of every feature.
        coefficient, spread: a_i, all d entries alike: uniform on coefficient ± spread, or m numbers as they are.
        noise: σ_n.
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

    uniforms = 0

    def __init__(
        self,
        clients: Count = 10,
        dimension: Count = 1,
        mean: Real = 5 / 3,
        std: NonNegative = 1.0,
        coefficient: PerClientNumbers = 5 / 3,
        spread: NonNegative = 0.0,
        noise: NonNegative = 2.0333,
        seed: int = 0,
    ) -> None:
        self.settings = {"seed": seed, "spread": spread}
        self.mean_x, self.std_x = mean, std
        self.noise_std = noise
        coefficients = numbers_per_client("dataset.coefficient", coefficient, spread, clients, seed, rng.Purpose.DATA)
        self.coefficients = coefficients[:, None].expand(clients, dimension).contiguous()
        super().__init__("house_prices", clients, (dimension,), dimension + 1, loss="squared")

    def compose_samples(self, clients: Tensor, normals: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
        x = self.mean_x + self.std_x * normals[..., :-1]
        y = (x * self.coefficients[clients].to(x.dtype)[:, None]).sum(-1) + self.noise_std * normals[..., -1]
        return {"x": x, "y": y}


class RegressionGroups(StreamDataset):
    """y = s_k x + n in group k, fixed; `shift=contribution form=loss` moves the groups' fractions (profl Fig. 5b).

    x ~ N(μ, σ²); the paper gives s = (1, 3), n ~ N(0, 4) and no law of x, which is taken from house_prices. Every
    sample contains the target of each group ('component_y' [B, K]) and a uniform number that selects one.

    Args:
        clients: m distributors.
        slopes: s_k, the same for every client except for the spread.
        spread: half-width of the uniform law of every s_{i,k} around s_k.
        mean, std: μ and σ.
        noise: standard deviation of n.
        fractions: K base fractions, before any model is deployed; None for equal ones.
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
        slopes: Sequence[float] = (1.0, 3.0),
        spread: NonNegative = 0.0,
        mean: Real = 5 / 3,
        std: NonNegative = 1.0,
        noise: NonNegative = 2.0,
        fractions: Sequence[float] | None = None,
        seed: int = 0,
    ) -> None:
        self.settings = {"seed": seed, "spread": spread}
        self.mean_x, self.std_x = mean, std
        self.noise_std = noise
        draws = rng.generator(seed, rng.Purpose.DATA).uniform(-1.0, 1.0, (clients, len(slopes)))
        self.slopes = torch.as_tensor(slopes, dtype=torch.float64) + spread * torch.as_tensor(draws)
        self.fractions = base_group_fractions(fractions, len(slopes), "slopes")
        super().__init__("regression_groups", clients, (1,), 2, loss="squared")

    def compose_samples(self, clients: Tensor, normals: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
        x = self.mean_x + self.std_x * normals[..., :1]
        component = self.slopes[clients].to(x.dtype)[:, None] * x + self.noise_std * normals[..., 1:]
        group = groups_from_uniforms(self.fractions.to(x.dtype), uniforms)
        y = component.gather(2, group[..., None])[..., 0]
        return {"x": x, "y": y, "group": group, "uniform": uniforms, "component_y": component}
