"""Classes that react differently: the sensitivity depends on the label (profl §6, Table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedsim.core.constraints import CountOrZero, IndexOrName, NonNegative, Real
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.heterogeneity import entry_of_client
from fedsim.data.samples import ClientData
from fedsim.models import StatelessModel
from fedsim.shift.direction import ResponseDirection
from fedsim.shift.sensitivity import sensitivities
from fedsim.shift.shift import Shift


class GroupMean(Shift):
    """x | y ← x − γ_{i,y} θ on the strategic features; labels and bias do not change. θ is
    `ResponseDirection`, as for `Strategic`.

    Args:
        gamma: mean of γ_{i,y} for each class y, C numbers (profl Table 4: [0.02, 3]).
        spread: half-width of γ_{i,y} over clients, one for all classes or C numbers ([0.02, 0.2]).
        features, target: see `ResponseDirection`.
        seed: seed of the sensitivities, which are the same for all replicates.
        **options: of every shift.
    """

    effective_if = (
        EffectiveIf("seed", lambda component, run: any(component.spread), "{at}.spread above 0"),
        EffectiveIf("target", lambda component, run: component.direction.outputs > 1, "a model of several outputs"),
    )

    estimator = "group_mean"

    def __init__(
        self,
        gamma: Sequence[Real] = (0.02, 3.0),
        spread: NonNegative | Sequence[NonNegative] = (0.02, 0.2),
        features: Sequence[IndexOrName] | None = None,
        target: CountOrZero = 1,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.gamma, self.features, self.target, self.seed = list(gamma), features, target, seed
        self.spread = list(spread) if isinstance(spread, Sequence) else [spread] * len(self.gamma)

    def setup(self, federation: Federation, data: ClientData, model: StatelessModel) -> None:
        dataset = data.dataset
        if dataset.classes is None:
            raise ConfigError(
                f"shift=group_mean needs class labels, and dataset={dataset.name} has none; use another shift"
            )
        for key, values in (("gamma", self.gamma), ("spread", self.spread)):
            if len(values) != dataset.classes:
                raise ConfigError(
                    f"shift.{key}={values} has {len(values)} entries, but dataset={dataset.name} has {dataset.classes} "
                    "classes; give one per class"
                )
        columns = [
            sensitivities("shift.gamma", g, s, self.seed, federation, counter=y)
            for y, (g, s) in enumerate(zip(self.gamma, self.spread, strict=True))
        ]
        self.gammas = torch.stack(columns, dim=1)  # [m, C]
        self.direction = ResponseDirection("group_mean", dataset, model, self.features, self.target)
        self.shifted_columns = self.direction.shifted_columns

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        gamma = entry_of_client(self.gammas, batch["client"]).to(theta.dtype)[batch["y"]]
        direction = self.direction(theta)
        return batch | {"x": batch["x"] - gamma.reshape(-1, *[1] * direction.dim()) * direction}
