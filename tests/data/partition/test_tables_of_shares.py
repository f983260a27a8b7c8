"""Natural owners, class fractions, tables and validation samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from splits import EVERY, SETTINGS, parts_of, problems, samples_of

from fedsim.core import ConfigError
from fedsim.data.partition import IID, Natural, Table
from fedsim.data.partition.partition import Samples


@SETTINGS
@given(owners=st.lists(st.integers(0, 9), min_size=1, max_size=100))
def test_natural_follows_the_owners(owners: list[int]) -> None:
    """Client i holds exactly what it owns, in the data's order; an owner without samples is an error."""
    held = np.array(owners)
    clients = int(held.max()) + 1
    samples = Samples(len(held), owners=held)
    if len(np.unique(held)) < clients:
        with pytest.raises(ConfigError, match=f"clients={clients}"):
            Natural().table(samples, clients, 0)
        return
    for client, part in enumerate(parts_of(Natural().table(samples, clients, 0))):
        assert np.array_equal(part, np.flatnonzero(held == client))


def test_natural_keeps_the_order_of_many_samples() -> None:
    """Enough of them for an unstable sort to show."""
    owners = np.random.default_rng(0).integers(0, 3, 5000)
    for client, part in enumerate(parts_of(Natural().table(Samples(5000, owners=owners), 3, 0))):
        assert np.array_equal(part, np.flatnonzero(owners == client))


def test_natural_needs_owners_and_their_number() -> None:
    with pytest.raises(ConfigError, match=r"partition=natural needs.*partition="):
        Natural().table(Samples(10), 2, 0)
    with pytest.raises(ConfigError, match=r"clients=5.*set clients=3"):
        Natural().table(Samples(3, owners=np.arange(3)), 5, 0)


@SETTINGS
@given(problem=problems())
def test_class_fractions_are_what_the_clients_hold(problem: tuple[Samples, int, int]) -> None:
    """Against one loop over clients and samples."""
    samples, clients, seed = problem
    assert samples.labels is not None
    table, classes = IID().table(samples, clients, seed), 12
    naive = np.zeros((clients, classes))
    for client, part in enumerate(parts_of(table)):
        for sample in part:
            naive[client, samples.labels[sample]] += 1 / len(part)
    fractions = table.class_fractions(samples.labels, classes)
    np.testing.assert_allclose(fractions, naive, atol=1e-12)
    np.testing.assert_allclose(fractions.sum(1), 1.0)


def test_a_table_keeps_the_parts_it_was_made_of() -> None:
    parts = [np.array([4, 2]), np.array([0]), np.array([1, 3, 5])]
    table = Table.from_shares(parts)
    assert table.sizes.tolist() == [2, 1, 3]
    for given_part, kept in zip(parts, parts_of(table), strict=True):
        assert np.array_equal(given_part, kept)


@given(st.data())
@SETTINGS
def test_a_validation_split_takes_its_share_of_every_client(data):
    """⌊share · n_i⌋ samples of each client, none lost, none shared, at least one left; the parts keep their order."""
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    share = data.draw(st.sampled_from([0.05, 0.2, 0.5, 0.99]))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    samples = Samples(len(owners), owners=np.random.default_rng(0).permutation(owners))
    whole = parts_of(Natural().table(samples, len(sizes), 3))
    try:
        table = Natural(validation=share).table(samples, len(sizes), 3)
    except ConfigError as error:
        assert max(int(n * share + 1e-9) for n in sizes) == 0 or max(sizes) == 1
        assert f"partition.validation={share} leaves no client a validation sample" in str(error)  # noqa: PT017
        return
    for kept, held, everything in zip(parts_of(table), parts_of(table.validation), whole, strict=True):
        n = len(everything)
        assert len(held) == min(int(n * share + 1e-9), n - 1)
        assert [s for s in everything if s not in set(held)] == kept.tolist()
        assert [s for s in everything if s in set(held)] == held.tolist()


def test_validation_samples_are_drawn_at_random_for_every_seed():
    """Each of ten samples is held out equally often: 400 seeds, 20 %, 5 σ; the split before it stays the same."""
    samples = Samples(10, owners=np.zeros(10, dtype=np.int64))
    held = np.zeros(10)
    for seed in range(400):
        held[Natural(validation=0.2).table(samples, 1, seed).validation.order] += 1
    assert np.abs(held - 80).max() < 5 * (400 * 0.2 * 0.8) ** 0.5
    iid = samples_of(50, 5, 3, 0)
    whole, split = IID().table(iid, 5, 7), IID(validation=0.3).table(iid, 5, 7)
    assert sorted([*split.order, *split.validation.order]) == sorted(whole.order)
    for parts in zip(parts_of(whole), parts_of(split), parts_of(split.validation), strict=True):
        assert set(parts[0]) == set(parts[1]) | set(parts[2])


@pytest.mark.parametrize("name", EVERY)
def test_every_partition_can_split_off_validation_samples(name):
    partition = EVERY[name]()
    partition = type(partition)(validation=0.2)
    table = partition.table(samples_of(200, 5, 4, 1), 5, 2)
    assert table.validation is not None
    assert not set(table.order) & set(table.validation.order)
    with pytest.raises(ConfigError, match=r"validation=1 leaves no training samples"):
        type(partition)(validation=1)
