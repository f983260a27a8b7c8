"""Repeated risk minimisation: draws that stay while a model is deployed, and what is minimised on them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.core import ConfigError
from fedsim.data.contamination import Point
from fedsim.data.datasets import Dataset, GaussianMean
from fedsim.data.samples import Batches
from fedsim.local import RRM, SGD
from fedsim.models import Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.shift import Location, Strategic
from fedsim.strategies import FedAWE

EPSILONS, MEANS = [0.5, -0.4, 1.1], [1.0, -2.0, 4.0]
QUIET = Tracking(progress="none", tensorboard=False)


def game(rule=None, redraw=1, rounds=6, std=0.0, executor="vmap", **options) -> Simulation:
    """Mean estimation of three clients whose data answer the server's model, from θ = 2."""
    shift = {name: options.pop(name) for name in ("epsilons", "inertia") if name in options}
    return Simulation(
        GaussianMean(clients=3, means=MEANS, std=std),
        functools.partial(Mean, start=2.0),
        clients=3,
        local=rule or RRM(lr=1.0, steps=1, batch_size=4),
        shift=Location(**{"epsilons": EPSILONS} | shift, deploy="round", redraw=redraw),
        rounds=rounds,
        execution=Execution(executor, dtype="float64"),
        **options,
    )


def models(simulation, play) -> list[float]:
    """θ of the first replicate after every round."""
    return [played.after.model[0, 0].item() for played in play(simulation)]


@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize("reg", [0.0, 0.3])
def test_clients_descend_on_the_draw_of_the_last_deployment(reg, executor, play, Scripted) -> None:
    """By hand: three rounds a draw, a round without anybody, one where a client comes that was away at the draw."""
    first, second = (
        [[1, 1, 0], [1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1]],
        [[1, 1, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0]],
    )
    counts = np.stack([first, [*second, [1, 1, 1]]], axis=1)
    rule = RRM(reg=reg, lr=0.3, steps=2, batch_size=5)
    simulation = game(rule, 3, 5, 1.5, executor, seeds=(3, 5), availability=Scripted(counts), inertia=0.4,
                      contamination=Point(fraction=0.2, value=30.0))  # fmt: skip
    fresh = simulation.trainer.batches
    fresh = Batches(fresh.data, fresh.local_work, fresh.contamination)
    answered = np.full(2, 2.0)
    for played in play(simulation):
        before = played.before.model[:, 0].numpy()
        if played.t % 3 == 0:
            answered = 0.4 * answered + 0.6 * before
        cohort = played.report.cohort
        ends: list[list[float]] = [[], []]
        for position, row in enumerate(cohort.host_index.rows):
            replicate, client = divmod(int(row), 3)
            drawn = fresh.plan(cohort, played.t - played.t % 3).chunk(np.array([position]))
            batch = drawn.batch(0, 0, 1, torch.float64)
            batch["x"] = batch["x"] + EPSILONS[client] * answered[replicate]
            z = drawn.contaminate(batch, 0, 0, 1)["x"].mean().item()
            theta = before[replicate]
            for _ in range(2):
                theta -= 0.3 * (theta - z + 2 * reg * (theta - answered[replicate]))
            assert played.report.end[position, 0].item() == pytest.approx(theta, abs=1e-10)
            ends[replicate].append(theta)
        for r in range(2):
            expected = np.mean(ends[r]) if ends[r] else before[r]
            assert played.after.model[r, 0].item() == pytest.approx(expected, abs=1e-10)


def test_each_minimisation_is_a_contraction_by_the_mean_sensitivity(play) -> None:
    """θ^{k+1} = m̄ + ε̄ θ^k: one client may answer more than it is told (ε = 1.1) while ε̄ = 0.4 < 1."""
    theta, stable = 2.0, 1.0 / 0.6
    for k, found in enumerate(models(game(), play), 1):
        theta = 1.0 + 0.4 * theta
        assert found == pytest.approx(theta, abs=1e-12)
        assert found - stable == pytest.approx(0.4**k * (2.0 - stable), abs=1e-12)


def test_inner_rounds_end_at_the_minimum_on_one_draw(play) -> None:
    """On a noisy draw, kept for fifty rounds: nothing moves any more, until the next draw."""
    found = models(game(RRM(lr=0.5, steps=2, batch_size=4), 50, 102, 2.0), play)
    assert found[49] == pytest.approx(found[30], abs=1e-12)
    assert abs(found[50] - found[49]) > 1e-3
    assert found[99] == pytest.approx(found[80], abs=1e-12)


