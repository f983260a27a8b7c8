"""Data of which a part answers earlier deployments: lags by hand, closed forms of the law, and where training ends."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.core import ConfigError, rng
from fedsim.data.datasets import GaussianMean, HousePrices
from fedsim.local import PG, RRM, SGD
from fedsim.models import Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.shift import Location, Response
from fedsim.shift.mixture import LagMixture
from fedsim.strategies import FedAWE

QUIET = Tracking(progress="none", tensorboard=False)
EPSILONS, MEANS, SEEDS = [0.5, -0.4, 0.9], [1.0, -2.0, 4.0], (3, 5)
SHARES = [0.5, 0.2, 0.3]


def game(rule, rounds, std=0.0, executor="vmap", seeds=SEEDS, epsilons=EPSILONS, **shift) -> Simulation:
    options = {name: shift.pop(name) for name in ("availability", "strategy") if name in shift}
    return Simulation(
        GaussianMean(clients=3, means=MEANS, std=std), functools.partial(Mean, start=2.0), clients=3, local=rule,
        shift=Location(epsilons=epsilons, references="none", **shift), rounds=rounds, seeds=seeds,
        execution=Execution(executor, dtype="float64"), evaluation=EvaluationOptions(every=rounds), **options,
    )  # fmt: skip


def lags(seed: int, client: int, number: int, size: int) -> np.ndarray:
    """By the shares, for all of a batch's samples."""
    key = rng.fold_in(rng.row_keys(torch.tensor(seed), rng.Purpose.MIXTURE, torch.tensor(client)), number)
    uniform = rng.uniform(key, torch.arange(size), torch.float64).numpy()
    return np.searchsorted(np.cumsum(SHARES)[:-1], uniform, side="right")


@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize(("deploy", "inertia"), [("step", 0.0), ("step", 0.3), ("round", 0.0), ("round", 0.3)])
def test_every_sample_answers_its_own_past_model(deploy, inertia, executor, play, Scripted) -> None:
    """Clients that come at different times; under deploy=round every second round deploys."""
    counts = np.array([[[1, 1, 0]] * 2, [[1, 0, 0], [0, 0, 0]], [[0, 0, 0]] * 2, [[1, 1, 1]] * 2, [[0, 1, 1]] * 2])
    redraw = 2 if deploy == "round" else None
    simulation = game(SGD(lr=0.2, steps=2, batch_size=7), 5, 1.5, executor, availability=Scripted(counts),
                      deploy=deploy, inertia=inertia, mixture=SHARES, redraw=redraw)  # fmt: skip
    own: dict[int, list[float]] = {row: [2.0] * 3 for row in range(6)}
    server, answered, turns = [[2.0] * 3 for _ in SEEDS], [2.0] * 6, [0] * 6
    whole = [2.0, 2.0]
    older = 0
    for played in play(simulation):
        before = played.before.model[:, 0].tolist()
        if deploy == "round" and played.t % 2 == 0:
            for r in range(2):
                whole[r] = inertia * whole[r] + (1 - inertia) * before[r]
                server[r] = [whole[r], *server[r][:2]]
        for position, row in enumerate(played.report.cohort.host_index.rows):
            replicate, client = divmod(int(row), 3)
            chunk = simulation.trainer.batches.plan(played.report.cohort, played.t).chunk(np.array([position]))
            theta = before[replicate]
            for k in range(2):
                number = played.t - played.t % 2
                if deploy == "step":
                    answered[row] = inertia * answered[row] + (1 - inertia) * theta
                    own[row] = [answered[row], *own[row][:2]]
                    number = turns[row] = turns[row] + 1
                past = np.array(own[row] if deploy == "step" else server[replicate])
                lag = lags(SEEDS[replicate], client, number, 7)
                older += int((lag > 0).sum())
                z = chunk.batch(k, 0, 1, torch.float64)["x"].numpy().ravel() + EPSILONS[client] * past[lag]
                theta -= 0.2 * (theta - z).mean()
            assert played.report.end[position, 0].item() == pytest.approx(theta, abs=1e-10)
        if deploy == "round":
            assert played.report.deployed[:, 0].tolist() == pytest.approx(whole)
    assert older > 40


@pytest.mark.parametrize("given", [0.6, SHARES])
def test_the_law_is_the_mixture_of_the_last_laws(given) -> None:
    """Of z = εθ_{t−k} the mean is that of parameter inertia, ε Σ a_k θ_{t−k}; the variance ε² Σ a_k (θ_{t−k} − θ̃)²."""
    mixture, size = LagMixture(given), 200_000
    weights = np.array(SHARES) if given is SHARES else 0.4 * 0.6 ** np.arange(len(mixture))
    if given == 0.6:
        weights[-1] = 0.6 ** (len(mixture) - 1)  # of the oldest and all before it
        assert weights[-1] <= 1e-3 < 0.6 ** (len(mixture) - 2)
    np.testing.assert_allclose(mixture.weights, weights, atol=1e-15)
    past = torch.sin(torch.arange(len(mixture)) + 1.0).double()[:, None]
    batch = {"x": torch.zeros(size, 1, dtype=torch.float64), "client": torch.tensor(0)}
    moved = mixture.shift_batch(lambda b, theta: b | {"x": b["x"] + 2 * theta}, batch, past, torch.tensor(7))["x"][:, 0]
    z = 2 * past[:, 0].numpy()
    mean, variance = weights @ z, weights @ (z - weights @ z) ** 2
    fourth = weights @ (z - mean) ** 4
    assert abs(moved.mean().item() - mean) < 5 * np.sqrt(variance / size)
    assert abs(moved.var().item() - variance) < 5 * np.sqrt((fourth - variance**2) / size)
    if given is SHARES:  # as z ← a_0 z(θ_t) + …: the mean alone
        assert variance > 0.1
    assert batch["x"].abs().max() == 0


