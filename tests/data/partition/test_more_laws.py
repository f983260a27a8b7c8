"""Quantity skew, distributions as asked, groups of owners, two levels, Flower's partitioners: each by its own law."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from splits import parts_of, samples_of

from fedsim.core import ConfigError
from fedsim.data.partition import IID, ClassSplit, Dirichlet, Flwr, Grouped, Hierarchical, Matched, Quantity
from fedsim.data.partition.partition import Samples

SAMPLES = samples_of(6000, 30, 5, seed=1)
NAMED = Samples(6000, SAMPLES.labels, SAMPLES.owners, tuple(f"user {n}" for n in range(30)))


def counts_of(partition, clients: int, samples: Samples = SAMPLES, seed: int = 0) -> np.ndarray:
    """[m, C] samples of every client and class."""
    parts = parts_of(partition.table(samples, clients, seed))
    return np.stack([np.bincount(samples.labels[part], minlength=5) for part in parts])


def test_sizes_of_a_power_law_fall_as_the_rank_to_the_exponent() -> None:
    sizes = np.sort(Quantity("power", exponent=1.5).table(Samples(100_000), 40, 0).sizes)[::-1]
    weights = np.arange(1, 41) ** -1.5
    assert np.abs(sizes - 1 - weights / weights.sum() * (100_000 - 40)).max() <= 1
    assert sizes.sum() == 100_000
    ranks = [Quantity("power").table(Samples(500), 5, seed).sizes.argmax() for seed in range(30)]
    assert set(ranks) == set(range(5))


@pytest.mark.slow
def test_logarithms_of_lognormal_sizes_are_normal_with_their_sigma() -> None:
    sizes = np.concatenate([Quantity(sigma=0.5).table(Samples(4_000_000), 400, seed).sizes for seed in range(5)])
    logarithms = np.log(sizes)
    assert abs(logarithms.std() - 0.5) < 5 * 0.5 / np.sqrt(2 * len(sizes))  # the error of a normal law's deviation
    assert stats.kstest((logarithms - logarithms.mean()) / 0.5, "norm").pvalue > 1e-6
    assert np.ptp(Quantity(sigma=0.0).table(Samples(1000), 30, 0).sizes) <= 1


def test_what_clients_of_unequal_size_hold_does_not_depend_on_the_labels() -> None:
    counts = counts_of(Quantity(min_size=20), 30)
    assert counts.sum() == 6000
    assert counts.sum(1).min() >= 20
    assert stats.chi2_contingency(counts).pvalue > 1e-6
    with pytest.raises(ConfigError, match=r"clients=30 × partition\.min_size=300 exceeds the 6000 samples"):
        counts_of(Quantity(min_size=300), 30)


def test_a_stratified_split_makes_clients_alike() -> None:
    counts = counts_of(Matched(), 30)
    share = np.bincount(SAMPLES.labels) / 6000
    assert np.abs(counts - counts[0].sum() * share).max() <= 1
    assert counts.sum() > 6000 - 30 - 5 * 30


def test_labels_are_distributed_as_asked() -> None:
    wanted = np.random.default_rng(0).dirichlet(np.ones(5), 8)
    counts = counts_of(Matched(wanted.tolist()), 8)
    assert np.ptp(counts.sum(1)) == 0
    assert np.abs(counts - counts[0].sum() * wanted).max() < 1
    held = np.bincount(SAMPLES.labels)
    larger = wanted.sum(0) * (counts[0].sum() + 8)
    assert (larger > held).any()  # no class could serve clients that are much larger
    assert (
        counts_of(Matched([[1, 0, 0, 0, 0], [0, 0, 3, 1, 0]], size=40), 2) == [[40, 0, 0, 0, 0], [0, 0, 30, 10, 0]]
    ).all()
    assert (counts_of(Matched([1, 1, 0, 0, 0], size=10), 3)[:, :2] == 5).all()


@pytest.mark.parametrize(("distribution", "size", "says"), [
    ([1, 2], None, r"partition\.distribution has the shape \[1, 2\], but there are 5 classes and clients=3"),
    ([[1] * 5] * 2, None, r"has the shape \[2, 5\]"),
    ([1, -1, 0, 0, 0], None, "must be a row of numbers, nonnegative"),
    ([0] * 5, None, "not all 0"),
    ([[1, 2], [1]], None, "rows of equal length"),
    ([1, float("nan"), 0, 0, 0], None, "must be a row of numbers"),
    ([1, 0, 0, 0, 0], 3000, r"partition\.size=3000 needs 9000 samples of class 0"),
    ([1, 0, 0, 0, 0, 1], None, "a class in partition.distribution has too few"),
])  # fmt: skip
def test_distributions_that_cannot_be(distribution, size, says) -> None:
    with pytest.raises(ConfigError, match=says):
        Matched(distribution, size).table(SAMPLES, 3, 0)


@pytest.mark.parametrize("clients", [1, 7, 30])
def test_owners_go_together_whole(clients: int) -> None:
    table = Grouped().table(NAMED, clients, 0)
    held = [set(NAMED.owners[part]) for part in parts_of(table)]
    assert sorted(owner for own in held for owner in own) == list(range(30))
    assert {len(own) for own in held} <= {30 // clients, -(-30 // clients)}
    assert table.sizes.sum() == 6000
    for own, name in zip(held, table.names, strict=True):
        first, *others = name.split(" + ")
        assert int(first.removeprefix("user ")) in own
        assert len(others) == min(len(own) - 1, 2)
    if clients == 7:
        assert "+ 3 more" in table.names[0] or "+ 2 more" in table.names[0]


def test_neighbours_go_together_where_nothing_is_drawn() -> None:
    held = [sorted(set(NAMED.owners[part])) for part in parts_of(Grouped(shuffle=False).table(NAMED, 10, 0))]
    assert held == [[3 * k, 3 * k + 1, 3 * k + 2] for k in range(10)]
    with pytest.raises(ConfigError, match="clients=31 exceeds the 30 natural owners"):
        Grouped().table(NAMED, 31, 0)
    with pytest.raises(ConfigError, match="partition=grouped needs a data set with natural owners"):
        Grouped().table(Samples(10), 2, 0)


def test_regions_differ_and_clients_inside_them_do_not() -> None:
    partition = Hierarchical(4, ClassSplit(2), IID())
    table = partition.table(SAMPLES, 22, 0)
    counts = counts_of(partition, 22)
    groups = np.array_split(np.arange(22), 4)
    assert table.names == tuple(f"{g}.{c}" for g, group in enumerate(groups) for c in range(len(group)))
    for group in groups:
        assert (counts[group].sum(0) > 0).sum() == 2  # classes of a region
        assert stats.chi2_contingency(counts[group][:, counts[group].sum(0) > 0]).pvalue > 1e-6
        assert np.ptp(counts[group].sum(1)) <= 1
    both = counts_of(Hierarchical(4, ClassSplit(2), ClassSplit(1)), 20)
    assert ((both > 0).sum(1) == 1).all()


def test_levels_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"clients=3 leaves some of partition\.groups=5 empty"):
        Hierarchical().table(SAMPLES, 3, 0)
    with pytest.raises(ConfigError, match=r"inner\.validation is not used"):
        Hierarchical(inner=IID(validation=0.2))
    with pytest.raises(ConfigError, match=r"partition\.outer='iid' is not a partition"):
        Hierarchical(outer="iid")
    small = Samples(60, np.repeat([0, 1], [57, 3]))
    with pytest.raises(ConfigError, match=r"group \d has 3 samples for its 5 clients"):
        Hierarchical(2, ClassSplit(1)).table(small, 10, 0)


def test_shards_are_mcmahans() -> None:
    """Sorted by label and cut into m·k shards of equal size: whoever holds k of them sees few labels."""
    samples = Samples(1000, np.random.default_rng(0).permutation(np.repeat(np.arange(10), 100)))
    parts = parts_of(ClassSplit(2, "shards").table(samples, 25, 0))
    labels = [np.bincount(samples.labels[part], minlength=10) for part in parts]
    assert all(len(part) == 40 for part in parts)
    assert all(set(own[own > 0]) <= {20, 40} for own in labels)  # 50 shards of 20 samples, five of them a class
    assert sum((own > 0).sum() == 2 for own in labels) > 15


class Halves:
    """What a partitioner of Flower's is to us: a data set goes in, parts come out."""

    num_partitions = 2

    def load_partition(self, number: int):
        return {"number": [n for n, label in enumerate(self.dataset["label"]) if (label > 2) == number]}


