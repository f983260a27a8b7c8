"""Targets that react to the prediction: a house that is listed higher sells lower (profl §6)."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fedsim.core.constraints import NonNegative
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.heterogeneity import PerClientNumbers, entry_of_client
from fedsim.data.samples import ClientData
from fedsim.models import StatelessModel
from fedsim.shift.direction import ResponseDirection
from fedsim.shift.sensitivity import sensitivities
from fedsim.shift.shift import Shift

DEFAULT_SPREAD = 0.0  # half-width of the values, if one value is given for all


class Response(Shift):
    """y ← y − γ_i θᵀx: y = (a_i − γ_i θ)ᵀx + n with dataset=house_prices. The bias of the model is not used.

    In one dimension, without ridge and with equal moments of x: θ^PS = ā/(1 + γ̄), θ^PO = Σ(1 + γ_i)a_i / Σ(1 + γ_i)².

    Args:
        gamma, spread: γ_i, uniform on gamma ± spread (profl Table 1: 1.5 ± α), or m given numbers.
        seed: seed of the sensitivities, which are the same for all replicates.
        **options: of every shift.
    """

    effective_if = (EffectiveIf("seed", lambda component, run: component.spread, "{at}.spread above 0"),)

    estimator = "coefficients"

    def __init__(
        self, gamma: PerClientNumbers = 1.5, spread: NonNegative = DEFAULT_SPREAD, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(**options)
        self.gamma, self.spread, self.seed = gamma, spread, seed

    def setup(self, federation: Federation, data: ClientData, model: StatelessModel) -> None:
        dataset = data.dataset
        if dataset.classes is not None or dataset.loss != "squared":
            raise ConfigError(
                f"shift=response moves a real-valued target, which dataset={dataset.name} does not have; use "
                "dataset=house_prices, or shift=strategic for labels"
            )
        self.direction = ResponseDirection("response", dataset, model, features=range(math.prod(dataset.shape)))
        if self.direction.outputs != 1:
            raise ConfigError(f"shift=response needs a model with one output; this one has {self.direction.outputs}")
        self.gammas = sensitivities(
            "shift.gamma", self.gamma, self.spread, self.seed, federation, default_value=DEFAULT_SPREAD
        )

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        gamma = entry_of_client(self.gammas, batch["client"]).to(theta.dtype)
        predicted = batch["x"].flatten(1) @ self.direction(theta).flatten()
        return batch | {"y": batch["y"] - gamma * predicted.reshape(batch["y"].shape)}
