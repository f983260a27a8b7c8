"""Every split uses a sample at most once and leaves nobody empty, or ends in an error that says what to change."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from splits import EVERY, SETTINGS, problems, samples_of, table_or_error

from fedsim import Execution, Simulation
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset, Digits, GaussianMean
from fedsim.data.partition import IID, ClassSplit, Dirichlet, Equal, Natural, Partition
from fedsim.data.partition.partition import Samples
from fedsim.models import Linear, Mean
from fedsim.run.wiring import partition_samples

LABEL_BLIND = ("iid", "equal")


class Fixed(Partition):
    """Whatever it is given."""

    def __init__(self, parts: list[list[int]]) -> None:
        self.parts = parts

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> list[np.ndarray]:
        return [np.array(p, dtype=np.int64) for p in self.parts]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", EVERY)
@SETTINGS
@given(problem=problems())
def test_nothing_is_used_twice_and_nobody_is_empty(name: str, problem: tuple[Samples, int, int]) -> None:
    """For any N, m, labels: a split of known samples, or an error whose message names a key the user can change."""
    samples, clients, seed = problem
    table = table_or_error(EVERY[name](), samples, clients, seed)
    if isinstance(table, str):
        assert name not in LABEL_BLIND, "m ≤ N here, so a split that ignores labels always exists"
        assert "clients" in table or "partition." in table
        return
    assert len(table.sizes) == clients
    assert table.sizes.min() >= 1
    assert table.offsets[0] == 0
    assert table.offsets[-1] == len(table.order) == table.sizes.sum()
    assert len(np.unique(table.order)) == len(table.order)
    assert table.order.min() >= 0
    assert table.order.max() < samples.count


@SETTINGS
@given(problem=problems())
def test_iid_uses_everything_in_almost_equal_parts(problem: tuple[Samples, int, int]) -> None:
    samples, clients, seed = problem
    table = IID().table(samples, clients, seed)
    assert np.ptp(table.sizes) <= 1
    assert len(table.order) == samples.count


@SETTINGS
@given(problem=problems())
def test_equal_parts_are_exactly_equal(problem: tuple[Samples, int, int]) -> None:
    samples, clients, seed = problem
    assert (Equal().table(samples, clients, seed).sizes == samples.count // clients).all()


@pytest.mark.parametrize("name", EVERY)
def test_the_split_is_a_function_of_the_seed(name: str) -> None:
    """The same seed splits the same way, another seed another way (natural: always the same way)."""
    samples = samples_of(400, 8, 5, seed=0)
    first, again, other = (EVERY[name]().table(samples, 8, seed) for seed in (3, 3, 4))
    assert np.array_equal(first.order, again.order)
    assert np.array_equal(first.offsets, again.offsets)
    assert np.array_equal(first.order, other.order) == (name == "natural")


@pytest.mark.parametrize("partition", [IID(), Equal(), Dirichlet()])
def test_more_clients_than_samples_is_an_error(partition: Partition) -> None:
    with pytest.raises(ConfigError, match="clients=11"):
        partition.table(samples_of(10, 10, 2, 0), 11, 0)


@pytest.mark.parametrize("partition", [ClassSplit(), ClassSplit(form="shards"), Dirichlet()])
def test_a_split_by_class_needs_labels(partition: Partition) -> None:
    with pytest.raises(ConfigError, match=r"partition=\w+ needs class labels.*partition="):
        partition.table(Samples(10), 2, 0)


@pytest.mark.parametrize(
    ("owners", "partition", "said"), [(True, IID(), True), (True, Natural(), False), (False, IID(), False)]
)
def test_clients_of_the_data_that_a_partition_does_not_use_are_said(
    caplog: pytest.LogCaptureFixture, owners: bool, partition: Partition, said: bool
) -> None:
    x = torch.zeros(6, 2)
    data = Dataset("six", x, torch.arange(6) % 2, classes=2, owners=torch.arange(6) // 2 if owners else None)
    with caplog.at_level(logging.INFO, "fedsim"):
        partition_samples(data, partition, 3, (0,))
    assert ("3 clients are not used" in caplog.text) == said
    assert ("are not used" in caplog.text) == said


def test_samples_left_out_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """1,438 digits in 100 equal parts leave 38: nothing is lost silently, and nothing is said where nothing is lost."""
    with caplog.at_level(logging.INFO, "fedsim"):
        Simulation(Digits(), Linear, clients=100, partition=IID(), execution=Execution(device="cpu"))
        assert "not used" not in caplog.text
        Simulation(Digits(), Linear, clients=100, partition=Equal(), execution=Execution(device="cpu"))
    assert "38 of 1438 samples are not assigned to a client" in caplog.text


@pytest.mark.parametrize("parts", [[[0, 1], [1, 2]], [[0, 0], [1]]])
def test_a_partition_of_ones_own_is_checked_for_double_use(parts: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="two clients"):
        Fixed(parts).table(Samples(4), 2, 0)


def test_a_partition_of_ones_own_is_checked_for_empty_clients() -> None:
    with pytest.raises(ConfigError, match="clients=3"):
        Fixed([[0], [], [1]]).table(Samples(4), 3, 0)


def test_an_empty_client_is_reported_under_the_name_and_keys_of_its_partition() -> None:
    """The natural partition has no alpha to raise."""
    with pytest.raises(ConfigError, match="partition=natural leaves 1 of clients=3") as caught:
        Natural().table(Samples(2, owners=np.array([0, 2])), 3, 0)
    assert "alpha" not in str(caught.value)


@pytest.mark.parametrize("clients", [6, 4])
def test_shuffled_owners_are_drawn_by_replicate(clients: int) -> None:
    """Every client holds all of one owner, no two the same one; over 200 seeds each owner is client 0 equally often."""
    owners = np.repeat(np.arange(6), 1 + np.arange(6))
    samples = Samples(len(owners), owners=owners)
    first = np.zeros(6)
    for seed in range(200):
        parts = np.split(*(lambda t: (t.order, t.offsets[1:-1]))(Natural(shuffle=True).table(samples, clients, seed)))
        who = [int(owners[part[0]]) for part in parts]
        assert len(set(who)) == clients
        assert [sorted(part) for part in parts] == [np.flatnonzero(owners == owner).tolist() for owner in who]
        first[who[0]] += 1
    assert (np.abs(first - 200 / 6) < 5 * np.sqrt(200 * 5 / 36)).all(), first


def test_owners_beyond_the_clients_take_part_only_where_they_are_drawn() -> None:
    samples = Samples(6, owners=np.arange(6))
    with pytest.raises(ConfigError, match=r"clients=4, but the data set has 6 natural owners"):
        Natural().table(samples, 4, 0)
    with pytest.raises(ConfigError, match=r"clients=7, but the data set has 6 natural owners"):
        Natural(shuffle=True).table(samples, 7, 0)
    with pytest.raises(ConfigError, match=r"partition\.shuffle=true has no meaning for dataset=gaussian_mean"):
        Simulation(GaussianMean(clients=3), Mean, clients=3, partition=Natural(shuffle=True))
