"""One number per client: given, or drawn around a mean. All replicates have the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import Real
from fedsim.core.errors import ConfigError

PerClientNumbers = Real | Sequence[Real]  # one for all clients, or one each


def numbers_per_client(
    config_key: str,
    value: PerClientNumbers,
    spread: float,
    clients: int,
    seed: int,
    purpose: rng.Purpose,
    draw_counter: int = 0,
    num_newcomers: int = 0,
    default_value: float = 0.0,
) -> Tensor:
    """Return the numbers of m clients, [m] float64.

    Args:
        config_key: the setting's name, for messages.
        value: the mean, or m numbers, one for each client, which are used as they are.
        spread: half-width: numbers are uniform on [value − spread, value + spread]. With m numbers it is left at its
            default, or 0.
        clients: m.
        seed, purpose, draw_counter: of the draw.
        num_newcomers: clients that are none of the m, but join at the end; given numbers are theirs too.
        default_value: the default of `spread`.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != clients + num_newcomers:
            raise ConfigError(
                key=config_key,
                needs=f"has {len(value)} entries, but clients={clients + num_newcomers}; give one number, or one each",
            )
        if spread not in (0, default_value):
            raise ConfigError(
                f"{config_key.rpartition('.')[0]}.spread={spread:g} is around one number, but {config_key} "
                "gives one to "
                f"each client, which are used as they are; leave it out, or give {config_key} as one number"
            )
        return torch.tensor(list(value[:clients]), dtype=torch.float64)
    centre = torch.full((clients,), float(value), dtype=torch.float64)
    draws = rng.generator(seed, purpose, draw_counter).uniform(-1.0, 1.0, clients)
    return centre + spread * torch.as_tensor(draws)


def match_moments(
    config_key: str, target_mean: float, variance: float, weights: np.ndarray, draws: np.ndarray
) -> np.ndarray:
    """Return [m] numbers with exactly this weighted mean and variance over the clients: the draws, shifted and scaled.

    Var(ε) = Σ w_i (ε_i − ε̄)² as p-fedavg §4 has it, and as its authors' program makes it.

    Args:
        config_key: the variance's name, for messages.
        target_mean, variance: of the numbers.
        weights: [m] w_i, which sum to 1.
        draws: [m] of any law.

    Raises:
        ConfigError: where the clients cannot differ.
    """
    if variance == 0:
        return np.full(len(draws), float(target_mean))
    centred = draws - weights @ draws
    spread = weights @ centred**2
    if len(draws) < 2 or not spread > 0:
        raise ConfigError(
            key=config_key, value=variance, needs="needs at least two clients that can differ; set it to 0"
        )
    scaled: np.ndarray = target_mean + (variance / spread) ** 0.5 * centred
    return scaled


def entry_of_client(table: Tensor, number: Tensor) -> Tensor:
    """Return entry `number`, [], of a table [m, …] with one entry per client (or row), also under `torch.func.vmap`.

    The same as `table[number]`, which PyTorch before 2.11 reads by `.item()`, and so refuses under vmap.
    """
    return table.index_select(0, number.reshape(1)).squeeze(0)