def test_any_partitioner_with_flowers_interface() -> None:
    pytest.importorskip("datasets")
    partition = Flwr(Halves())
    for seed in range(2):  # it divides a copy, so that it can again
        parts = parts_of(partition.table(SAMPLES, 2, seed))
        assert [sorted(set(SAMPLES.labels[part])) for part in parts] == [[0, 1, 2], [3, 4]]
    with pytest.raises(ConfigError, match=r"clients=3, but partition\.partitioner makes 2 parts"):
        partition.table(SAMPLES, 3, 0)
    with pytest.raises(ConfigError, match=r"partition\.partitioner=Halves fails: .*label"):
        partition.table(Samples(10), 2, 0)
    with pytest.raises(ConfigError, match=r"partitioner=7 is not a partitioner of Flower"):
        Flwr(7)


def test_flowers_own_partitioners() -> None:
    flower = pytest.importorskip("flwr_datasets.partitioner")
    parts = parts_of(Flwr(flower.NaturalIdPartitioner("client")).table(NAMED, 30, 0))
    assert sorted(tuple(set(NAMED.owners[part])) for part in parts) == [(n,) for n in range(30)]
    pathological = flower.PathologicalPartitioner(num_partitions=10, partition_by="label", num_classes_per_partition=2)
    assert ((counts_of(Flwr(pathological), 10) > 0).sum(1) <= 2).all()
    dirichlet = flower.DirichletPartitioner(num_partitions=10, partition_by="label", alpha=0.3)
    assert counts_of(Flwr(dirichlet), 10).sum() == 6000
    assert counts_of(Dirichlet(form="per_class"), 10).sum() == 6000


def test_quantity_may_need_every_sample() -> None:
    """6000 samples are 30 × 200; one more each is too many."""
    assert counts_of(Quantity(min_size=200), 30).sum(1).tolist() == [200] * 30
    with pytest.raises(ConfigError, match="exceeds the 6000 samples"):
        counts_of(Quantity(min_size=201), 30)
