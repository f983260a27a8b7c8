"""Quantity skew: clients that differ in the number of samples but not in their distribution."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fedsim.core.constraints import Count, Fraction, NonNegative, OneOf
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.data.partition.partition import Partition, Samples, Table

QUANTITY_LAWS = ("lognormal", "power")


class Quantity(Partition):
    """Shuffled samples in shares of unequal size; every sample is used.

    Client i gets `min_size` samples, and a share of the remaining samples proportional to w_i. 'lognormal': w_i = exp(σ
    z_i), z_i ~ N(0, 1), drawn for every replicate (σ = 0 gives equal sizes). 'power': the client of rank k has w =
    k^−a, k = 1 … m (Zipf's law); ranks are drawn at random.

    Args:
        law: 'lognormal' or 'power'.
        sigma: σ of 'lognormal'.
        exponent: a of 'power'.
        min_size: minimum number of samples per client.
        validation: of every partition.
    """

    effective_if = (
        EffectiveIf("sigma", lambda component, run: component.law == "lognormal", "{at}.law=lognormal"),
        EffectiveIf("exponent", lambda component, run: component.law == "power", "{at}.law=power"),
    )

    name = "quantity"
    remedy = "lower clients, or raise partition.min_size"

    def __init__(
        self,
        law: Annotated[str, OneOf(*QUANTITY_LAWS)] = "lognormal",
        sigma: NonNegative = 1.0,
        exponent: NonNegative = 1.0,
        min_size: Count = 1,
        validation: Fraction = 0.0,
    ) -> None:
        super().__init__(validation)
        self.law = law
        self.sigma = sigma
        self.exponent = exponent
        self.min_size = min_size

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> Table:
        surplus = samples.count - clients * self.min_size
        if surplus < 0:
            raise ConfigError(
                f"clients={clients} × partition.min_size={self.min_size} exceeds the {samples.count} samples"
            )
        if self.law == "lognormal":
            logarithms = self.sigma * draw.standard_normal(clients)
        else:
            logarithms = -self.exponent * np.log(draw.permutation(clients) + 1.0)
        weights = np.exp(logarithms - logarithms.max())
        sizes = self.min_size + largest_remainder_counts(weights, surplus)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return Table(draw.permutation(samples.count).astype(np.int32), offsets)


def largest_remainder_counts(weights: np.ndarray, total: int) -> np.ndarray:
    """Integers that sum to the total and are closest to shares w / Σw of it (largest remainder method)."""
    exact = weights / weights.sum() * total
    counts = np.floor(exact).astype(np.int64)
    num_missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:num_missing]] += 1
    return counts
