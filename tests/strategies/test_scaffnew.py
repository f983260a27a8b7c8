"""Scaffnew against ProxSkip with a coin for every local step, and where it must be SCAFFOLD."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from library import Naive, everybody, points, with_
from naive_strategies import BY_DATA, CLIENTS, LRS, SEEDS, STEPS, UNIFORM

from fedsim import Execution
from fedsim.availability import Full
from fedsim.availability.clock import GeometricWork
from fedsim.core import ConfigError
from fedsim.local import SGD, PerStep
from fedsim.strategies import FedAvg, Scaffnew, Scaffold

DOUBLE = Execution(dtype="float64", executor="loop")


class NaiveScaffnew(Naive):
    """Rounds of fixed length; in a coarser form the coins decide, see below."""

    ratio, weights = 1 / STEPS, UNIFORM

    def begin(self):
        self.control = self.rows()

    def round(self, t, active):
        ends = {i: self.learner.train(i, self.model, t, correction=-self.control[i]) for i in active}
        if active:
            self.model = self.over(ends, self.weights)
        for i in active:
            self.control[i] = self.control[i] + self.ratio / self.learner.rates(t)[0] * (self.model - ends[i])


@pytest.mark.parametrize(
    ("strategy", "settings", "options"),
    [
        (Scaffnew(require_full=False), {}, {"counts": everybody()}),
        (Scaffnew(0.2, False), {"ratio": 0.2}, {"counts": everybody(), "schedule": "sqrt"}),
        (Scaffnew(0.2, False), {"ratio": 0.2}, {}),
        (Scaffnew(require_full=False, weighting="data"), {"weights": BY_DATA}, {}),
    ],
)
def test_every_round_follows_the_formula(strategy, settings, options, follows):
    """Also with an empty round and clients away: the control variates still sum to zero."""
    found = follows(strategy, with_(NaiveScaffnew, **settings), **options)
    weights = settings.get("weights", UNIFORM)
    for one in found:
        total = sum(w * h for w, h in zip(weights, one.control, strict=True))
        np.testing.assert_allclose(total, 0, atol=1e-10)


def test_with_everybody_and_a_fixed_number_of_steps_it_is_scaffold(models):
    full = {"counts": everybody()}
    torch.testing.assert_close(
        models(Scaffnew(require_full=False), **full), models(Scaffold(), **full), rtol=0, atol=1e-12
    )


def test_with_geometric_work_it_is_proxskip_with_its_coins(regression, play, regression_of):
    """Iteration by iteration as the paper's box has it: the numbers of steps are all that is taken from the run."""
    p = 1 / STEPS
    simulation = regression(Scaffnew(p), Full(), work=GeometricWork(), execution=DOUBLE)
    data = simulation.dataset
    x, y, owner = (v.numpy() for v in (data.train_x, data.train_y, data.owners))
    start = simulation.initial_state().model.numpy()
    ends, seen = [], set()
    played = list(play(simulation, 5))
    for r, lr in enumerate(LRS):
        coins = []
        for one in played:
            steps = one.report.cohort.host_index.steps.reshape(len(SEEDS), CLIENTS)[r]
            assert (steps == steps[0]).all()
            seen.add(int(steps[0]))
            coins += [False] * int(steps[0] - 1) + [True]
        models, controls, averaged = [start[r]] * CLIENTS, [0 * start[r]] * CLIENTS, []
        for coin in coins:
            for i in range(CLIENTS):
                own = owner == i
                error = x[own] @ models[i][:-1] + models[i][-1] - y[own]
                gradient = np.append(x[own].T @ error, error.sum()) / own.sum()
                models[i] = models[i] - lr * (gradient - controls[i])
            if coin:
                mean = sum(models) / CLIENTS
                controls = [h + p / lr * (mean - model) for h, model in zip(controls, models, strict=True)]
                models = [mean] * CLIENTS
                averaged.append(mean)
        ends.append(averaged)
    found = torch.stack([one.after.model for one in played], 1)
    np.testing.assert_allclose(found, np.array(ends), atol=1e-10)
    assert len(seen) > 2


def test_numbers_of_steps_follow_the_geometric_law(regression):
    """Mean s and variance s (s − 1), to 5 σ; replicates draw apart."""
    pace = regression(FedAvg(), everybody(), work=GeometricWork(), execution=DOUBLE).round_clock
    virtual = np.arange(2 * CLIENTS)
    load = dataclasses.replace(pace.batches.load(pace.batches.federation.make_cohort(np.ones((2, 4)), np.ones((2, 4)))))
    drawn = np.stack([pace.work_model.steps(t, virtual, load) for t in range(2000)])[:, [0, CLIENTS]]
    assert drawn.min() == 1
    assert abs(drawn.mean() - STEPS) < 5 * np.sqrt(STEPS * (STEPS - 1) / drawn.size)
    assert abs((drawn == 1).mean() - 1 / STEPS) < 5 * 0.5 / np.sqrt(drawn.size)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 5 / np.sqrt(len(drawn))


def test_at_the_optimum_it_rests_whatever_is_drawn_and_fedavg_does_not(regression):
    """h_i = ∇F_i(x*): local steps do not move, on losses of unequal curvature."""
    simulation = regression(Scaffnew(1 / STEPS), Full(), work=GeometricWork(), execution=DOUBLE)
    data, means = simulation.dataset, []
    for i in range(CLIENTS):
        own = data.owners == i
        wide = torch.cat([data.train_x[own], torch.ones(int(own.sum()), 1, dtype=torch.float64)], 1)
        means.append((wide.T @ wide / len(wide), wide.T @ data.train_y[own].reshape(-1) / len(wide)))
    best = torch.linalg.solve(sum(a for a, _ in means), sum(b for _, b in means))
    slopes = torch.stack([a @ best - b for a, b in means])
    moved = {}
    for strategy in (Scaffnew(1 / STEPS), FedAvg()):
        state = strategy.initial(best.repeat(2, 1), simulation.federation)
        if isinstance(strategy, Scaffnew):
            state.control.copy_(slopes.repeat(2, 1))
        for t in range(4):
            cohort = simulation.round_clock(simulation.availability.sample(t), t)
            report = simulation.trainer.run(strategy.start(state, cohort), cohort, t, state.model)
            state = strategy.aggregate(state, report, t)
        moved[type(strategy).__name__] = (state.model - best).abs().max().item()
    assert moved["Scaffnew"] < 1e-12
    assert moved["FedAvg"] > 1e-3


def test_what_it_cannot_run_under_is_refused(regression):
    with pytest.raises(ConfigError, match=r"strategy=scaffnew needs full participation; use availability=full"):
        regression(Scaffnew())
    with pytest.raises(ConfigError, match=r"probability=1\.5 must lie between 0 and 1"):
        Scaffnew(1.5)
    with pytest.raises(ConfigError, match=r"strategy=scaffnew divides by the rate of a round"):
        points(Scaffnew(), [[0.0]], SGD(schedule=PerStep(0.9)))
    with pytest.raises(ConfigError, match=r"work=geometric counts local steps, and local_epochs=2"):
        points(FedAvg(), [[0.0]], SGD(epochs=2), work=GeometricWork())
