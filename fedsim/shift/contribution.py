"""Dynamic contribution: the distributions of groups are fixed, and their fractions react to the model (profl §6)."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from fedsim.core.constraints import Count, NonNegative, OneOf, Positive
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.heterogeneity import entry_of_client
from fedsim.data.datasets.pricing import groups_from_uniforms
from fedsim.data.samples import ClientData, StoredClientData
from fedsim.models import StatelessModel
from fedsim.shift.attraction import (
    BudgetAttraction,
    GroupAttraction,
    LinearGroupFractions,
    LossAttraction,
    expand_mixture_components,
)
from fedsim.shift.shift import Shift

ATTRACTION_FORMS = ("linear", "budget", "loss")


class Contribution(Shift):
    """D_i(θ) = Σ_k ν_{i,k}(θ) D_{i,k}.

    With a mixture stream (dataset=pricing_groups or regression_groups) a sample's uniform number falls into one of the
    current fractions, and that group's draw becomes the sample: training uses true samples of D_i(θ), which are not
    differentiable in θ. `respond_differentiably` returns the draws of all groups with weights ν_k, which are
    differentiable; θ^PO, θ^PS and evaluation use it.

    With stored data the groups are the classes. A sample of group k has the weight ν_k(θ)/π_{i,k}, where π are the
    client's class fractions: importance weights, differentiable in θ, normalised over the batch. Classes without
    samples at a client remain absent; if θ attracts none of its classes (form=linear at θ = ∓1), they keep their
    fractions.

    In one dimension with loss zθ, f = ½ + ½θ and group means a₁ > a₂: θ^PS = −(a₁ + a₂)/(a₁ − a₂), θ^PO half of it.

    Args:
        form: 'linear', 'budget' or 'loss' (see `fedsim.shift.attraction`).
        budget: B.
        constant: c.
        samples: number of samples per client for the groups' losses.
        **options: of every shift; `box` is [−1, 1] for form=linear unless given.
    """

    effective_if = (
        EffectiveIf("budget", lambda component, run: component.form == "budget", "{at}.form=budget"),
        EffectiveIf("constant", lambda component, run: component.form == "loss", "{at}.form=loss"),
        EffectiveIf("samples", lambda component, run: component.form == "loss", "{at}.form=loss"),
    )

    estimator = "fractions"
    knows_stored_samples = True
    groups: int

    def __init__(
        self,
        form: Annotated[str, OneOf(*ATTRACTION_FORMS)] = "linear",
        budget: Positive = 10.0,
        constant: NonNegative = 1.0,
        samples: Count = 100,
        **options: Any,
    ) -> None:
        self.form = form
        if form == "linear" and options.get("box") is None:
            options["box"] = [-1.0, 1.0]
        super().__init__(**options)
        self.budget = budget
        self.constant = constant
        self.samples = samples

    def setup(self, federation: Federation, data: ClientData, model: StatelessModel) -> None:
        dataset = data.dataset
        mixture = getattr(dataset, "fractions", None)
        if mixture is not None:
            self.groups = len(mixture)
            self.held_fractions, self.group_entry = None, "group"
        elif (
            isinstance(data, StoredClientData)
            and dataset.classes is not None
            and federation.class_fractions is not None
        ):
            self.groups = dataset.classes
            self.held_fractions = torch.as_tensor(federation.class_fractions, device=federation.device).flatten(0, 1)
        else:
            raise ConfigError(
                f"shift=contribution moves the fractions of groups, which dataset={dataset.name} does not have; use "
                "dataset=pricing_groups, regression_groups or one with classes"
            )
        context = (federation, data, model, self.groups)
        self.attraction: GroupAttraction
        if self.form == "linear":
            self.attraction = LinearGroupFractions(*context)
        elif self.form == "budget":
            self.attraction = BudgetAttraction(*context, self.budget)
        else:
            self.attraction = LossAttraction(*context, self.constant, self.samples)

    def fractions(self, batch: dict[str, Tensor], theta: Tensor) -> Tensor:
        """[K] ν_{i,k}(θ) of the batch's client; they sum to 1."""
        fractions = self.attraction(theta, batch)
        if self.held_fractions is not None:
            held_fractions = entry_of_client(self.held_fractions, batch["row"])
            fractions = fractions * (held_fractions > 0)
            # no group is attracted, so everybody stays
            fractions = torch.where(fractions.sum() > 0, fractions, held_fractions.to(fractions.dtype))
        return fractions / fractions.sum()

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        fractions = self.fractions(batch, theta)
        if self.held_fractions is not None:
            return self._weighted_batch(batch, fractions)
        group = groups_from_uniforms(fractions, batch["uniform"])
        shifted_batch = batch | {"group": group}
        for name in ("x", "y"):
            component = batch.get(f"component_{name}")
            if component is not None:
                row_selection = group.reshape(-1, *[1] * (component.dim() - 1)).expand(-1, 1, *component.shape[2:])
                shifted_batch[name] = component.gather(1, row_selection)[:, 0]
        return shifted_batch

    def respond_differentiably(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        fractions = self.fractions(batch, theta)
        if self.held_fractions is not None:
            return self._weighted_batch(batch, fractions)
        expanded_batch, group = expand_mixture_components(batch, self.groups)
        weight = fractions[group]
        if "weight" in batch:
            weight = weight * batch["weight"].repeat_interleave(self.groups)
        return expanded_batch | {"weight": weight, "group": group, "client": batch["client"], "row": batch["row"]}

    def _weighted_batch(self, batch: dict[str, Tensor], fractions: Tensor) -> dict[str, Tensor]:
        assert self.held_fractions is not None
        held_fractions = entry_of_client(self.held_fractions, batch["row"]).to(fractions.dtype)
        weight = torch.where(held_fractions > 0, fractions / held_fractions.clamp(min=1e-12), 0.0)[batch["y"]]
        return batch | {"weight": weight * batch["weight"] if "weight" in batch else weight}
