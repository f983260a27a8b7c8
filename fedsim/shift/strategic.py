"""Strategic features: people change features in response to the classifier (Perdomo et al. 2020; p-fedavg §4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedsim.core.constraints import CountOrZero, IndexOrName, NonNegative
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Federation
from fedsim.core.heterogeneity import PerClientNumbers, entry_of_client
from fedsim.data.samples import ClientData
from fedsim.models import StatelessModel
from fedsim.shift.direction import ResponseDirection
from fedsim.shift.sensitivity import sensitivities
from fedsim.shift.shift import Shift

DEFAULT_SPREAD = 0.1  # half-width of the values, if one value is given for all


class Strategic(Shift):
    """x ← x − ε_i θ on the strategic features of the *base* sample (not cumulatively); labels and bias do not change.

    θ is `ResponseDirection`: the weights of a linear model with one output, or the difference that moves the target's
    log-odds with several.

    Args:
        epsilon, spread: ε_i, uniform on epsilon ± spread (p-fedavg Fig. 5: [0.9, 1.1]), or m given numbers.
        features, target: see `ResponseDirection`.
        seed: seed of the sensitivities, which are the same for all replicates.
        **options: of every shift.
    """

    effective_if = (
        EffectiveIf("seed", lambda component, run: component.spread, "{at}.spread above 0"),
        EffectiveIf("target", lambda component, run: component.direction.outputs > 1, "a model of several outputs"),
    )

    def __init__(
        self,
        epsilon: PerClientNumbers = 1.0,
        spread: NonNegative = DEFAULT_SPREAD,
        features: Sequence[IndexOrName] | None = None,
        target: CountOrZero = 1,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.epsilon, self.spread, self.features, self.target, self.seed = epsilon, spread, features, target, seed

    def setup(self, federation: Federation, data: ClientData, model: StatelessModel) -> None:
        self.epsilons = sensitivities(
            "shift.epsilon", self.epsilon, self.spread, self.seed, federation, default_value=DEFAULT_SPREAD
        )
        self.direction = ResponseDirection("strategic", data.dataset, model, self.features, self.target)
        self.shifted_columns = self.direction.shifted_columns
        self.estimator = "mean_x" if data.dataset.classes is None else "group_mean"

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        epsilon = entry_of_client(self.epsilons, batch["client"]).to(theta.dtype)
        return batch | {"x": batch["x"] - epsilon * self.direction(theta)}
