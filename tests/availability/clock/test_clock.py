"""The virtual clock: what clients take, when a round is over, who is late; and clients that do part of the work."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from timed import FULL, QUIET, SEEDS, column, run_of

from fedsim import ConfigError, EvaluationOptions, Execution, Simulation
from fedsim.availability import Bernoulli, Full, UniformK
from fedsim.availability.clock import Devices, GrowingWork, UniformWork
from fedsim.availability.probabilities import Uniform
from fedsim.data.datasets import GaussianMean
from fedsim.local import DFO, SGD
from fedsim.local.schedules import Inverse, PerStep
from fedsim.models import Mean
from fedsim.shift import Location
from fedsim.strategies import FedAvg, FedAvgKnown, FedNova, FedPBC, Median, PFedAvg


def test_a_round_lasts_as_long_as_the_slowest_that_was_asked(build):
    """Full batches of n_i samples, 5 steps, 0.1 s a sample; 4 parameters of 8 bytes at 32 and 16 bytes a second."""
    counts = FULL.copy()
    counts[1:, 0, 2] = 0
    counts[2, 0] = 0  # nobody
    counts[3, 0] = (0, 1, 0, 0)
    clock = Devices(0.1, down=32.0, up=16.0, server=0.5)
    result = run_of(build(counts, clock=clock))
    lasts = [0, 5 * 8 * 0.1 + 3.5, 5 * 6 * 0.1 + 3.5, 0.5, 5 * 2 * 0.1 + 3.5, 6.5, 6.5]
    assert column(result, "virtual_seconds") == pytest.approx(np.cumsum(lasts))
    assert column(result, "virtual_seconds", SEEDS[1]) == pytest.approx(np.arange(7) * 7.5)
    assert column(result, "late_clients") == [0] * 7


def test_a_clock_that_leaves_nobody_out_changes_no_other_number(build):
    plain, timed = run_of(build()), run_of(build(clock=Devices(0.1, 0.7, 0.3, deadline=1e9, first=4)))
    assert "virtual_seconds" not in plain.history[0]
    for one, other in zip(plain.history, timed.history, strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {k: other[k] for k in one if k != "seconds"}


def test_who_misses_the_deadline_is_absent_and_the_round_lasts_until_then(build, Scripted, play):
    """Clients take 2, 1, 4 and 3 seconds."""
    cut = FULL.copy()
    cut[:, :, [2, 3]] = 0
    late, absent = (
        [played.after.model for played in play(build(counts, clock=clock))]
        for counts, clock in ((FULL, Devices(0.1, deadline=2.0)), (cut, None))
    )
    assert all(torch.equal(a, b) for a, b in zip(late, absent, strict=True))
    nobody = FULL.copy()
    nobody[2:] = 0
    result = run_of(build(nobody, clock=Devices(0.1, deadline=2.5)))
    assert column(result, "virtual_seconds") == [0, 2.5, 5, 7.5, 10, 12.5, 15]
    assert column(result, "late_clients") == [0, 2, 2, 0, 0, 0, 0]
    assert column(result, "active_clients") == [0, 2, 2, 0, 0, 0, 0]
    row = next(row for row in result.history if row["round"] == 2)
    assert (row["total_bytes_down"], row["total_bytes_up"]) == (2 * 4 * 32, 2 * 2 * 32)  # the late were sent the model


def test_of_those_that_were_asked_the_quickest_count(build, play):
    quick = FULL.copy()
    quick[:, :, [2, 3]] = 0
    first = build(clock=Devices(0.1, first=2))
    chosen, absent = ([p.after.model for p in play(one)] for one in (first, build(quick)))
    assert all(torch.equal(a, b) for a, b in zip(chosen, absent, strict=True))
    assert column(run_of(first), "virtual_seconds") == pytest.approx(np.arange(7) * 2.0)
    assert column(run_of(build(clock=Devices(0.1, first=3, deadline=2.5))), "virtual_seconds")[1] == 2.5


def test_a_group_of_clients_has_its_own_speed(build):
    times = build(clock=Devices([0.1, 1.0])).round_clock.clock.times(0, np.arange(8), 0, 0)
    assert times.sample.tolist() == [0.1, 0.1, 1.0, 1.0] * 2


def test_speeds_and_jitter_have_mean_and_spread(build):
    """10⁵ clients: means to 5 σ / √n of a log-normal law with this coefficient of variation."""

    class Many:
        seeds, clients = (5,), 100_000

    clock = Devices(2.0, compute_spread=0.5, jitter=0.3, down=4.0, link_spread=0.2)
    clock.setup(Many)
    fixed, moved = clock.sample, clock.times(3, np.arange(100_000), 8, 0)
    assert abs(fixed.mean() - 2) < 5 * 2 * 0.5 / math.sqrt(1e5)
    assert fixed.std() / fixed.mean() == pytest.approx(0.5, abs=0.02)
    ratio = moved.sample / fixed
    assert abs(ratio.mean() - 1) < 5 * 0.3 / math.sqrt(1e5)
    assert ratio.std() == pytest.approx(0.3, abs=0.02)
    assert not np.array_equal(clock.times(4, np.arange(100_000), 8, 0).sample, moved.sample)
    assert (8 / moved.link).mean() == pytest.approx(4.0, abs=0.02)


def test_pareto_speeds_have_their_tail(build):
    """P(X > x) = (x_m / x)^α with α = 1 + √(1 + 1/c²) and x_m = (α − 1) / α, which has mean 1 and CV c = ½."""

    class Many:
        seeds, clients = (5,), 100_000

    clock = Devices(2.0, compute_spread=0.5, compute_law="pareto")
    clock.setup(Many)
    alpha, speeds = 1 + math.sqrt(5), clock.sample / 2
    assert (1 / (alpha * (alpha - 2))) ** 0.5 == pytest.approx(0.5)
    least = (alpha - 1) / alpha
    assert speeds.min() == pytest.approx(least, rel=1e-3)
    for x in (0.8, 1.5, 4.0):
        tail = (least / x) ** alpha
        assert abs((speeds > x).mean() - tail) <= 5 * math.sqrt(tail * (1 - tail) / 1e5)
    alike = Devices(2.0, compute_law="pareto")
    alike.setup(Many)
    assert (alike.sample == 2).all()


def test_equal_times_add_up_to_rounds_times_t(build):
    result = run_of(build(clock=Devices(0.1), rule={"batch_size": 2}))
    assert column(result, "virtual_seconds") == pytest.approx(np.arange(7) * 5 * 2 * 0.1)


def test_known_probabilities_stay_true_under_a_deadline(build):
    """P(link + work · J ≤ D) by drawing J 4000 times, to 5 σ."""
    clock = Devices([0.1, 0.2], jitter=0.6, down=64.0, deadline=2.0)
    pace = build(UniformK(4), clock=clock).round_clock
    clock = pace.clock
    samples, virtual = np.tile([10.0, 5.0, 10.0, 20.0], 2), np.arange(8)
    found = clock.finish_probability(clock.times(0, virtual, 32, 0), virtual, samples)
    times = [clock.times(t, virtual, 32, 0) for t in range(4000)]
    drawn = np.mean([one.link + samples * one.sample <= 2.0 for one in times], axis=0)
    assert np.abs(drawn - found).max() < 5 * 0.5 / math.sqrt(4000)
    cohort = pace(build(FULL).federation.make_cohort(np.ones((2, 4)), np.full((2, 4), 0.5)), 0)
    load = pace.batches.load(cohort)
    wanted = (
        clock.finish_probability(
            clock.times(0, cohort.host_index.virtual_clients, 32, 32),
            cohort.host_index.virtual_clients,
            5 * load.num_samples,
        )
        / 2
    )
    assert np.allclose(cohort.host_index.probability, wanted)


def test_partial_work_is_what_there_is_time_for(build, play):
    """0.1 s a sample, 0.5 s for the link: of 1.75 s are left steps of 0.4, 0.2, 0.8, 0.6 s."""
    simulation = build(clock=Devices(0.1, down=64.0, deadline=1.75, late="partial"), strategy=FedNova())
    played = next(play(simulation))
    assert played.report.cohort.host_index.steps.tolist() == [3, 5, 1, 2] * 2
    assert played.report.samples.tolist() == [12, 10, 8, 12] * 2
    assert torch.allclose(played.report.lr_sum, 0.02 * torch.tensor([3.0, 5, 1, 2] * 2, dtype=torch.float64))
    assert simulation.round_clock.seconds == pytest.approx([1.7, 1.7])
    none = build(clock=Devices(0.1, deadline=0.5, late="partial"))
    assert next(play(none)).report.cohort.host_index.virtual_clients.tolist() == [0, 1, 4, 5]


LESS = {  # how a client comes to do a part of its five steps
    "random": ({"work": UniformWork(2)}, {2, 3, 4, 5}),
    "deadline": ({"clock": Devices(0.1, down=64.0, deadline=1.75, late="partial")}, {1, 2, 3, 5}),
}


@pytest.mark.parametrize(("how", "executor"), [("random", "vmap"), ("random", "loop"), ("random", "fused"),
                                               ("deadline", "vmap")])  # fmt: skip
def test_less_work_follows_the_formula_of_fednova(build, play, how, executor):
    """Naive: each client's own number of full-batch steps; x ← x − mean(a) mean(G / a). One round is empty, one for a
    replicate."""
    options, expected = LESS[how]
    counts = FULL.copy()
    counts[1] = [[1, 0, 1, 0], [0, 1, 1, 1]]
    counts[3], counts[4, 1] = 0, 0
    simulation = build(
        counts, strategy=FedNova(), execution=Execution(dtype="float64", executor=executor, chunk=3), **options
    )
    data, lr = simulation.dataset, 0.02
    x, y, owner = (v.numpy() for v in (data.train_x, data.train_y, data.owners))
    model, seen = None, set()
    for played in play(simulation):
        model = played.before.model.numpy() if model is None else model
        host = played.report.cohort.host_index
        assert len(host.rows) == counts[played.t].sum()
        seen |= set(host.steps.tolist())
        for r in range(2):
            gains, taken = [], []
            for row, steps in zip(host.rows, host.steps, strict=True):
                if row // 4 != r:
                    continue
                own, w = owner == row % 4, model[r].copy()
                for _ in range(steps):
                    error = x[own] @ w[:-1] + w[-1] - y[own]
                    gradient = np.append(x[own].T @ error, error.sum()) / own.sum()
                    w = w - lr * gradient
                gains.append((model[r] - w) / steps)
                taken.append(steps)
            if taken:
                model[r] = model[r] - np.mean(taken) * np.mean(gains, axis=0)
        np.testing.assert_allclose(played.after.model, model, atol=1e-10, rtol=0)
    assert seen == expected


def test_equal_steps_make_fednova_fedavg_and_unequal_ones_do_not(build, play):
    def last(strategy, least):
        return list(play(build(strategy=strategy, work=UniformWork(least))))[-1].after.model

    assert torch.allclose(last(FedNova(), 5), last(FedAvg(), 5), atol=1e-12)
    assert torch.equal(last(FedAvg(), 5), list(play(build()))[-1].after.model)
    assert not torch.allclose(last(FedNova(), 1), last(FedAvg(), 1), atol=1e-6)


def test_passes_are_drawn_whole_and_every_number_alike_often(build):
    pace = build(rule={"steps": None, "epochs": 3, "batch_size": 2}, work=UniformWork(1)).round_clock
    virtual, per_pass = np.arange(8), np.tile([2, 1, 4, 3], 2)
    cohort = pace.batches.federation.make_cohort(np.ones((2, 4)), np.ones((2, 4)))
    drawn = np.stack([pace.work_model.steps(t, virtual, pace.batches.load(cohort)) for t in range(500)])
    passes = drawn / per_pass
    assert set(np.unique(passes)) == {1.0, 2.0, 3.0}
    share = np.array([(passes == k).mean() for k in (1, 2, 3)])
    assert np.abs(share - 1 / 3).max() < 5 * math.sqrt(2 / 9 / passes.size)


def test_a_fraction_of_the_clients_straggles_and_draws_what_all_would_draw(build):
    """Stragglers do what they do where all are stragglers; their share is binomial, and none is one at fraction 0."""

    def drawn(fraction):
        pace = build(work=UniformWork(1, fraction)).round_clock
        cohort = pace.batches.federation.make_cohort(np.ones((2, 4)), np.ones((2, 4)))
        load = pace.batches.load(cohort)
        return np.stack([pace.work_model.steps(t, np.arange(8), load) for t in range(500)])

    everybody, some = drawn(1.0), drawn(0.25)
    straggling = some != 5
    assert (some[straggling] == everybody[straggling]).all()
    assert abs(straggling.mean() - 0.25 * 4 / 5) < 5 * math.sqrt(0.2 * 0.8 / some.size)
    assert (drawn(0.0) == 5).all()


def test_a_schedule_counts_the_steps_that_were_asked(build, play):
    rule = {"schedule": PerStep(0.9)}
    for played in play(build(rule=rule, work=UniformWork(1)), 3):
        steps = played.report.cohort.host_index.steps
        wanted = [0.02 * sum(0.9 ** (5 * played.t + k) for k in range(s)) for s in steps]
        assert played.report.lr_sum.tolist() == pytest.approx(wanted)


def test_replicates_alone_are_as_together(build):
    options = {"clock": Devices(0.1, 0.5, 0.5, deadline=2.0, late="partial"), "work": UniformWork()}
    both = run_of(build(**options))
    alone = run_of(build(FULL[:, 1:], seeds=SEEDS[1:], **options))
    for name in ("virtual_seconds", "late_clients", "samples"):
        assert column(both, name, SEEDS[1]) == column(alone, name, SEEDS[1])


def test_a_resumed_run_is_the_uninterrupted_one(build, tmp_path):
    def run(rounds, out, resume=False):
        clock = Devices(0.1, 0.5, 0.5, down=64.0, deadline=2.0)
        return run_of(build(clock=clock, work=UniformWork(), rounds=rounds), out=out, resume=resume)

    run(3, tmp_path / "a")
    resumed, whole = run(6, tmp_path / "a", resume=True), run(6, tmp_path / "b")
    drop = {"seconds"}
    assert [{k: v for k, v in row.items() if k not in drop} for row in resumed.history] == [
        {k: v for k, v in row.items() if k not in drop} for row in whole.history
    ]
    assert torch.equal(resumed.state.model, whole.state.model)


@pytest.mark.parametrize(("power", "numbers"), [(0.5, [1, 2, 2, 2, 3]), (1.0, [1, 2, 3, 4, 5]), (2.0, [1, 4, 6, 6, 6])])
def test_growing_work_is_lazy_deployment(power, numbers):
    """By hand: θ ← θ + 3/(8 + k) (10 + 0.9 θ' − θ), θ' the model at the start of the round and k its local step."""
    simulation = Simulation(
        GaussianMean(clients=1, means=[10.0], std=0.0), functools.partial(Mean, start=10.0), clients=1,
        local=SGD(lr=3.0, steps=6, batch_size=1, schedule=Inverse(8.0, "local_step")), work=GrowingWork(power),
        shift=Location(0.9, deploy="round"), rounds=5, execution=Execution(dtype="float64"),
        evaluation=EvaluationOptions(every=1),
    )  # fmt: skip
    theta, samples, gaps = 10.0, 0, []
    for number in numbers:
        deployed = theta
        for k in range(number):
            theta += 3 / (8 + k) * (10 + 0.9 * deployed - theta)
        samples += number
        gaps.append((samples, abs(theta - 100)))
    rows = simulation.run().history[1:]
    assert [row["samples"] for row in rows] == [samples for samples, _ in gaps]
    assert [row["distance_to_ps"] for row in rows] == pytest.approx([gap for _, gap in gaps], abs=1e-10)


def test_growing_work_counts_steps_and_not_epochs(build):
    with pytest.raises(ConfigError, match=r"work=growing counts local steps, and local_epochs=3; give local_steps"):
        build(rule={"steps": None, "epochs": 3, "batch_size": 2}, work=GrowingWork())


def test_local_steps_that_belong_together_are_not_divided(build):
    def whole(**options):
        return build(local=DFO(0.1, steps=4, batch_size=None), **options)

    partial = Devices(deadline=1.0, late="partial")
    for options in ({"work": UniformWork()}, {"clock": partial}):
        with pytest.raises(ConfigError, match="the local steps of local=DFO as configured belong together"):
            whole(**options)
    whole(clock=Devices(deadline=1.0))
    build(local=DFO(0.1, points=1, steps=4, batch_size=None), clock=partial)


def test_what_makes_no_sense_is_refused(build):
    with pytest.raises(ConfigError, match=r"clock\.first=5 exceeds clients=4"):
        build(clock=Devices(first=5))
    with pytest.raises(ConfigError, match=r"work\.least=6 exceeds local_steps=5"):
        build(work=UniformWork(6))
    with pytest.raises(ConfigError, match=r"late='wait' .*drop"):
        Devices(late="wait")
    with pytest.raises(ConfigError, match=r"clock\.compute has 5 groups, more than clients=4"):
        build(clock=Devices([0.1] * 5))
    with pytest.raises(ConfigError, match=r"counts the first clock\.first=2 that are done"):
        build(Bernoulli(Uniform(0.5)), strategy=FedAvgKnown(), clock=Devices(first=2))
    build(Bernoulli(Uniform(0.5)), strategy=FedAvgKnown(), clock=Devices(deadline=2.0))
    with pytest.raises(ConfigError, match=r"availability=full: under DeadlineAvailability"):
        build(Full(), strategy=PFedAvg(), clock=Devices(deadline=2.0))
    build(strategy=Median(), clock=Devices(deadline=2.0))
    with pytest.raises(ConfigError, match="FedPBC as configured lets clients compute that do not participate"):
        build(strategy=FedPBC(compute="all"), clock=Devices(deadline=1.0)).run(tracking=QUIET)
