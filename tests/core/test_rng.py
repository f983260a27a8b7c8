"""Keys: the same key gives the same numbers, every part of it counts, and neighbours do not matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_keys import keys_of, many
from torch import Tensor

from fedsim.core import rng
from fedsim.core.rng import Purpose


def test_no_normal_number_lies_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """√(50 ln 2), where both uniform numbers are 0."""
    monkeypatch.setattr(rng, "uniform", lambda keys, counters, dtype: torch.zeros(len(keys), dtype=dtype))
    largest = rng.normal(keys_of(3), torch.arange(3), torch.float64)
    assert torch.allclose(largest, torch.full((3,), math.sqrt(50 * math.log(2)), dtype=torch.float64))


SETTINGS = settings(max_examples=30, deadline=None)


seeds = st.integers(0, 2**40)


rounds = st.integers(0, 10**6)


@SETTINGS
@given(seed=seeds, purpose=st.sampled_from(Purpose), t=rounds, counter=st.integers(0, 2**30))
def test_the_same_key_gives_the_same_numbers(seed: int, purpose: Purpose, t: int, counter: int) -> None:
    """No call leaves a trace that a later one could see."""
    clients, counters = torch.tensor([0, 3, 5]), torch.tensor([counter, counter + 1])

    def draws() -> list[Tensor]:
        keys = rng.row_keys(torch.full((3,), seed), purpose, clients, t)[:, None]
        return [
            rng.random_bits(keys, counters),
            rng.uniform(keys, counters),
            rng.normal(keys, counters),
            rng.integers(keys, counters, 7),
            torch.as_tensor(rng.generator(seed, purpose, t).random(4)),
        ]

    first = draws()
    torch.rand(1)
    rng.generator(seed + 1, purpose, t).random()
    for a, b in zip(first, draws(), strict=True):
        assert torch.equal(a, b)


def test_replicates_of_equal_seed_share_one_draw() -> None:
    drawn = []

    def draw(generator: np.random.Generator) -> np.ndarray:
        drawn.append(generator)
        return generator.random(4)

    found = rng.draws_by_seed([3, 5, 3, 3], draw, Purpose.AVAILABILITY, 7)
    each = [rng.generator(seed, Purpose.AVAILABILITY, 7).random(4) for seed in (3, 5, 3, 3)]
    assert np.array_equal(found, each)
    assert len(drawn) == 2


@SETTINGS
@given(seed=seeds, purpose=st.sampled_from(Purpose), t=rounds, client=st.integers(0, 10**6))
def test_keys_made_on_the_host_are_the_same_keys(seed: int, purpose: Purpose, t: int, client: int) -> None:
    numbers, clients = np.full(3, seed), np.array([client, 0, client + 1])
    keys = rng.row_keys(torch.tensor(numbers), purpose, torch.tensor(clients), t)
    host = rng.row_keys_host(numbers, purpose, clients, t)
    assert torch.equal(keys, torch.tensor(host))
    steps = np.arange(4)[:, None]
    assert torch.equal(rng.fold_in(keys, torch.tensor(steps)), torch.tensor(rng.fold_in_host(host, steps)))


@SETTINGS
@given(seed=seeds, t=rounds, client=st.integers(0, 10**6), step=st.integers(0, 10**4))
def test_every_part_of_a_wide_key_counts(seed: int, t: int, client: int, step: int) -> None:
    """Changing the seed, purpose, round, client or step alone gives other keys."""

    def key(seed: int, purpose: Purpose, t: int, client: int, step: int) -> int:
        keys = rng.row_keys(torch.tensor([seed]), purpose, torch.tensor([client]), t)
        return int(rng.fold_in(keys, step))

    base = key(seed, Purpose.BATCH, t, client, step)
    others = [
        key(seed + 1, Purpose.BATCH, t, client, step),
        key(seed, Purpose.NOISE, t, client, step),
        key(seed, Purpose.BATCH, t + 1, client, step),
        key(seed, Purpose.BATCH, t, client + 1, step),
        key(seed, Purpose.BATCH, t, client, step + 1),
    ]
    assert len({base, *others}) == 6


def test_wide_keys_do_not_collide() -> None:
    """Seeds × purposes × rounds × clients × steps, 168,000 small numbers: 168,000 different keys of 64 bits."""
    keys = [
        rng.fold_in(rng.row_keys(torch.full((20,), seed), purpose, torch.arange(20), t)[:, None], torch.arange(6))
        for seed in range(10)
        for purpose in Purpose
        for t in range(10)
    ]
    flat = torch.cat([k.reshape(-1) for k in keys])
    assert len(torch.unique(flat)) == len(flat)


def test_all_64_bits_of_a_key_count() -> None:
    """Of 300,000 keys about ten pairs share their first 32 bits; they must part at the next counter."""
    keys = keys_of(300_000)
    first, order = rng.random_bits(keys, torch.zeros((), dtype=torch.int64)).sort()
    pairs = torch.stack([order[:-1], order[1:]])[:, first[:-1] == first[1:]]
    assert 0 < pairs.shape[1] < 40
    second = rng.random_bits(keys, torch.ones((), dtype=torch.int64))[pairs]
    assert (second[0] != second[1]).all()


def test_folding_is_injective_and_ordered() -> None:
    """Two values folded into one key differ, one value folded into two keys differs, and order matters."""
    key, values = torch.tensor(12345), torch.arange(-1000, 1000)
    assert len(torch.unique(rng.fold_in(key, values))) == len(values)
    assert len(torch.unique(rng.fold_in(values, 7))) == len(values)
    assert int(rng.fold_in(rng.fold_in(key, 1), 2)) != int(rng.fold_in(rng.fold_in(key, 2), 1))


@SETTINGS
@given(seed=seeds, purpose=st.sampled_from(Purpose), t=rounds)
def test_every_part_of_a_host_key_counts(seed: int, purpose: Purpose, t: int) -> None:
    other = Purpose.DATA if purpose is not Purpose.DATA else Purpose.MODEL
    numbers = [
        rng.generator(*arguments).random()
        for arguments in ((seed, purpose, t), (seed + 1, purpose, t), (seed, other, t), (seed, purpose, t + 1))
    ]
    assert len(set(numbers)) == 4


@SETTINGS
@given(seed=st.integers(0, 2**31), t=st.integers(1, 1000))
def test_host_keys_of_a_large_seed_are_not_another_seeds(seed: int, t: int) -> None:
    """A seed of more than 32 bits must not read as a smaller seed in another round."""
    large = rng.generator(seed + 2**32 * t, Purpose.AVAILABILITY, 0).random(4)
    assert not np.array_equal(large, rng.generator(seed, Purpose.AVAILABILITY, t).random(4))


def test_host_keys_without_and_with_a_zero_counter_differ() -> None:
    assert rng.generator(3, Purpose.DATA).random() != rng.generator(3, Purpose.DATA, 0).random()
    assert rng.generator(3, Purpose.DATA, 1).random() != rng.generator(3, Purpose.DATA, 1, 0).random()


@SETTINGS
@given(
    clients=st.lists(st.integers(0, 499), min_size=1, max_size=20, unique=True),
    first=st.integers(0, 50),
    width=st.integers(1, 20),
)
def test_a_clients_numbers_do_not_depend_on_who_else_is_asked(clients: list[int], first: int, width: int) -> None:
    """Any subset of clients and counters gives the numbers that everybody's draw holds at these places."""
    pick, slots = torch.tensor(clients), torch.arange(first, first + width)
    everyone = keys_of(500)[:, None]
    some = rng.row_keys(torch.zeros(len(pick), dtype=torch.int64), Purpose.BATCH, pick, 0)[:, None]
    for draw in (rng.random_bits, rng.uniform, rng.normal, lambda k, c: rng.integers(k, c, 11)):
        whole = draw(everyone, torch.arange(80))
        assert torch.equal(draw(some, slots), whole[pick][:, slots])


