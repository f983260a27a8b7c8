"""Dynamic demand: demand falls as prices rise (profl §6)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedsim.core.constraints import NonNegative
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Federation
from fedsim.core.heterogeneity import PerClientNumbers, entry_of_client
from fedsim.data.samples import ClientData
from fedsim.models import StatelessModel
from fedsim.shift.location import need_one_parameter_per_input
from fedsim.shift.sensitivity import sensitivities
from fedsim.shift.shift import Shift

DEFAULT_SPREAD = 1.0  # half-width of the values, if one value is given for all


class Demand(Shift):
    """z ← z − γ_i θ: z ~ N(μ_{0,i} − γ_i θ, σ² I) with dataset=pricing. θ^PS = μ̄₀/γ̄, θ^PO = μ̄₀/(2γ̄) for loss −θᵀz.

    Args:
        gamma, spread: γ_i, uniform on gamma ± spread (profl Fig. 1a: [1, 3]), or m given numbers.
        seed: seed of the sensitivities, which are the same for all replicates.
        **options: of every shift.
    """

    effective_if = (EffectiveIf("seed", lambda component, run: component.spread, "{at}.spread above 0"),)

    estimator = "mean_x"

    def __init__(
        self, gamma: PerClientNumbers = 2.0, spread: NonNegative = DEFAULT_SPREAD, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(**options)
        self.gamma, self.spread, self.seed = gamma, spread, seed

    def setup(self, federation: Federation, data: ClientData, model: StatelessModel) -> None:
        need_one_parameter_per_input("demand", data.dataset, model)
        self.gammas = sensitivities(
            "shift.gamma", self.gamma, self.spread, self.seed, federation, default_value=DEFAULT_SPREAD
        )

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        gamma = entry_of_client(self.gammas, batch["client"]).to(theta.dtype)
        return batch | {"x": batch["x"] - gamma * theta.reshape(batch["x"].shape[1:])}
