"""How strongly the deployed model attracts each group of a client's population (profl §6)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.heterogeneity import entry_of_client
from fedsim.data.datasets import Dataset
from fedsim.data.samples import ClientData, StoredClientData
from fedsim.models import StatelessModel
from fedsim.shift.location import need_one_parameter_per_input

Batch = dict[str, Tensor]


class GroupAttraction(ABC):
    """ν_{i,k}(θ), the fraction of group k, up to normalisation, which `Contribution` does.

    Args:
        federation, data, model: of the run.
        groups: K.
    """

    @abstractmethod
    def __call__(self, theta: Tensor, batch: Batch) -> Tensor:
        """[K] non-negative attractions of one client's groups under θ [d]; the batch's 'row' says whose."""


class LinearGroupFractions(GroupAttraction):
    """f = ½ + ½θ of group 1 and 1 − f of group 2, for one parameter θ in [−1, 1]."""

    def __init__(self, federation: Federation, data: ClientData, model: StatelessModel, groups: int) -> None:
        if groups != 2 or model.dimension != 1:
            raise ConfigError(
                f"shift.form=linear is for two groups and one parameter, but there are {groups} and {model.dimension}; "
                "use shift.form=budget or loss"
            )

    def __call__(self, theta: Tensor, batch: Batch) -> Tensor:
        return torch.cat([0.5 + 0.5 * theta, 0.5 - 0.5 * theta]).clamp(0.0, 1.0)


class BudgetAttraction(GroupAttraction):
    """ν_k ∝ B − θᵀμ_{i,k}: the remaining budget of group k after buying at prices θ.

    Below zero it counts as next to nothing.
    """

    def __init__(
        self, federation: Federation, data: ClientData, model: StatelessModel, groups: int, budget: float
    ) -> None:
        need_one_parameter_per_input("contribution", data.dataset, model)
        self.budget, self.means = budget, group_means(federation, data, groups)

    def __call__(self, theta: Tensor, batch: Batch) -> Tensor:
        return (self.budget - entry_of_client(self.means, batch["row"]).to(theta.dtype) @ theta).clamp(min=1e-6)


class LossAttraction(GroupAttraction):
    """ν_k ∝ c + Σ_{l≠k} ℓ_{i,l}(θ): groups that the model serves badly leave; for two groups, profl's ν_k ∝ ℓ_{−k} + c.

    ℓ_{i,k} is the mean loss on a fixed sample of the client's group k, up to `samples` of each client: its moments are
    exact for a stream, so that a squared loss is an expectation.
    """

    def __init__(
        self,
        federation: Federation,
        data: ClientData,
        model: StatelessModel,
        groups: int,
        constant: float,
        samples: int,
    ) -> None:
        if model.loss_mixes_samples:
            raise ConfigError(
                "shift=contribution with shift.form=loss needs a loss per sample, and this one looks at the whole "
                "batch; use shift.form=budget, or another loss"
            )
        self.model, self.constant, self.groups = model, constant, groups
        self.dataset: Dataset = data.dataset
        self._lock = threading.Lock()  # functional calls share one module among the loop executor's threads
        rows = torch.arange(len(federation.num_samples), device=federation.device)
        if not isinstance(data, StoredClientData):
            fixed_samples = data.fixed_samples(rows, data.width(samples), torch.float64, rng.Purpose.SHIFT)
            self.sample, group = expand_mixture_components(fixed_samples, groups, num_leading_dims=2)
        else:  # only their values are kept
            numbers, valid = data.numbers(rows, data.width(samples))
            assert self.dataset.train_y is not None
            self.sample = {"number": numbers}
            group = torch.where(valid, self.dataset.train_y[numbers], -1)
        of_group = (group[..., None] == torch.arange(groups, device=group.device)).to(torch.float64)
        self.share = of_group / of_group.sum(1, keepdim=True).clamp(min=1)  # [R·m, q, K]

    def __call__(self, theta: Tensor, batch: Batch) -> Tensor:
        samples = {name: entry_of_client(value, batch["row"]) for name, value in self.sample.items()}
        if "number" in samples:
            assert self.dataset.train_y is not None
            x = self.dataset.prepare(self.dataset.inputs(samples["number"]), theta.dtype)
            samples = {"x": x, "y": self.dataset.train_y[samples["number"]]}
        samples = {k: v.to(theta.dtype) if v.is_floating_point() else v for k, v in samples.items()}
        with self._lock:
            losses = self.model.loss(self.model.evaluate(theta, samples["x"]), samples)
        loss = losses @ entry_of_client(self.share, batch["row"]).to(theta.dtype)
        return (loss.sum() - loss + self.constant).clamp(min=1e-6)


def group_means(federation: Federation, data: ClientData, groups: int) -> Tensor:
    """[R·m, K, d] E[x] in every group of every virtual client; zero where it holds none."""
    dataset = data.dataset
    known_means = getattr(dataset, "group_means", None)
    if known_means is not None:
        return known_means.repeat(federation.num_replicates, 1, 1)
    if not isinstance(data, StoredClientData) or dataset.train_y is None:
        raise ConfigError(
            f"shift.form=budget needs the means of groups, unknown for dataset={dataset.name}; use form=loss"
        )
    means = []
    for row in range(len(federation.num_samples)):
        indices = data.share(row)
        x = dataset.prepare(dataset.inputs(indices), torch.float64).flatten(1)
        group_mask = (dataset.train_y[indices][:, None] == torch.arange(groups, device=x.device)).to(x.dtype)
        means.append(group_mask.T @ x / group_mask.sum(0).clamp(min=1)[:, None])
    return torch.stack(means)


def expand_mixture_components(batch: Batch, groups: int, num_leading_dims: int = 1) -> tuple[Batch, Tensor]:
    """Every sample of a mixture once for each group: x and y [..., B·K, …], and the group of each [..., B·K].

    Args:
        batch: with 'component_…' [..., B, K, …]; entries without components are repeated.
        groups: K.
        num_leading_dims: axes up to and including B.
    """
    expanded_batch = {}
    for name in ("x", "y"):
        if f"component_{name}" in batch:
            expanded_batch[name] = batch[f"component_{name}"].flatten(num_leading_dims - 1, num_leading_dims)
        elif name in batch:
            expanded_batch[name] = batch[name].repeat_interleave(groups, dim=num_leading_dims - 1)
    shape = batch["uniform"].shape
    group = torch.arange(groups, device=batch["x"].device).expand(*shape, groups)
    return expanded_batch, group.flatten(num_leading_dims - 1, num_leading_dims)
