"""Partitions by class and by Dirichlet draws hold what their forms promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from splits import SETTINGS, parts_of, problems, table_or_error

from fedsim.core import ConfigError, rng
from fedsim.data.partition import ClassSplit, Dirichlet, Partition
from fedsim.data.partition.dirichlet import log_dirichlet
from fedsim.data.partition.partition import Samples


def balanced(per_class: int, classes: int) -> Samples:
    return Samples(per_class * classes, np.repeat(np.arange(classes), per_class))


class Counting:
    """A generator that counts its Dirichlet draws."""

    def __init__(self) -> None:
        self.inner, self.draws = np.random.default_rng(0), 0

    def __getattr__(self, name: str) -> Any:
        self.draws += name == "standard_gamma"
        return getattr(self.inner, name)


@SETTINGS
@given(
    clients=st.integers(1, 20),
    classes=st.integers(1, 10),
    k=st.integers(1, 4),
    extra=st.integers(0, 15),
    seed=st.integers(0, 1000),
)
def test_class_split_gives_exactly_k_classes_and_uses_everything(
    clients: int, classes: int, k: int, extra: int, seed: int
) -> None:
    """With enough samples: k distinct classes a client, each class held about equally often and shared evenly."""
    samples = balanced(clients + extra, classes)
    assert samples.labels is not None
    partition = ClassSplit(k)
    if k > classes or clients * k < classes:
        with pytest.raises(ConfigError, match=r"partition\.classes_per_client"):
            partition.table(samples, clients, seed)
        return
    table = partition.table(samples, clients, seed)
    assert len(table.order) == samples.count
    counts = np.stack([np.bincount(samples.labels[p], minlength=classes) for p in parts_of(table)])
    assert ((counts > 0).sum(1) == k).all()
    assert np.ptp((counts > 0).sum(0)) <= 1
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1


@pytest.mark.parametrize("form", ["classes", "shards", "blocks"])
def test_class_split_hands_out_samples_of_a_class_in_random_order(form: str) -> None:
    """Every sample of one class is as likely to be a client's as another: among 400 of it, split in two, the numbers of
    the first client's 200 differ between seeds, and their mean lies about the middle, by 5 σ."""
    samples = balanced(400, 1)
    firsts = [np.sort(parts_of(ClassSplit(1, form).table(samples, 2, seed))[0]) for seed in range(8)]
    assert len({tuple(first) for first in firsts}) == 8
    sigma = 400 / np.sqrt(12) / np.sqrt(200) * np.sqrt(0.5)  # of a mean over half of them, without replacement
    assert all(abs(first.mean() - 199.5) < 5 * sigma for first in firsts)


@pytest.mark.parametrize("form", ["classes", "shards"])
def test_class_split_deals_classes_to_random_clients(form: str) -> None:
    samples = balanced(40, 10)
    assert samples.labels is not None
    tables = [ClassSplit(1, form).table(samples, 10, seed) for seed in range(4)]
    held = [tuple(int(samples.labels[part][0]) for part in parts_of(table)) for table in tables]
    assert len(set(held)) == 4
    assert tuple(range(10)) not in held


def test_class_split_does_not_deal_in_the_order_of_the_clients() -> None:
    """Of four clients with one of two classes each, two hold either; dealt in order, the first two would differ."""
    samples = balanced(10, 2)
    assert samples.labels is not None
    tables = [ClassSplit(1).table(samples, 4, seed) for seed in range(12)]
    held = [[samples.labels[part][0] for part in parts_of(table)] for table in tables]
    assert {first == second for first, second, *_ in held} == {True, False}


def test_class_split_does_not_hand_out_fewer_classes_than_promised() -> None:
    """Two samples of a class cannot serve its five holders: an error, not clients with one class instead of two."""
    labels = np.array([0] * 2 + [1] * 50)
    table = table_or_error(ClassSplit(2), Samples(52, labels), 5, 0)
    if isinstance(table, str):
        assert "partition.classes_per_client" in table or "clients" in table
    else:
        assert [len(np.unique(labels[p])) for p in parts_of(table)] == [2] * 5


