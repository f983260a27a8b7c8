"""Feature skew: noise that grows from client to client, or rotated images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import CountOrZero, Fraction, NonNegative
from fedsim.core.errors import ConfigError
from fedsim.data.partition.even import IID
from fedsim.data.partition.partition import Skew

ROTATION_COUNTS = (2, 4)


@dataclass
class InputNoise(Skew):
    """x + ε with ε ~ N(0, σ² (i + 1) / m) for client i; a sample's noise is fixed."""

    sigma: float
    clients: int
    seed: int

    def check(self, name: str, shape: tuple[int, ...], tokens: bool) -> None:
        if tokens:
            raise ConfigError(
                f"partition=feature_noise adds noise to numbers, but dataset={name} has tokens; use another partition"
            )

    def __call__(self, x: Tensor, client: Tensor, numbers: Tensor) -> Tensor:
        level = self.sigma * ((client + 1).to(x.dtype) / self.clients).sqrt()
        seeds = torch.full_like(numbers, self.seed, dtype=torch.int64)
        keys = rng.row_keys(seeds, rng.Purpose.FEATURES, numbers.to(torch.int64))
        counters = torch.arange(math.prod(x.shape[2:]), device=x.device)
        noise = rng.normal(keys[..., None], counters, x.dtype).reshape(x.shape)
        return x + level.reshape(-1, *[1] * (x.dim() - 1)) * noise


@dataclass
class ImageRotation(Skew):
    """Images turned by (i mod k) · 360/k degrees, anticlockwise, of client i."""

    turns: int

    def check(self, name: str, shape: tuple[int, ...], tokens: bool) -> None:
        if tokens or len(shape) != 3:
            raise ConfigError(
                f"partition=feature_rotation rotates images, but inputs of {name} have shape {list(shape)}"
            )
        if self.turns == 4 and shape[1] != shape[2]:
            raise ConfigError(
                f"partition.turns=4 turns square images, but those of {name} are {shape[1]}×{shape[2]}; set it to 2"
            )

    def __call__(self, x: Tensor, client: Tensor, numbers: Tensor) -> Tensor:
        client_turn = (client % self.turns).reshape(-1, *[1] * (x.dim() - 1))
        output = x
        for quarter_turns in range(1, self.turns):
            output = torch.where(
                client_turn == quarter_turns, torch.rot90(x, quarter_turns * (4 // self.turns), (-2, -1)), output
            )
        return output


class FeatureNoise(IID):
    """An iid partition in which noise N(0, σ² (i + 1) / m) is added to every feature of client i: feature skew as in
    NIID-Bench (Li et al. 2022, noise-based feature imbalance), where noise grows with the client's number likewise. A
    sample's noise is part of the data: it is the same in every round, in evaluation on clients' own samples and
    validation samples, and in every replicate in which the sample belongs to that client. The test set has no noise.

    Args:
        sigma: σ, in units of the model's inputs.
        seed: of the noise.
        validation: of every partition.
    """

    name = "feature_noise"

    def __init__(self, sigma: NonNegative = 1.0, seed: CountOrZero = 0, validation: Fraction = 0.0) -> None:
        super().__init__(validation)
        self.sigma = sigma
        self.seed = seed

    def skew(self, clients: int) -> Skew:
        return InputNoise(self.sigma, clients, self.seed)


class FeatureRotation(IID):
    """An iid partition of images, rotated by (i mod k) · 360/k degrees at client i (Ghosh et al. 2020: rotated
    MNIST).

    The test set is upright.

    Args:
        turns: k, 2 or 4.
        validation: of every partition.
    """

    name = "feature_rotation"

    def __init__(self, turns: int = 4, validation: Fraction = 0.0) -> None:
        super().__init__(validation)
        if turns not in ROTATION_COUNTS:
            raise ConfigError(key="turns", value=turns, needs="must be 2 (upside down) or 4 (quarter turns)")
        self.turns = turns

    def skew(self, clients: int) -> Skew:
        return ImageRotation(self.turns)