@SETTINGS
@given(shape=st.lists(st.integers(1, 5), min_size=0, max_size=3), c=st.integers(1, 5))
def test_keys_and_counters_broadcast(shape: list[int], c: int) -> None:
    """A broadcast draw is the draws of its elements, whatever the shapes."""
    keys = keys_of(c).reshape(c, *[1] * len(shape))
    counters = torch.arange(math.prod(shape)).reshape(shape)
    drawn = rng.random_bits(keys, counters)
    assert drawn.shape == (c, *shape)
    one_by_one = [rng.random_bits(k, n) for k in keys.reshape(-1) for n in counters.reshape(-1)]
    assert torch.equal(drawn.reshape(-1), torch.stack(one_by_one))


def test_the_type_of_counters_and_the_layout_of_keys_do_not_matter() -> None:
    keys, counters = keys_of(6), torch.arange(40)
    expected = rng.random_bits(keys[:, None], counters)
    assert torch.equal(rng.random_bits(keys[:, None], counters.to(torch.int32)), expected)
    strided = torch.stack([keys, keys], 1)[:, 0]
    assert torch.equal(rng.random_bits(strided[:, None], counters), expected)
    assert torch.equal(rng.random_bits(keys, counters[:, None]), expected.T)


def test_both_floating_types_see_the_same_uniform_numbers() -> None:
    """24 bits fit float32 exactly, so a run in float64 meets the same draws."""
    keys, counters = many(10_000)
    single, double = rng.uniform(keys, counters), rng.uniform(keys, counters, torch.float64)
    assert single.dtype == torch.float32
    assert double.dtype == torch.float64
    assert torch.equal(single.double(), double)
    near = rng.normal(keys, counters).double() - rng.normal(keys, counters, torch.float64)
    assert near.abs().max() < 1e-4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU")
def test_a_gpu_draws_the_cpus_numbers() -> None:
    keys, counters = many(100_000)
    for draw in (rng.random_bits, rng.uniform, lambda k, c: rng.integers(k, c, 1_000_003)):
        assert torch.equal(draw(keys.cuda(), counters.cuda()).cpu(), draw(keys, counters))
    torch.testing.assert_close(rng.normal(keys.cuda(), counters.cuda()).cpu(), rng.normal(keys, counters))


def test_numbers_of_the_host_have_their_distributions() -> None:
    """Bounds of five standard errors; each key's number is the same whatever other keys there are."""
    n = 40_000
    first, second = (rng.row_keys_host(np.full(n, 7), Purpose.EVENT, np.arange(n), 3, k) for k in range(2))
    uniform, normal = rng.uniform_host(first), rng.normal_on_host(first, second)
    assert ((uniform >= 0) & (uniform < 1)).all()
    assert abs(uniform.mean() - 0.5) < 5 * (1 / 12 / n) ** 0.5
    assert abs(uniform.var() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    assert abs(normal.mean()) < 5 * n**-0.5
    assert abs(normal.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((normal**4).mean() - 3) < 5 * (96 / n) ** 0.5
    assert abs(np.corrcoef(normal[1:], normal[:-1])[0, 1]) < 5 * n**-0.5
    assert np.array_equal(rng.normal_on_host(first[17:19], second[17:19]), normal[17:19])