def test_regularised_it_converges_where_data_answer_too_much_the_other_way(play) -> None:
    """ε̄ = −1.5: plain it grows by 1.5 a deployment; with reg = ½ it shrinks by (ε̄ + 1)/2 = −¼."""
    strong, stable = [-1.5, -1.0, -2.0], 1.0 / 2.5
    plain = np.array(models(game(epsilons=strong), play)) - stable
    assert plain == pytest.approx(1.6 * (-1.5) ** np.arange(1, 7))
    regular = np.array(models(game(RRM(reg=0.5, lr=0.5, steps=1, batch_size=4), epsilons=strong), play)) - stable
    assert regular == pytest.approx(1.6 * (-0.25) ** np.arange(1, 7))


@pytest.mark.parametrize(("inertia", "a"), [(0.5, -2.5), (0.5, 0.4), (0.8, -6.0)])
def test_under_inertia_it_contracts_by_lambda_and_the_rest_of_the_answer(inertia, a, play) -> None:
    """θ̃ ← λ θ̃ + (1 − λ) θ, θ ← m̄ + a θ̃: the error shrinks by λ + (1 − λ) a, though |a| > 1, to the same θ^PS; and
    beyond a = −(1 + λ)/(1 − λ) it grows."""
    found = np.array(models(game(epsilons=[a] * 3, inertia=inertia, rounds=9), play))
    error, factor = found - 1.0 / (1 - a), inertia + (1 - inertia) * a
    assert error[1:] / error[:-1] == pytest.approx([factor] * 8, rel=1e-6)
    wild = np.array(models(game(epsilons=[-(1 + inertia) / (1 - inertia) - 0.2] * 3, inertia=inertia), play))
    assert (np.abs(np.diff(wild))[1:] > np.abs(np.diff(wild))[:-1]).all()


def test_with_one_step_a_round_a_redraw_every_round_is_what_deploying_every_round_is(play) -> None:
    runs = [models(game(SGD(lr=0.3, steps=1, batch_size=4), redraw, 4, 1.0), play) for redraw in (1, None)]
    assert runs[0] == runs[1]
    more = [models(game(SGD(lr=0.3, steps=2, batch_size=4), redraw, 4, 1.0), play) for redraw in (1, None)]
    assert more[0] != more[1]  # a second step has a draw of its own


def test_stored_samples_answer_the_last_deployment(play) -> None:
    """Minibatches go on through what a client holds, moved by one model for two rounds."""
    draw = np.random.default_rng(0)
    x, y = torch.as_tensor(draw.standard_normal((12, 2))), torch.arange(12) % 2
    data = Dataset("few", x, y, classes=2, loss="logistic")
    shift = Strategic(1.0, 0.0, deploy="round", redraw=2, references="none")
    simulation = Simulation(data, functools.partial(Linear, bias=False), clients=2, shift=shift, rounds=4,
                            local=RRM(lr=0.5, steps=2, batch_size=3), execution=Execution(dtype="float64"))  # fmt: skip
    seen = [(played.before.model.clone(), played.report.deployed.clone()) for played in play(simulation)]
    for t, (_, deployed) in enumerate(seen):
        assert torch.equal(deployed, seen[t - t % 2][0])
    assert not torch.equal(seen[1][0], seen[0][0])


def test_a_run_that_is_interrupted_between_two_draws_is_the_run(tmp_path) -> None:
    def run(folder, rounds, resume=False):
        rule, when = RRM(lr=0.2, steps=2, batch_size=4), Bernoulli(Uniform(0.6))
        simulation = game(rule, 4, rounds, 1.0, strategy=FedAWE(), availability=when)
        return simulation.run(tmp_path / folder, resume=resume, tracking=QUIET).state

    straight = run("straight", 6)
    run("parts", 3)
    assert torch.equal(run("parts", 6, True).models, straight.models)


@pytest.mark.parametrize("seeds", [(3,), (5,)])
def test_a_replicate_draws_alone_what_it_draws_in_company(seeds) -> None:
    together, alone = (game(redraw=2, std=1.0, seeds=s).run(tracking=QUIET).state.model for s in ((3, 5), seeds))
    assert together[(3, 5).index(seeds[0])].item() == alone[0].item()


def test_what_cannot_be_frozen_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"redraw=3 .* needs deploy=round"):
        Location(redraw=3)
    with pytest.raises(ConfigError, match=r"redraw=0"):
        Location(redraw=0, deploy="round")
    with pytest.raises(ConfigError, match=r"local=rrm .* shift\.redraw=10"):
        game(RRM(), None)
    with pytest.raises(ConfigError, match=r"reg"):
        RRM(reg=-1.0)
