"""Quadratic clients F_i(x) = ½‖x − u_i‖²: the counterexample that exposes participation bias (fedpbc §VI, fedawe Fig.
2).
"""

from __future__ import annotations

import torch

from fedsim.core import rng
from fedsim.core.constraints import Count, NonNegative, Real
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.dataset import Dataset


class Quadratics(Dataset):
    """One sample u_i per client; the loss is ½‖x − u_i‖² and the optimum is the mean of the u_i.

    FedPBC's: u_i ~ N((i / 1000)·1, 0.01·I), i = 1…m, in 100 dimensions.

    Args:
        clients: m.
        dimension: length of u_i.
        slope: the mean of u_i is slope · i.
        variance: of each coordinate.
        points: explicit u_i ([m] numbers or [m, dimension]), instead of drawing them.
        seed: of the draw; all replicates have the same points.
    """

    effective_if = (
        EffectiveIf(
            "dimension",
            lambda component, run: component.settings["points"] is None,
            "{at}.points=null, which gives all points",
            attribute="settings.dimension",
        ),
        EffectiveIf(
            "slope",
            lambda component, run: component.settings["points"] is None,
            "{at}.points=null, which gives all points",
            attribute="settings.slope",
        ),
        EffectiveIf(
            "variance",
            lambda component, run: component.settings["points"] is None,
            "{at}.points=null, which gives all points",
            attribute="settings.variance",
        ),
        EffectiveIf(
            "seed",
            lambda component, run: component.settings["points"] is None,
            "{at}.points=null, which gives all points",
            attribute="settings.seed",
        ),
    )

    def __init__(
        self,
        clients: Count = 100,
        dimension: Count = 100,
        slope: Real = 0.001,
        variance: NonNegative = 0.01,
        points: list[float] | list[list[float]] | None = None,
        seed: int = 0,
    ) -> None:
        self.settings = {"dimension": dimension, "slope": slope, "variance": variance, "seed": seed, "points": points}
        if points is None:
            noise = rng.generator(seed, rng.Purpose.DATA).standard_normal((clients, dimension))
            centres = slope * torch.arange(1, clients + 1, dtype=torch.float64)[:, None]
            u = centres + variance**0.5 * torch.as_tensor(noise)
        else:
            point_count = len(points)
            if point_count != clients:
                raise ConfigError(
                    f"{{points}} has {point_count} entries, but clients={clients}; give one per client",
                    mentions=("points",),
                )
            u = torch.as_tensor(points, dtype=torch.float64).reshape(clients, -1)
        owners = torch.arange(clients)
        super().__init__("quadratics", u, loss="half_squared_distance", owners=owners, optimum=u.mean(0))
