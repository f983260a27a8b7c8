"""Location shift: z ~ D_i + ε_i θ (p-fedavg §4; closed forms: θ^PS = m̄ / (1 − ε̄))."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import NonNegative, Real
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.heterogeneity import entry_of_client, match_moments
from fedsim.data.datasets import Dataset
from fedsim.data.samples import ClientData
from fedsim.models import StatelessModel
from fedsim.shift.shift import Shift


class Location(Shift):
    """x ← x + ε_i θ, for inputs with as many entries as the model has parameters (mean estimation).

    Args:
        epsilon, variance: ε̄ = Σ w_i ε_i and Var(ε) = Σ w_i (ε_i − ε̄)² over clients, with the strategy's weights (of
            the first replicate, if they differ); the drawn ε_i have exactly these moments. Mean estimation has a
            performatively stable point only for ε̄ < 1.
        epsilons: explicit ε_i, one per client, instead of drawing them.
        seed: seed of the sensitivities, which are the same for all replicates.
        **options: of every shift.
    """

    effective_if = (
        EffectiveIf(
            "epsilon",
            lambda component, run: component.given_epsilons is None,
            "{at}.epsilons=null, which gives all sensitivities",
        ),
        EffectiveIf(
            "variance",
            lambda component, run: component.given_epsilons is None,
            "{at}.epsilons=null, which gives all sensitivities",
        ),
        EffectiveIf(
            "seed",
            lambda component, run: component.given_epsilons is None,
            "{at}.epsilons=null, which gives all sensitivities",
        ),
        EffectiveIf("seed", lambda component, run: component.variance > 0, "{at}.variance above 0"),
    )

    estimator = "mean_x"

    def __init__(
        self,
        epsilon: Real = 0.9,
        variance: NonNegative = 0.0,
        epsilons: list[Real] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.epsilon = epsilon
        self.variance = variance
        self.given_epsilons, self.seed = epsilons, seed

    def setup(self, federation: Federation, data: ClientData, model: StatelessModel) -> None:
        m = federation.clients
        need_one_parameter_per_input("location", data.dataset, model)
        if self.given_epsilons is not None:
            if len(self.given_epsilons) != (total_clients := m + federation.num_newcomers):
                raise ConfigError(
                    f"shift.epsilons has {len(self.given_epsilons)} entries, but clients={total_clients}; give one "
                    "per client"
                )
            sensitivities_per_client = torch.as_tensor(self.given_epsilons[:m], dtype=torch.float64)
        else:
            noise = rng.generator(self.seed, rng.Purpose.SHIFT).standard_normal(m)
            weights = federation.client_weights[0]
            sensitivities_per_client = torch.as_tensor(
                match_moments("shift.variance", self.epsilon, self.variance, weights, noise)
            )
        average = float(
            (federation.client_weights @ sensitivities_per_client.numpy()).max()
        )  # of the replicate where it is largest
        if self.given_epsilons is None:
            average = max(average, self.epsilon)  # without the rounding error of the mean
        if average >= 1:
            raise ConfigError(
                f"shift.epsilon={average:g} averages at least 1: on mean estimation runs then approach no "
                "performatively stable point and diverge; choose an average below 1"
            )
        self.epsilons = sensitivities_per_client.to(federation.device)

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        epsilon = entry_of_client(self.epsilons, batch["client"]).to(theta.dtype)
        return batch | {"x": batch["x"] + epsilon * theta.reshape(batch["x"].shape[1:])}


def need_one_parameter_per_input(shift: str, dataset: Dataset, model: StatelessModel) -> None:
    """Raise unless θ has as many entries as an input, so that it can be added to it."""
    if math.prod(dataset.shape) != model.dimension:
        raise ConfigError(
            f"shift={shift} adds the model's parameters to the inputs, but the model has {model.dimension} of them and "
            f"dataset={dataset.name} has inputs of shape {list(dataset.shape)}; use model=mean"
        )