def test_it_keeps_a_share_of_the_last_samples_and_moves_the_rest() -> None:
    """D_t = λ D_{t−1} + (1 − λ) D(θ_t), on the weights: a_k(t) = λ a_{k−1}(t − 1) for k > 0, and a_0 = 1 − λ."""
    weights = LagMixture(0.8).weights
    assert weights[0].item() == pytest.approx(0.2)
    torch.testing.assert_close(weights[1:-1], 0.8 * weights[:-2])
    assert weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("mixture", "a", "factor"), [(0.5, -2.5, 0.75), ([0.5, 0.5], -1.5, 0.75**0.5), (0.0, -1.5, 1.5)]
)
def test_repeated_minimisation_converges_on_mixtures_where_it_does_not_on_the_last_draw(
    mixture, a, factor, play
) -> None:
    """θ^{k+1} = m̄ + a Σ_j a_j θ^{k−j}: the error shrinks by λ + (1 − λ)a, on the halves of the last two draws (affine
    risk minimisers) by the modulus of the roots of z² = a(z + 1)/2, √(−a/2); on one draw by a. θ^PS stays."""
    rule = RRM(lr=1.0, steps=1, batch_size=20_000)
    simulation = game(rule, 24, seeds=(3,), epsilons=[a] * 3, deploy="round", redraw=1, mixture=mixture)
    found = np.array([2.0] + [played.after.model.item() for played in play(simulation)]) - 1.0 / (1 - a)
    size = np.abs(found)
    rate = (max(size[-3:]) / max(size[:3])) ** (1 / 22)
    assert rate == pytest.approx(factor, abs=0.04)
    assert size[-1] < 0.06 if mixture else size[-1] > 100


@pytest.mark.parametrize("deploy", ["step", "round"])
def test_it_is_alone_what_it_is_in_company_and_interrupted_what_it_is_in_one_go(deploy, tmp_path) -> None:
    def run(seeds, folder=None, rounds=5, resume=False):
        options = {"strategy": FedAWE(), "availability": Bernoulli(Uniform(0.6)), "deploy": deploy, "mixture": 0.4}
        simulation = game(SGD(lr=0.2, steps=2, batch_size=4), rounds, 1.0, seeds=seeds, **options)
        return simulation.run(folder, resume=resume, tracking=QUIET).state.models

    both = run((3, 5), tmp_path / "straight")
    torch.testing.assert_close(run((5,)), both[3:], rtol=0, atol=1e-12)
    run((3, 5), tmp_path / "parts", 2)
    assert torch.equal(run((3, 5), tmp_path / "parts", resume=True), both)


def test_a_mixture_of_the_newest_alone_is_none() -> None:
    def run(**shift):
        return game(SGD(lr=0.2, steps=2, batch_size=4), 3, 1.0, **shift).run(tracking=QUIET).state.model

    assert torch.equal(run(mixture=[1.0]), run())
    assert not torch.equal(run(mixture=0.5), run())


def test_targets_that_answer_are_mixed_too() -> None:
    data = HousePrices(3)
    options = {"clients": 3, "local": SGD(lr=0.02, steps=2, batch_size=8), "rounds": 3}
    runs = [
        Simulation(data, functools.partial(Linear, bias=False), shift=Response(1.0, mixture=m, references="none"),
                   execution=Execution(e, dtype="float64"), **options).run(tracking=QUIET).state.model
        for m, e in ((0.5, "vmap"), (0.5, "loop"), (0.0, "vmap"))
    ]  # fmt: skip
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=1e-12)
    assert not torch.allclose(runs[0], runs[2])


@pytest.mark.parametrize(
    ("given", "said"),
    [(1, "1"), (-0.1, "-0.1"), ([0.5, 0.4], "sum to 1"), ([0.0, 1.0], "newest"), ([], "sum to 1"), (0.999, "lower it")],
)
def test_what_is_no_mixture_is_refused(given, said) -> None:
    with pytest.raises(ConfigError, match=rf"^mixture.*{said}"):
        Location(mixture=given)


def test_pooled_data_are_not_mixed() -> None:
    with pytest.raises(ConfigError, match=r"shift\.mixture .* local=pg"):
        game(PG(), 1, mixture=0.5)
