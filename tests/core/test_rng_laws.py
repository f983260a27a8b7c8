"""The law of what is drawn: uniform, normal and whole numbers, balanced bits, independent neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from random_keys import keys_of, many
from torch import Tensor

from fedsim.core import rng
from fedsim.core.rng import Purpose


def chi_squared_excess(values: Tensor, cells: int) -> float:
    """How many standard deviations Pearson's statistic of equally likely cells lies from its mean."""
    counts = torch.bincount(values.reshape(-1), minlength=cells).double()
    assert len(counts) == cells
    expected = values.numel() / cells
    statistic = ((counts - expected).square() / expected).sum().item()
    return (statistic - (cells - 1)) / math.sqrt(2 * (cells - 1))


def test_uniform_numbers_are_uniform() -> None:
    """Range, mean 1/2, variance 1/12, and Kolmogorov's distance √n·D < 2.5 (probability 7e-6 of more)."""
    drawn = rng.uniform(*many()).double().reshape(-1)
    n = len(drawn)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(drawn.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    ordered, steps = drawn.sort().values, torch.arange(n + 1).double() / n
    distance = torch.maximum((ordered - steps[:-1]).abs().max(), (steps[1:] - ordered).abs().max())
    assert distance * math.sqrt(n) < 2.5


def test_the_largest_uniform_number_stays_below_one() -> None:
    """All bits set is 1 − 2^−24, which float32 holds exactly: it never rounds up to 1."""
    assert torch.tensor((1 << 24) - 1, dtype=torch.float32) * (1.0 / (1 << 24)) < 1
    assert rng.uniform(*many(), torch.float32).max() <= 1 - 2**-24


@pytest.mark.parametrize("along", ["clients", "counters", "rounds", "seeds"])
def test_neighbours_are_independent(along: str) -> None:
    """Each way a key can be counted up alone: cells are equally full, and so are pairs of neighbours."""
    n = 100_000
    numbers = torch.arange(n)
    zeros = torch.zeros_like(numbers)
    if along == "clients":
        drawn = rng.uniform(rng.row_keys(zeros, Purpose.BATCH, numbers, 0), torch.zeros((), dtype=torch.int64))
    elif along == "counters":
        drawn = rng.uniform(keys_of(1), numbers)
    elif along == "rounds":
        start = rng.fold_in(torch.zeros(1, dtype=torch.int64), int(Purpose.BATCH))
        drawn = rng.uniform(rng.fold_in(rng.fold_in(start, numbers), 0), torch.zeros((), dtype=torch.int64))
    else:
        drawn = rng.uniform(rng.row_keys(numbers, Purpose.BATCH, zeros, 0), torch.zeros((), dtype=torch.int64))
    cell = (drawn * 64).long()
    assert abs(chi_squared_excess(cell, 64)) < 5
    for lag in (1, 2, 3):
        assert abs(chi_squared_excess(cell[:-lag] // 4 * 16 + cell[lag:] // 4, 256)) < 5
        pair = torch.stack([drawn[:-lag], drawn[lag:]]).double()
        assert abs(torch.corrcoef(pair)[0, 1]) < 5 / math.sqrt(n)


def test_clients_and_purposes_are_uncorrelated() -> None:
    """Whole sequences: no two of 100 clients, and no two purposes of one client, correlate."""
    counters = torch.arange(20_000)
    clients = rng.uniform(keys_of(100)[:, None], counters).double()
    purposes = torch.stack([rng.uniform(keys_of(1, purpose=p), counters).double() for p in Purpose])
    for drawn in (clients, purposes):
        correlation = torch.corrcoef(drawn)
        assert (correlation - torch.eye(len(drawn))).abs().max() < 6 / math.sqrt(len(counters))


def test_bits_are_balanced() -> None:
    """Every one of the 32 bits is set in half of the draws."""
    drawn = rng.random_bits(*many()).reshape(-1)
    for place in range(32):
        share = ((drawn >> place) & 1).double().mean()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(len(drawn)), place


def test_one_changed_bit_of_the_key_changes_half_of_the_bits() -> None:
    """Avalanche, for every bit of the key and the low bits of the counter."""
    keys, counters = keys_of(2000), torch.arange(2000)
    base = rng.random_bits(keys, counters)

    def flipped_share(other: Tensor) -> float:
        different = base ^ other
        return sum(((different >> place) & 1).double().mean().item() for place in range(32)) / 32

    for place in range(64):
        changed = keys ^ torch.tensor(1 << place if place < 63 else -(1 << 63))
        assert abs(flipped_share(rng.random_bits(changed, counters)) - 0.5) < 0.02, place
    for place in range(20):
        assert abs(flipped_share(rng.random_bits(keys, counters ^ (1 << place))) - 0.5) < 0.02, place


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers_are_normal(dtype: torch.dtype) -> None:
    """Mean 0, variance 1, third moment 0, fourth 3; the shares within one, two, three σ; nothing infinite."""
    drawn = rng.normal(*many(), dtype).double().reshape(-1)
    n = len(drawn)
    assert torch.isfinite(drawn).all()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(drawn.pow(power).mean() - moment) < 5 * math.sqrt(variance / n), power
    for sigmas in (1, 2, 3):
        p = math.erf(sigmas / math.sqrt(2))
        assert abs((drawn.abs() < sigmas).double().mean() - p) < 5 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("extreme", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extreme_uniform_numbers_give_finite_normal_ones(
    extreme: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero comes once in 17 million draws, too rarely to wait for; its logarithm must not end a run."""
    monkeypatch.setattr(rng, "uniform", lambda keys, counters, dtype: torch.full((4,), extreme, dtype=dtype))
    assert torch.isfinite(rng.normal(keys_of(4), torch.arange(4), dtype)).all()


def test_neighbouring_normal_numbers_are_independent() -> None:
    """Box–Muller takes two uniforms a number, so that no two numbers share one."""
    drawn = rng.normal(keys_of(1), torch.arange(100_000)).double()
    for lag in (1, 2):
        for a, b in ((drawn[:-lag], drawn[lag:]), (drawn[:-lag].abs(), drawn[lag:].abs())):
            assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / math.sqrt(len(drawn))


@pytest.mark.parametrize("high", [1, 2, 3, 10, 97, 1000])
def test_integers_are_uniform(high: int) -> None:
    drawn = rng.integers(*many(200_000), high)
    assert drawn.dtype == torch.int64
    assert drawn.min() == 0
    assert drawn.max() == high - 1
    if high > 1:
        assert abs(chi_squared_excess(drawn, high)) < 5


@pytest.mark.parametrize("high", [60_000, 1_000_003, 2**31 - 1, 2**31, 2**32 - 1])
def test_integers_below_a_large_bound_are_uniform(high: int) -> None:
    """Never negative, never too large, mean and tenths right, up to the 32 bits a draw has."""
    drawn = rng.integers(*many(200_000), high)
    assert drawn.min() >= 0
    assert drawn.max() < high
    assert abs(chi_squared_excess(drawn * 10 // high, 10)) < 5


def test_every_row_may_have_its_own_bound() -> None:
    """`high` broadcasts: ragged clients are drawn for at once, each as if alone."""
    keys, counters, high = keys_of(4)[:, None], torch.arange(500), torch.tensor([[1], [5], [100], [60_000]])
    drawn = rng.integers(keys, counters, high)
    for row in range(4):
        assert torch.equal(drawn[row], rng.integers(keys[row], counters, int(high[row])))


def test_purposes_are_distinct() -> None:
    """An alias would make two purposes share their numbers."""
    assert len({int(p) for p in Purpose}) == len(Purpose.__members__)
