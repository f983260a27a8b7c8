"""What a local step is made of: shift, decay, clipping, ridge, rates, cohorts, precision."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from ways_of_running import (
    BATCH,
    SIZES,
    WAYS,
    Dropping,
    batches_of,
    double,
    everyone,
    labelled,
    ragged,
    same,
    simulation_of,
    train,
)

from fedsim import Execution
from fedsim.core import ConfigError
from fedsim.data.datasets import GaussianMean
from fedsim.data.samples.work import Workload
from fedsim.local import SGD, Inverse, InverseSqrt, PerFedAvg
from fedsim.models import MLP, Linear, Mean
from fedsim.shift import Location
from fedsim.trainer.rates import rate_and_step_totals
from fedsim.trainer.shifted_batches import ShiftedBatches


@pytest.mark.sampled(4)
@pytest.mark.parametrize("deploy", ["step", "round"])
@pytest.mark.parametrize("way", [way for way in WAYS if "fused" not in way])
def test_a_location_shift_moves_the_samples_by_the_deployed_model(way, deploy):
    """θ ← θ − η (θ − mean(z + ε_i θ')), θ' the client's own current θ or the server's; no gradient through ε_i θ'."""
    epsilons = np.linspace(-0.5, 0.9, len(SIZES))
    simulation = simulation_of(
        GaussianMean(clients=len(SIZES)),
        Mean,
        SGD(lr=0.2, steps=4, batch_size=6, schedule=InverseSqrt(period=1.0)),
        shift=Location(epsilons=epsilons.tolist(), deploy=deploy),
        execution=WAYS[way],
    )
    cohort = everyone(simulation)
    report = train(simulation, cohort, t=3)
    lr = 0.2 / 2  # 0.2 / √(3 / 1 + 1)
    for row in range(len(cohort)):
        theta, losses = float(report.start[row]), []
        client, replicate = row % len(SIZES), row // len(SIZES)
        for batch in batches_of(simulation, cohort, 3, row):
            answered = theta if deploy == "step" else (1.0, 2.0)[replicate]
            z = batch["x"].numpy() + epsilons[client] * answered
            losses.append(0.5 * np.mean((theta - z) ** 2))
            theta -= lr * np.mean(theta - z)
        assert report.end[row].item() == pytest.approx(theta, abs=1e-10)
        assert report.loss[row].item() == pytest.approx(np.mean(losses), abs=1e-10)
    torch.testing.assert_close(report.lr, torch.full((2,), lr, dtype=torch.float64))
    assert report.samples.sum() == len(cohort) * 4 * 6


@pytest.mark.parametrize(
    ("way", "clip"),
    [*itertools.product(["vmap", "loop"], [None, 0.05, 1e3]), ("fused", None), ("fused in chunks", None)],
)
def test_weight_decay_and_clipping_follow_their_formula(way, clip, regression_of, Regression):
    """x ← x − η (min(1, c/‖g‖) g + λ x): the gradient of the loss is clipped, the decay is not."""
    dataset = regression_of(SIZES)
    rule = SGD(lr=0.1, steps=3, batch_size=None, weight_decay=0.3, clip=clip)
    simulation = simulation_of(dataset, Regression, rule, execution=WAYS[way])
    report = train(simulation)
    features, targets, owners = (v.numpy() for v in (dataset.train_x, dataset.train_y, dataset.owners))
    norms = []
    for row, start in enumerate(report.start.numpy()):
        own, x = owners == row % len(SIZES), start.copy()
        for _ in range(3):
            error = features[own] @ x[:-1] + x[-1] - targets[own]
            g = np.append(features[own].T @ error, error.sum()) / own.sum()
            norms.append(np.linalg.norm(g))
            g = g if clip is None else g * min(1.0, clip / norms[-1])
            x = x - 0.1 * (g + 0.3 * x)
        np.testing.assert_allclose(report.end[row], x, atol=1e-9)
    assert clip != 0.05 or min(norms) > clip


def test_a_ridge_is_part_of_the_objective():
    """Its gradient is that of weight decay, and its value is in the reported loss."""
    rule = {"lr": 0.1, "steps": 1, "batch_size": None}
    ridge = train(simulation_of(labelled(), Linear, SGD(**rule), ridge=0.4))
    decay = train(simulation_of(labelled(), Linear, SGD(weight_decay=0.4, **rule)))
    torch.testing.assert_close(ridge.end, decay.end, rtol=0, atol=1e-12)
    penalty = 0.2 * ridge.start.square().sum(1)
    torch.testing.assert_close(ridge.loss, decay.loss + penalty, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", ["vmap", "loop"])
def test_rows_may_carry_more_than_parameters(way):
    """A 'correction' in the carry is added to every gradient, and comes back with the report."""
    simulation = simulation_of(labelled(), Linear, SGD(lr=0.1, steps=1, batch_size=None), execution=WAYS[way])
    cohort, plain = everyone(simulation), train(simulation)
    correction = torch.cos(torch.arange(plain.start.numel(), dtype=torch.float64)).reshape_as(plain.start)
    start = {"params": plain.start, "correction": correction}
    report = simulation.trainer.run(start, cohort, 2, plain.start[:2])
    torch.testing.assert_close(report.end, plain.end - 0.1 * correction, rtol=0, atol=1e-12)
    torch.testing.assert_close(report.carry["correction"], correction)


def test_every_replicate_may_have_its_own_learning_rate():
    dataset = labelled()

    def end(seeds, lr):
        return train(simulation_of(dataset, Linear, SGD(lr=lr, steps=3, batch_size=BATCH), seeds=seeds))

    both = end((3, 5), [0.1, 0.4])
    m = len(SIZES)
    first = end((3, 5), 0.1)
    second = end((3, 5), 0.4)
    torch.testing.assert_close(both.end[:m], first.end[:m])
    torch.testing.assert_close(both.end[m:], second.end[m:])
    torch.testing.assert_close(both.lr, torch.tensor([0.1, 0.4], dtype=torch.float64))
    assert not torch.allclose(first.end[m:], second.end[m:])


@pytest.mark.parametrize("way", WAYS)
def test_nobody_and_a_single_client_are_cohorts_too(way):
    simulation = simulation_of(labelled(), Linear, SGD(lr=0.1, epochs=1, batch_size=BATCH), execution=WAYS[way])
    federation = simulation.federation
    full = train(simulation)
    nobody = federation.make_cohort(np.zeros((2, len(SIZES))), np.ones((2, len(SIZES))))
    report = train(simulation, nobody)
    assert report.end.shape == report.innovation.shape == (0, simulation.model.dimension)
    assert report.loss.shape == report.lr_sum.shape == (0,)
    assert report.samples.sum() == 0
    for row in (0, 2, len(SIZES) + 1):
        counts = np.zeros(2 * len(SIZES))
        counts[row] = 1
        only = train(simulation, federation.make_cohort(counts.reshape(2, -1), np.ones((2, len(SIZES)))))
        torch.testing.assert_close(only.end[0], full.end[row], rtol=0, atol=1e-12)
        torch.testing.assert_close(only.loss[0], full.loss[row], rtol=0, atol=1e-12)
    lonely = simulation_of(labelled((7,)), Linear, SGD(lr=0.1, steps=2, batch_size=3), clients=1, execution=WAYS[way])
    assert train(lonely).end.shape == (2, lonely.model.dimension)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("schedule", [None, Inverse(offset=3.0)], ids=["constant", "inverse"])
@pytest.mark.parametrize("way", WAYS)
def test_who_else_takes_part_does_not_matter(way, schedule):
    """Any subset of rows trains as it does within the whole federation; a schedule counts the row's own steps."""
    rule = SGD(lr=0.1, epochs=2, batch_size=BATCH, schedule=schedule)
    simulation = simulation_of(labelled(), Dropping, rule, execution=WAYS[way])
    full = train(simulation)
    counts = np.array(SIZES) < [[5], [4]]  # without the largest, which take the most steps
    some = simulation.federation.make_cohort(counts, np.ones(counts.shape))
    report = train(simulation, some)
    torch.testing.assert_close(report.end, full.end[some.rows], rtol=0, atol=1e-12)
    torch.testing.assert_close(report.loss, full.loss[some.rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_single_precision_agrees_to_its_own_accuracy(way):
    rule = SGD(lr=0.1, epochs=2, batch_size=BATCH, drop_last=False)
    execution = dataclasses.replace(WAYS[way], dtype="float32")
    single = train(simulation_of(labelled(), Linear, rule, execution=execution))
    double = train(simulation_of(labelled(), Linear, rule))
    assert single.end.dtype == single.loss.dtype == torch.float32
    torch.testing.assert_close(single.end.double(), double.end, rtol=0, atol=1e-5)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_worker_threads_leave_the_callers_settings_as_they_were():
    random = torch.get_rng_state()
    train(ragged("mlp", double("loop", workers=3)))
    assert torch.get_num_threads() == 2
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_rounds_the_model_and_keeps_rows_in_float32(way):
    """Within 8 bits of mantissa of float32 after a few steps, and not the same."""
    rule = SGD(lr=0.1, steps=3, batch_size=BATCH)
    model = functools.partial(MLP, hidden=(5,))
    full, rounded = (
        train(simulation_of(labelled(), model, rule, execution=execution))
        for execution in (dataclasses.replace(WAYS[way], dtype="float32", precision=p) for p in ("full", "bf16"))
    )
    assert rounded.end.dtype == rounded.loss.dtype == torch.float32
    assert 0 < (rounded.end - full.end).abs().max() < 2**-8
    assert (rounded.loss - full.loss).abs().max() < 2**-5


def test_precisions_that_do_not_exist_here_are_refused():
    with pytest.raises(ConfigError, match=r"trainer\.precision=tf32 needs a GPU"):
        simulation_of(labelled(), Linear, SGD(), execution=Execution(precision="tf32", device="cpu"))
    with pytest.raises(ConfigError, match=r"trainer\.precision=bf16 is for trainer\.dtype=float32"):
        simulation_of(labelled(), Linear, SGD(), execution=double(precision="bf16"))
    with pytest.raises(ConfigError, match=r"trainer\.compile=default is for trainer\.executor=vmap, not loop"):
        simulation_of(labelled(), Linear, SGD(), execution=double("loop", compile="default"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_is_the_step(mode):
    """Rows of unequal steps and sizes, so that shapes change on the way."""
    model = functools.partial(MLP, hidden=(5,))
    rule = SGD(lr=0.1, epochs=2, batch_size=BATCH, drop_last=False, weight_decay=0.1)
    compiled = simulation_of(labelled(), model, rule, execution=double(compile=mode))
    same(train(compiled), train(simulation_of(labelled(), model, rule)))


def test_a_rule_that_weighs_no_gradients_says_so_in_an_empty_round_too():
    """So that rows of several rounds have the same parts."""
    rule, rates = PerFedAvg(steps=2, keep_inner=True), torch.zeros(0, 0)
    nothing = Workload(*(np.zeros(0, dtype=np.int64) for _ in range(4)), short_last=False)
    assert rate_and_step_totals(rule, rates, nothing)[1] is None
    assert rate_and_step_totals(SGD(steps=2), rates, nothing)[1].shape == (0,)


def test_rates_count_as_often_as_the_rule_weighs_its_gradients():
    """A rule whose steps count twice, which is no plain descent although all weights are equal."""

    class Doubled(SGD):
        def gradient_weight(self, k):
            return 2.0

    rates = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    load = Workload(np.full(2, 2), np.full(2, 2), np.full(2, 2), np.full(2, 2), short_last=False)
    total, weighted_total, steps = rate_and_step_totals(Doubled(steps=2), rates, load)
    torch.testing.assert_close(total, torch.tensor([0.4, 0.6]))
    torch.testing.assert_close(weighted_total, 2 * total)
    assert steps.tolist() == [2, 2]


class Exploring(SGD):
    """Deploys a model beside the one that it trains."""

    def deploys(self, carry):
        return carry["params"] + carry["offset"]


@pytest.mark.parametrize(("rule", "deployed"), [(SGD, [1.0, 2.0]), (Exploring, [1.5, 2.5])])
def test_data_react_to_the_model_that_the_rule_deploys_unless_the_server_deployed_one(rule, deployed):
    carry = {"params": torch.tensor([1.0, 2.0]), "offset": torch.tensor(0.5)}
    answer = ShiftedBatches(rule(), Location(0.5), rows=False)
    new_carry, theta = answer(carry, None)
    assert theta.tolist() == deployed
    assert new_carry["params"].tolist() == [1.0, 2.0]  # from which training goes on
    assert answer(carry, torch.tensor([7.0, 7.0]))[1].tolist() == [7.0, 7.0]
