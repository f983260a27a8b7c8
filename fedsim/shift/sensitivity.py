"""How strongly each client's data react to the model."""

from __future__ import annotations

from torch import Tensor

from fedsim.core import rng
from fedsim.core.federation import Federation
from fedsim.core.heterogeneity import PerClientNumbers, numbers_per_client


def sensitivities(
    key: str,
    value: PerClientNumbers,
    spread: float,
    seed: int,
    federation: Federation,
    counter: int = 0,
    default_value: float = 0.0,
) -> Tensor:
    """[m] float64, on the device: given, or drawn around a mean.

    Args:
        key, value, spread, seed, counter, default_value: see `fedsim.core.heterogeneity.numbers_per_client`.
        federation: whose clients they are; newcomers, who join later, have given numbers too.
    """
    numbers = numbers_per_client(
        key,
        value,
        spread,
        federation.clients,
        seed,
        rng.Purpose.SHIFT,
        counter,
        federation.num_newcomers,
        default_value,
    )
    return numbers.to(federation.device)
