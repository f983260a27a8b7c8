"""Planted samples: as many as asked, in the clients asked for, of the law asked for, and untouched by the shift."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.core import ConfigError
from fedsim.data.contamination import FeatureNoise, Gaussian, LabelFlip, NoContamination, Point
from fedsim.data.datasets import Dataset, Digits, GaussianMean, HousePrices, PricingGroups
from fedsim.local import SGD
from fedsim.models import Linear, Mean
from fedsim.shift import Contribution, Location

M, B = 6, 500


def many(classes: int = 4) -> Dataset:
    """Every client holds 500 samples of its own."""
    draw = np.random.default_rng(0)
    x = torch.as_tensor(draw.standard_normal((M * B, 3)))
    y = torch.as_tensor(draw.integers(0, classes, M * B))
    return Dataset("many", x, y, classes=classes, owners=torch.arange(M).repeat_interleave(B))


double = functools.partial(Execution, dtype="float64", trial=False)


class Recording(SGD):
    """Keeps the chunks it was shown."""

    batched = True

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def step(self, carry, batch, lr, objective):
        self.seen.append(batch)
        return carry, carry["params"].sum(1) * 0


def met(rotten, dataset=None, model=Linear, t=0, steps=2, size=None, **options) -> list[dict[str, torch.Tensor]]:
    """All samples of every step, contaminated and shifted."""
    rule = Recording(steps=steps, batch_size=size or B)
    simulation = Simulation(
        dataset or many(), model, clients=M, local=rule, contamination=rotten, **{"execution": double()} | options
    )
    cohort = simulation.federation.make_cohort(np.ones((1, M)), np.ones((1, M)))
    start = simulation.initial_state().model
    simulation.trainer.run(cohort.broadcast(start), cohort, t, start)
    return simulation.trainer.local_rule.seen


KINDS = {
    "gaussian": lambda **o: Gaussian(mean=7.0, std=2.0, **o),
    "point": lambda **o: Point(value=-3.0, **o),
    "label_flip": LabelFlip,
    "feature_noise": lambda **o: FeatureNoise(std=2.0, **o),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fraction", [0.1, 0.4])
def test_what_is_planted_is_marked_and_follows_its_law(kind, fraction):
    """Counts, means and variances to 5 σ; genuine samples are the client's own, entry by entry."""
    clean, rotten = met(None)[0], met(KINDS[kind](fraction=fraction, clients=[1, 4]))[0]
    contaminated = rotten["contaminated"]
    assert not contaminated[[0, 2, 3, 5]].any()
    assert "contaminated" not in clean
    count = contaminated[[1, 4]].sum().item()
    assert abs(count - 2 * B * fraction) < 5 * math.sqrt(2 * B * fraction * (1 - fraction))
    for entry in ("x", "y"):
        assert torch.equal(rotten[entry][~contaminated], clean[entry][~contaminated])
    x, before = rotten["x"][contaminated], clean["x"][contaminated]
    y, label = rotten["y"][contaminated], clean["y"][contaminated]
    n = x.numel()
    if kind == "label_flip":
        assert torch.equal(x, before)
        turned = (y - label) % 4
        assert set(turned.tolist()) == {1, 2, 3}
        for step in (1, 2, 3):
            assert abs((turned == step).sum().item() - count / 3) < 5 * math.sqrt(count * 2 / 9)
        return
    assert torch.equal(y, label)
    if kind == "point":
        assert (x == -3.0).all()
        return
    noise = x - before if kind == "feature_noise" else x - 7.0
    assert abs(noise.mean().item()) < 5 * 2 / math.sqrt(n)
    assert abs(noise.square().mean().item() - 4) < 5 * 4 * math.sqrt(2 / n)
    if kind == "gaussian":  # nothing is left of the genuine sample
        assert abs((noise * before).mean().item()) < 5 * 2 / math.sqrt(n)


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.25, 125), (0.333, 167), (0.401, 201), (1.0, 500)])
def test_an_exact_fraction_is_a_count_and_chance_decides_which(fraction, count):
    """⌊500 ϵ + ½⌋ of every batch; a place is taken as often in one batch as in any other, to 5 σ over 12 batches."""
    first, second = met(Point(fraction=fraction, exact=True))
    masks = torch.cat([first["contaminated"], second["contaminated"]])
    assert masks.sum(1).tolist() == [count] * 12
    halves = masks[:, : B // 2].sum().item()
    share = count / B
    assert abs(halves - 6 * count) <= 5 * math.sqrt(3 * B * share * (1 - share)) * (share > 0)
    assert len({tuple(row) for row in masks.tolist()}) == (12 if 0 < share < 1 else 1)


def test_padding_is_not_counted_among_an_exact_fraction():
    """Clients hold 3, 7 and 20 samples in batches of up to 20: ⌊0.3 n + ½⌋ = 1, 2 and 6."""
    owners = torch.arange(3).repeat_interleave(torch.tensor([3, 7, 20]))
    data = Dataset("ragged", torch.ones(30, 1), torch.zeros(30).long(), classes=2, owners=owners)
    rule = Recording(steps=1, batch_size=None)
    simulation = Simulation(
        data,
        Linear,
        clients=3,
        local=rule,
        contamination=LabelFlip(fraction=0.3, exact=True),
        execution=Execution(trial=False),
    )
    cohort = simulation.federation.make_cohort(np.ones((1, 3)), np.ones((1, 3)))
    start = simulation.initial_state().model
    simulation.trainer.run(cohort.broadcast(start), cohort, 0, start)
    (batch,) = simulation.trainer.local_rule.seen
    real = batch["weight"] > 0
    counts = zip(real.sum(1).tolist(), (batch["contaminated"] & real).sum(1).tolist(), strict=True)
    assert set(counts) == {(3, 1), (7, 2), (20, 6)}
    assert not (batch["contaminated"] & ~real).any()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_rounds_clients_and_seeds_are_planted_afresh_and_the_same_again(kind):
    def masks(**options):
        return [tuple(map(tuple, b["contaminated"].tolist())) for b in met(KINDS[kind](fraction=0.3), **options)]

    runs = [masks(), masks(t=1), masks(seeds=(9,))]
    rows = [row for run in runs for step in run for row in step]
    assert len(set(rows)) == len(rows) == 3 * 2 * M
    assert masks() == runs[0]
    assert masks(execution=double("vmap", chunk=2))[0] == runs[0][0][:2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_samples_fate_does_not_depend_on_the_batch_size(kind):
    """The first 20 of a batch of 40 meet what a batch of 20 meets (a stream's samples are the same, too)."""
    data = many() if kind == "label_flip" else GaussianMean(M)
    if kind == "label_flip":
        data = Dataset("one", torch.ones(M * B, 1), torch.ones(M * B).long(), classes=4, owners=data.owners)
    model = Linear if kind == "label_flip" else Mean
    small, large = (met(KINDS[kind](fraction=0.5), data, model, size=n)[0] for n in (20, 40))
    for entry in ("x", "contaminated", *(["y"] if kind == "label_flip" else [])):
        assert torch.equal(large[entry][:, :20], small[entry])


def test_foreign_samples_do_not_answer_the_model():
    """Huber: D̃_i(θ) = (1 − ϵ) D_i(θ) + ϵ Q_i. Genuine samples move by ε_i θ, the others stay where Q put them."""
    shift, rotten = Location(0.5), Point(value=-3.0, fraction=0.4)
    start = functools.partial(Mean, start=8.0)
    (moved,) = met(rotten, GaussianMean(M), start, steps=1, size=50, shift=shift)
    (still,) = met(rotten, GaussianMean(M), start, steps=1, size=50)
    assert torch.equal(moved["contaminated"], still["contaminated"])
    assert (moved["x"][moved["contaminated"]] == -3.0).all()
    genuine = ~moved["contaminated"]
    torch.testing.assert_close(moved["x"][genuine], still["x"][genuine] + 0.5 * 8.0)


def test_importance_weights_of_replaced_samples_do_not_count():
    shift, rotten = Contribution("loss"), FeatureNoise(fraction=0.4)
    start = functools.partial(torch.nn.Linear, 3, 4)
    (batch,) = met(rotten, many(), start, steps=1, shift=shift)
    assert (batch["weight"][batch["contaminated"]] == 1).all()
    assert not (batch["weight"][~batch["contaminated"]] == 1).any()
    (mixed,) = met(Point(fraction=0.4), PricingGroups(M), Mean, steps=1, size=50, shift=Contribution())
    assert (mixed["x"][mixed["contaminated"]] == 10.0).all()


def test_targets_of_a_regression_may_be_planted():
    (batch,) = met(Point(value=99.0, entry="y", fraction=0.3), HousePrices(M), steps=1, size=50)
    assert ((batch["y"] == 99.0) == batch["contaminated"]).all()
    (noisy,) = met(Gaussian(mean=50.0, std=0.1, entry="y", fraction=0.3), HousePrices(M), steps=1, size=50)
    assert ((noisy["y"] > 49) == noisy["contaminated"]).all()


def test_nobody_contaminated_is_no_contamination():
    ends = []
    for rotten in (NoContamination(), None, LabelFlip(fraction=0.0)):
        simulation = Simulation(many(), Linear, clients=M, contamination=rotten, rounds=2, local=SGD(steps=2))
        ends.append(simulation.run().state.model)
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert not torch.equal(Simulation(many(), Linear, clients=M, contamination=LabelFlip(fraction=1.0), rounds=2,
                                      local=SGD(steps=2)).run().state.model, ends[0])  # fmt: skip


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: met(LabelFlip(), GaussianMean(M), Mean, size=4), "contamination=label_flip needs classes"),
        (lambda: met(Gaussian(entry="y"), Digits()), r"contamination\.entry=y needs real-valued targets"),
        (lambda: met(Gaussian(entry="z"), Digits()), r"entry='z' is unknown"),
        (lambda: met(Point(clients=[6])), r"contamination\.clients names client 6, but clients=6 end at 5"),
        (lambda: Point(fraction=1.2), r"fraction=1\.2 must lie between 0 and 1"),
        (lambda: FeatureNoise(std=-1.0), r"std"),
    ],
)
def test_what_cannot_be_planted_is_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_planted_normals_depend_on_all_bits_of_a_key():
    """Keys have 64 bits; clients whose keys differ in the upper half only have numbers of their own."""
    keys = torch.tensor([5, 5 + (1 << 32), 5, 6])
    numbers = Gaussian.normals(keys, torch.zeros(4, 3, 2, dtype=torch.float64))
    assert torch.equal(numbers[0], numbers[2])
    assert len(numbers.flatten(1)[[0, 1, 3]].unique()) == 3 * 3 * 2