@SETTINGS
@given(clients=st.integers(1, 20), k=st.integers(1, 4), per_class=st.integers(8, 40), seed=st.integers(0, 1000))
def test_shards_are_contiguous_pieces_of_the_sorted_labels(clients: int, k: int, per_class: int, seed: int) -> None:
    """McMahan's way: k shards of almost equal size, each from neighbouring labels, everything used."""
    samples = balanced(per_class, 10)
    assert samples.labels is not None
    table = ClassSplit(k, "shards").table(samples, clients, seed)
    assert len(table.order) == samples.count
    shard, remainder = divmod(samples.count, clients * k)
    assert table.sizes.min() >= k * shard
    assert table.sizes.max() <= k * (shard + (remainder > 0))
    spanned = -(-(shard + (remainder > 0)) // per_class) + 1  # classes that one shard can touch
    assert all(len(np.unique(samples.labels[p])) <= k * spanned for p in parts_of(table))


def test_shards_that_divide_the_classes_hold_one_class_each() -> None:
    """The published setting: 100 clients, 200 shards, at most 2 digits a client."""
    samples = balanced(200, 10)
    assert samples.labels is not None
    table = ClassSplit(2, "shards").table(samples, 100, 0)
    assert (table.sizes == 20).all()
    assert all(len(np.unique(samples.labels[p])) <= 2 for p in parts_of(table))


@SETTINGS
@given(problem=problems(), k=st.integers(1, 4))
def test_blocks_are_slices_of_the_sorted_labels_dealt_in_turn(problem: tuple[Samples, int, int], k: int) -> None:
    """As the authors' program walks through the sorted labels: k times over all clients, a slice for each."""
    samples, clients, seed = problem
    assert samples.labels is not None
    table = table_or_error(ClassSplit(k, "blocks"), samples, clients, seed)
    if isinstance(table, str):
        assert samples.count < clients * k
        return
    held: list[list[int]] = [[] for _ in range(clients)]
    at, size, by_label = 0, samples.count // (clients * k), np.sort(samples.labels)
    for _ in range(k):
        for client in range(clients):
            held[client] += by_label[at : at + size].tolist()
            at += size
    assert [samples.labels[part].tolist() for part in parts_of(table)] == held


def test_blocks_of_ten_equal_classes_pair_each_with_the_fifth_after_it() -> None:
    """100 clients and k = 2: client i holds classes ⌊i/20⌋ and ⌊i/20⌋ + 5; other samples of them for other seeds."""
    samples = balanced(200, 10)
    assert samples.labels is not None
    tables = [ClassSplit(2, "blocks").table(samples, 100, seed) for seed in (0, 1)]
    assert [np.unique(samples.labels[p]).tolist() for p in parts_of(tables[0])] == [
        [i // 20, i // 20 + 5] for i in range(100)
    ]
    assert (tables[0].order != tables[1].order).any()


@SETTINGS
@given(problem=problems(), alpha=st.sampled_from([1e-6, 0.01, 0.1, 1.0, 100.0]))
def test_dirichlet_equal_is_equal(problem: tuple[Samples, int, int], alpha: float) -> None:
    """⌊N/m⌋ samples each, whatever the labels and however skewed the mixes: no class ever runs dry for good."""
    samples, clients, seed = problem
    assert (Dirichlet(alpha, "equal").table(samples, clients, seed).sizes == samples.count // clients).all()


@pytest.mark.parametrize("form", ["proportional", "per_class"])
@SETTINGS
@given(problem=problems(), alpha=st.sampled_from([0.1, 0.5, 5.0]), least=st.integers(1, 5))
def test_dirichlet_forms_that_share_out_classes_use_everything(
    form: str, problem: tuple[Samples, int, int], alpha: float, least: int
) -> None:
    samples, clients, seed = problem
    table = table_or_error(Dirichlet(alpha, form, min_size=least, attempts=20), samples, clients, seed)
    if isinstance(table, str):
        assert "partition.min_size" in table
        assert "clients" in table
        return
    assert len(table.order) == samples.count
    assert table.sizes.min() >= least


@pytest.mark.parametrize("form", ["proportional", "per_class"])
def test_dirichlet_keeps_the_first_draw_whose_smallest_share_is_min_size(form: str) -> None:
    """A split whose smallest share is exactly what is asked for is kept, and one that lacks a sample is drawn again."""
    samples = balanced(60, 5)
    first = Dirichlet(1.0, form).table(samples, 6, 3)
    least = int(first.sizes.min())
    assert least > 1
    assert np.array_equal(Dirichlet(1.0, form, min_size=least, attempts=1).table(samples, 6, 3).order, first.order)
    with pytest.raises(ConfigError, match=rf"partition\.min_size={least + 1} in 1 draws"):
        Dirichlet(1.0, form, min_size=least + 1, attempts=1).table(samples, 6, 3)
    assert Dirichlet(1.0, form, min_size=least + 1).table(samples, 6, 3).sizes.min() > least


def test_dirichlet_refuses_min_size_only_where_there_are_too_few_samples() -> None:
    assert (Dirichlet(100.0, "equal", min_size=5).table(balanced(10, 2), 4, 0).sizes == 5).all()
    with pytest.raises(ConfigError, match=r"clients=4 × partition\.min_size=6 exceeds the 20 samples"):
        Dirichlet(100.0, "equal", min_size=6).table(balanced(10, 2), 4, 0)


@pytest.mark.parametrize("seed", range(5))
def test_small_shares_of_a_class_are_cut_before_it_is_shared_out(seed: int) -> None:
    """The authors' program, client by client: ν_{i,c} N/m below the cut is 0, then each class goes to who is left."""
    samples, clients, cut = balanced(60, 5), 12, 8
    assert samples.labels is not None
    partition = Dirichlet(0.2, "proportional", min_of_class=cut)
    table = partition.table(samples, clients, seed)
    mixes = np.exp(log_dirichlet(0.2, clients, 5, rng.generator(seed, rng.Purpose.PARTITION)))
    held = np.stack([np.bincount(samples.labels[p], minlength=5) for p in parts_of(table)])
    for c in range(5):
        wanted = [mixes[i, c] if mixes[i, c] * samples.count / clients >= cut else 0.0 for i in range(clients)]
        expected = [60 * w / sum(wanted) for w in wanted]
        assert (held[:, c][np.array(wanted) == 0] == 0).all()
        np.testing.assert_allclose(held[:, c], expected, atol=1)
    assert (held > 0).sum() < (mixes * 60 >= 0.5).sum()  # uncut, more clients hold some of a class


def test_a_class_that_nobody_wants_enough_of_is_left_out() -> None:
    """Two clients, a hundred classes of two: of 100 samples nobody wants more than 60 of one class but by accident."""
    samples = balanced(2, 100)
    table = Dirichlet(0.02, "proportional", min_of_class=60).table(samples, 2, 0)
    assert 0 < len(table.order) < samples.count


@pytest.mark.parametrize("form", ["equal", "proportional", "per_class"])
def test_a_smaller_alpha_is_more_skewed(form: str) -> None:
    """The average largest class share of a client falls from nearly 1 to nearly 1/C as α grows."""
    samples = balanced(300, 10)
    assert samples.labels is not None
    largest = [
        Dirichlet(alpha, form).table(samples, 10, 0).class_fractions(samples.labels, 10).max(1).mean()
        for alpha in (0.05, 1.0, 100.0)
    ]
    assert largest[0] > largest[1] + 0.1
    assert largest[1] > largest[2] + 0.1
    assert largest[0] > 0.5
    assert largest[2] < 0.2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["equal", "proportional", "per_class"])
@pytest.mark.parametrize("alpha", [1e-4, 0.1])
def test_dirichlet_clients_are_exchangeable(form: str, alpha: float) -> None:
    """ν_i are independent and alike, so no position is favoured: each client's mean share is 1/m within 5 σ."""
    clients, draws = 4, 300
    samples = balanced(20, 10)
    sizes = np.stack([Dirichlet(alpha, form).table(samples, clients, seed).sizes for seed in range(draws)])
    share = sizes / samples.count
    error = np.sqrt(share.var(0).mean() / draws)
    assert (np.abs(share.mean(0) - 1 / clients) <= 5 * error + 1e-12).all(), share.mean(0)


def test_dirichlet_equal_clients_are_equally_skewed() -> None:
    """Classes run out for whoever is served last, so nobody may always be: alike at every position, within 5 σ."""
    samples, draws = balanced(50, 10), 150
    assert samples.labels is not None
    largest = np.stack(
        [Dirichlet(1.0).table(samples, 20, seed).class_fractions(samples.labels, 10).max(1) for seed in range(draws)]
    )
    error = largest.std() / np.sqrt(draws)
    assert (np.abs(largest.mean(0) - largest.mean()) < 5 * error).all(), largest.mean(0)


def test_dirichlet_per_class_shares_have_dirichlet_moments() -> None:
    """A class's share at a client has mean 1/m and variance (1/m)(1 − 1/m)/(mα + 1)."""
    clients, alpha, draws = 5, 1.0, 400
    samples = balanced(1000, 2)
    assert samples.labels is not None
    shares = []
    for seed in range(draws):
        parts = Dirichlet(alpha, "per_class").split(samples, clients, rng.generator(seed, rng.Purpose.PARTITION))
        shares.append([np.bincount(samples.labels[p], minlength=2) / 1000 for p in parts])
    drawn = np.array(shares)
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    n = drawn.size
    assert abs(drawn.mean() - 1 / clients) < 1e-9
    assert abs(((drawn - 1 / clients) ** 2).mean() - variance) < 5 * np.sqrt(5 * variance**2 / n)


@pytest.mark.parametrize("form", ["proportional", "per_class"])
def test_a_minimum_that_is_hardly_ever_met_ends_after_the_agreed_attempts(form: str) -> None:
    """Ten samples for each of ten clients, with α = 0.01: one error after 7 draws, which says how to go on."""
    draw = Counting()
    with pytest.raises(ConfigError, match=r"partition\.min_size=10 in 7 draws.*partition\.alpha.*clients"):
        Dirichlet(0.01, form, min_size=10, attempts=7).split(balanced(10, 10), 10, draw)
    assert draw.draws == 7


@pytest.mark.parametrize("form", ["equal", "proportional", "per_class"])
def test_a_minimum_that_the_data_cannot_meet_is_refused_at_once(form: str) -> None:
    with pytest.raises(ConfigError, match=r"clients=10 × partition\.min_size=11 exceeds the 100 samples"):
        Dirichlet(1.0, form, min_size=11).table(balanced(10, 10), 10, 0)


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: Dirichlet(alpha=0.0), "alpha=0"),
        (lambda: Dirichlet(alpha=-1.0), "alpha=-1"),
        (lambda: Dirichlet(alpha=float("nan")), "alpha=nan"),
        (lambda: Dirichlet(form="equals"), "form='equals'.*did you mean 'equal'"),
        (lambda: Dirichlet(min_size=0), "min_size=0"),
        (lambda: Dirichlet(attempts=0), "attempts=0"),
        (lambda: Dirichlet(form="equal", min_of_class=10), "min_of_class=10.*form=equal"),
        (lambda: Dirichlet(form="proportional", min_of_class=-1), "min_of_class=-1"),
        (lambda: ClassSplit(0), "classes_per_client=0"),
        (lambda: ClassSplit(1.5), "classes_per_client=1.5"),
        (lambda: ClassSplit(form="shard"), "form='shard'.*did you mean 'shards'"),
    ],
)
def test_impossible_settings_name_their_key(build: Callable[[], Partition], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        build()
