"""The interface of a contamination: it receives a client's batch after the shift and replaces some of its samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import CountOrZero, Fraction, OneOf, Validated
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.datasets import Dataset


class Contamination(Validated, ABC):
    """Replaces samples of the clients' batches."""

    active = True

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        """Determine which clients are contaminated, and how much; raise an error for data that cannot be."""

    def at(self, t: int) -> Contamination:
        """The contamination of round t."""
        return self

    @abstractmethod
    def __call__(self, batch: dict[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        """Contaminate a batch of c clients.

        Args:
            batch: 'x' [c, B, …], 'y' [c, B, …], 'client' and 'row' [c].
            keys: [c] int64, one per client and step.

        Returns:
            A batch like `batch`, with 'contaminated' [c, B] bool: the samples that are not genuine.
        """


class NoContamination(Contamination):
    """Every sample is genuine."""

    active = False

    def __call__(self, batch: dict[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        return batch


ContaminatedEntry = Annotated[str, OneOf("x", "y")]  # inputs or targets


class HuberContamination(Contamination):
    """(1 − ϵ_i) D_i(θ) + ϵ_i Q_i: every sample is replaced independently with probability ϵ_i (profl §4.2).

    Q_i does not depend on the model. A genuine sample's importance weight does not count for the one that replaces it.

    Args:
        fraction: ϵ.
        clients: numbers of the contaminated ones, or None for all.
        exact: exactly ϵ n of every n samples that a client draws are replaced, rounded half up; only their positions
            are random.
    """

    effective_if = (
        EffectiveIf("mean", lambda component, run: component.fraction > 0, "{at}.fraction above 0"),
        EffectiveIf("std", lambda component, run: component.fraction > 0, "{at}.fraction above 0"),
        EffectiveIf("entry", lambda component, run: component.fraction > 0, "{at}.fraction above 0"),
        EffectiveIf("clients", lambda component, run: component.fraction > 0, "{at}.fraction above 0"),
        EffectiveIf("exact", lambda component, run: component.fraction > 0, "{at}.fraction above 0"),
        EffectiveIf("value", lambda component, run: component.fraction > 0, "{at}.fraction above 0"),
    )

    def __init__(
        self, fraction: Fraction = 0.1, clients: Sequence[CountOrZero] | None = None, exact: bool = False
    ) -> None:
        self.fraction, self.clients = fraction, clients
        self.exact = exact

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        m = federation.clients
        if self.clients is not None and not len(self.clients):
            raise ConfigError(
                "contamination.clients=[] contaminates no client; use contamination=none, or null for all"
            )
        fractions = torch.zeros(m, dtype=torch.float64)
        for client in range(m) if self.clients is None else self.clients:
            if client >= m:
                raise ConfigError(f"contamination.clients names client {client}, but clients={m} end at {m - 1}")
            fractions[client] = self.fraction
        self.fractions = fractions.to(federation.device)

    def __call__(self, batch: dict[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        slots = torch.arange(batch["x"].shape[1], device=keys.device)
        uniform_numbers, fraction = (
            rng.uniform(keys[:, None], slots, torch.float64),
            self.fractions[batch["client"]][:, None],
        )
        contaminated = (
            is_among_lowest(uniform_numbers, fraction, batch.get("weight"))
            if self.exact
            else uniform_numbers < fraction
        )
        contaminated_batch = batch | {"contaminated": contaminated}
        for name, corrupted in self.replacement_values(batch, contaminated, rng.fold_in(keys, 1)).items():
            shape = (*contaminated.shape, *[1] * (corrupted.dim() - 2))
            contaminated_batch[name] = torch.where(
                contaminated.reshape(shape), corrupted.to(batch[name].dtype), batch[name]
            )
        if "weight" in batch:  # padding stays out
            weight = batch["weight"]
            contaminated_batch["weight"] = torch.where(contaminated, (weight > 0).to(weight.dtype), weight)
        return contaminated_batch

    @abstractmethod
    def replacement_values(self, batch: dict[str, Tensor], contaminated: Tensor, keys: Tensor) -> dict[str, Tensor]:
        """The replacements of contaminated samples: entries shaped like those of the batch, for all its samples."""

    @staticmethod
    def normals(keys: Tensor, like: Tensor) -> Tensor:
        """Standard normals [c, B, …], keyed by client and step."""
        counters = torch.arange(like[0].numel(), device=like.device).reshape(like.shape[1:])
        return rng.normal(keys.reshape(-1, *[1] * (like.dim() - 1)), counters, like.dtype)


def is_among_lowest(uniform_numbers: Tensor, fraction: Tensor, weight: Tensor | None) -> Tensor:
    """[c, B] is a number among the lowest ϵ_i n of its row? drawn [c, B], fraction [c, 1]; n counts weights above 0."""
    real_mask = torch.ones_like(uniform_numbers, dtype=torch.bool) if weight is None else weight > 0
    count = (fraction * real_mask.sum(1, keepdim=True) + 0.5).floor()
    rank = torch.where(real_mask, uniform_numbers, 2.0).argsort(1).argsort(1)
    return real_mask & (rank < count)


def check_real_inputs(contamination: Contamination, dataset: Dataset) -> None:
    """Raise an error if tokens would be replaced by real numbers."""
    if dataset.tokens:
        raise ConfigError(
            f"contamination={type(contamination).__name__} changes numbers, but dataset={dataset.name} has tokens"
        )


def check_real_entry(contamination: Contamination, entry: str, dataset: Dataset) -> str:
    """'x', or 'y' where the data have real-valued targets."""
    if entry == "x":
        check_real_inputs(contamination, dataset)
    labelled = dataset.classes is not None or (not dataset.stream and dataset.train_y is None)
    if entry == "y" and (labelled or dataset.loss != "squared"):
        raise ConfigError(
            f"contamination.entry=y needs real-valued targets, which dataset={dataset.name} does not have; use "
            "entry=x, or contamination=label_flip"
        )
    return entry
