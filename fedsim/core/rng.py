"""Randomness as a function: each number is determined by (seed, purpose, round, client, counter), and none comes from a
stream.

Two kinds of draw. *Narrow* ones (who is available, how the data are split) use a NumPy generator keyed by
`generator(seed, purpose, round)` and are made on the host for all clients at once, so that every algorithm and every
device meets the same trace for a seed. *Wide* ones (which samples, which noise, which dropout mask) are a counter-based
hash in tensor integer arithmetic on the data's device: any client's numbers exist without drawing anybody else's, so
results depend neither on chunk size, executor, device count, nor on interruptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum, unique
from typing import Any

import numpy as np
import torch
from torch import Tensor


@unique
class Purpose(IntEnum):
    """The purpose of a draw. Two purposes never share numbers."""

    DATA = 1
    PARTITION = 2
    MODEL = 3
    PROBABILITY = 4
    TRAJECTORY = 5
    AVAILABILITY = 6
    BATCH = 7
    AUGMENT = 8
    DROPOUT = 9
    NOISE = 10
    EVALUATION = 11
    SHIFT = 12
    CONTAMINATION = 13
    STRATEGY = 14
    CLIENTS = 15
    FEATURES = 16
    COMMON = 17
    SPELL = 18
    TURNS = 19
    ROSTER = 20
    UPLINK = 21
    ATTACK = 22
    CLOCK = 23
    WORK = 24
    POINT = 25
    DELAY = 26
    MIXTURE = 27
    CLUSTER = 28
    TIE = 29
    EVENT = 30
    CAPACITY = 34
    CHANNEL = 35
    WIDTH = 36
    DRIFT = 40
    ONSET = 41
    ARRIVAL = 42
    DEVICE = 43
    CALIBRATION = 44


def generator(seed: int, purpose: Purpose, *counters: int) -> np.random.Generator:
    """A host generator for narrow draws, a pure function of its arguments."""
    key = (int(purpose), len(counters), *map(int, counters))  # a spawn key keeps seeds and counters apart
    return np.random.default_rng(np.random.SeedSequence(int(seed), spawn_key=key))


def draws_by_seed(
    seeds: Sequence[int], draw: Callable[[np.random.Generator], Any], purpose: Purpose, *counters: int
) -> np.ndarray:
    """Return [R, …], the result of `draw` with the generator of each seed, purpose and counters, computed once for
    equal seeds."""
    draw_by_seed = {seed: draw(generator(seed, purpose, *counters)) for seed in dict.fromkeys(seeds)}
    return np.stack([draw_by_seed[seed] for seed in seeds])


_SPLITMIX64_INCREMENT = -0x61C8864680B583EB  # 2^64 / golden ratio, odd; as a signed 64-bit integer
_SPLITMIX64_MULTIPLIER_1 = -0x40A7B892E31B1A47  # splitmix64's multipliers
_SPLITMIX64_MULTIPLIER_2 = -0x6B2FB644ECCEEE15
_LOWBIAS32_MULTIPLIER_1 = 0x7FEB352D  # lowbias32's multipliers (Wellons' search for 32-bit mixers)
_LOWBIAS32_MULTIPLIER_2 = 0x846CA68B - (1 << 32)
_LOWBIAS32_INCREMENT = 0x9E3779B9 - (1 << 32)
_SHIFT_27, _SHIFT_30, _SHIFT_31, _GAMMA_HOST, _MIX_1_HOST, _MIX_2_HOST = np.array(
    [27, 30, 31, _SPLITMIX64_INCREMENT, _SPLITMIX64_MULTIPLIER_1, _SPLITMIX64_MULTIPLIER_2]
).view(np.uint64)


def _mix64(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 (arithmetic wraps; shifts are made logical by a mask)."""
    x = (x >> 30).bitwise_and_((1 << 34) - 1).bitwise_xor_(x).mul_(_SPLITMIX64_MULTIPLIER_1)
    x = (x >> 27).bitwise_and_((1 << 37) - 1).bitwise_xor_(x).mul_(_SPLITMIX64_MULTIPLIER_2)
    return (x >> 31).bitwise_and_((1 << 33) - 1).bitwise_xor_(x)


def _mix64_host(value: int) -> int:
    """`_mix64` of a host integer, as a signed 64-bit integer."""
    mask = (1 << 64) - 1
    x = value & mask
    x = ((x ^ (x >> 30)) * (_SPLITMIX64_MULTIPLIER_1 & mask)) & mask
    x = ((x ^ (x >> 27)) * (_SPLITMIX64_MULTIPLIER_2 & mask)) & mask
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def _mix64_array(x: np.ndarray) -> np.ndarray:
    """`_mix64` of host integers, uint64."""
    x = np.atleast_1d(x)  # NumPy scalars would warn about overflow
    x = (x ^ (x >> _SHIFT_30)) * _MIX_1_HOST
    x = (x ^ (x >> _SHIFT_27)) * _MIX_2_HOST
    mixed: np.ndarray = x ^ (x >> _SHIFT_31)
    return mixed


def _mix32(x: Tensor) -> Tensor:
    """lowbias32 on int32: a bijection of 32 bits with good avalanche. Changes its argument in place."""
    x = x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_LOWBIAS32_MULTIPLIER_1)
    x = x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_LOWBIAS32_MULTIPLIER_2)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def fold_in(key: Tensor, value: Tensor | int) -> Tensor:
    """Derive a new 64-bit key from a key and a value (int64, broadcast; a host integer costs the device nothing)."""
    mixed = (
        _mix64(value + _SPLITMIX64_INCREMENT)
        if isinstance(value, Tensor)
        else _mix64_host(value + _SPLITMIX64_INCREMENT)
    )
    return _mix64((key ^ _SPLITMIX64_INCREMENT) + mixed)


def row_keys(seeds: Tensor, purpose: Purpose, client_numbers: Tensor, *counters: int) -> Tensor:
    """One int64 key per row.

    Args:
        seeds: [n] int64, the replicate's seed of each row.
        client_numbers: [n] int64, the client's number of each row.
        counters: round, step, …: host integers.
    """
    key = fold_in(seeds, int(purpose))
    for counter in counters:
        key = fold_in(key, counter)
    return fold_in(key, client_numbers)


def fold_in_host(keys: np.ndarray, values: np.ndarray | int) -> np.ndarray:
    """`fold_in` for host integers, int64 of shapes that broadcast. For a few rows this takes less time than a call
    of the device."""
    if isinstance(values, np.ndarray):
        mixed = _mix64_array(values.astype(np.int64, copy=False).view(np.uint64) + _GAMMA_HOST)
    else:
        mixed = np.array([_mix64_host(int(values) + _SPLITMIX64_INCREMENT)]).view(np.uint64)
    folded: np.ndarray = _mix64_array((keys.view(np.uint64) ^ _GAMMA_HOST) + mixed).view(np.int64)
    return folded


def row_keys_host(
    seeds: np.ndarray, purpose: Purpose, client_numbers: np.ndarray, *counters: int | np.ndarray
) -> np.ndarray:
    """`row_keys` of host integers [n]; a counter may differ between rows."""
    key = fold_in_host(seeds, int(purpose))
    for counter in counters:
        key = fold_in_host(key, counter)
    return fold_in_host(key, client_numbers)


def uniform_host(keys: np.ndarray) -> np.ndarray:
    """Uniform on [0, 1) with 53 bits, one float64 for each key of `row_keys_host`."""
    numbers: np.ndarray = (keys.view(np.uint64) >> np.uint64(11)) * 2.0**-53
    return numbers


def normal_on_host(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Standard normal by Box–Muller, one float64 for each pair of keys of `row_keys_host`."""
    radius = np.sqrt(-2.0 * np.log1p(-uniform_host(first)))
    numbers: np.ndarray = radius * np.cos(2.0 * np.pi * uniform_host(second))
    return numbers


def random_bits(keys: Tensor, counters: Tensor) -> Tensor:
    """32 random bits (as int32, full range) for every key and counter; the two broadcast."""
    low = keys.to(torch.int32)
    high = (keys >> 32).to(torch.int32)
    return _mix32(_mix32((counters.to(torch.int32) * _LOWBIAS32_INCREMENT) ^ low) ^ high)


def uniform(keys: Tensor, counters: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform on [0, 1) with 24 bits, so that float32 never rounds up to 1: multiples of 2⁻²⁴ ≈ 6·10⁻⁸, in double
    precision too."""
    return ((random_bits(keys, counters) >> 8) & 0xFFFFFF).to(dtype) * (1.0 / (1 << 24))


def bernoulli_draws(keys: Tensor, counters: Tensor, p: float) -> Tensor:
    """Return whether `uniform(keys, counters)` < p, decided on the random bits, which takes half as long."""
    # As an unsigned number; signed ones with the top bit flipped sort equally.
    threshold = math.ceil(p * (1 << 24)) << 8
    return (random_bits(keys, counters) ^ -(1 << 31)) < threshold - (1 << 31)


def normal(keys: Tensor, counters: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal by Box–Muller, from counters 2j and 2j + 1. With 24 bits no value exceeds √(50 ln 2) ≈ 5.89;
    a true normal does so once in 250 million draws."""
    radius = uniform(keys, counters * 2, dtype) + 0.5 / (1 << 24)  # in (0, 1): the logarithm stays finite
    angle = uniform(keys, counters * 2 + 1, dtype)
    return torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(2.0 * math.pi * angle)


def integers(keys: Tensor, counters: Tensor, high: Tensor | int) -> Tensor:
    """Uniform integers in [0, high), int64. `high` ≤ 2^32 broadcasts; the bias is below high / 2^32."""
    return (
        ((random_bits(keys, counters).to(torch.int64) & 0xFFFFFFFF) * high) >> 32
    ) & 0xFFFFFFFF  # the product may wrap
