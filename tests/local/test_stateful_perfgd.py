"""Stateful PerfGD: the regression on model and past by NumPy, the slope of the settled law, and where a run ends."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.core import ConfigError, Federation, rng
from fedsim.data.datasets import GaussianMean, Pricing
from fedsim.local import StatefulPerfGD
from fedsim.local.estimators import MeanEstimator
from fedsim.local.performative import LocalStepSamples
from fedsim.models import Mean
from fedsim.run.tracking import Tracking
from fedsim.shift import Demand, Location
from fedsim.strategies import FedAWE

QUIET = Tracking(progress="none", tensorboard=False)
EPSILONS, MEANS, SEEDS, LR, KEPT = [0.5, -0.4, 0.8], [1.0, -2.0, 4.0], (3, 5), 0.2, 0.6


def mean_estimation(rule, **options) -> Simulation:
    options = {"shift": Location(epsilons=EPSILONS, inertia=KEPT), "rounds": 6} | options
    data = GaussianMean(clients=3, means=MEANS, std=1.5)
    options = {"execution": Execution(dtype="float64"), "seeds": SEEDS} | options
    return Simulation(data, functools.partial(Mean, start=2.0), clients=3, local=rule, **options)


def direction_of(law, kept: float, horizon: int | None, d: int, p: int, length: int) -> torch.Tensor:
    """(df/dθ)ᵀ u for u = (1, …, p) after enough random deployments in f ← (1 − λ) law(θ) + λ f."""
    rule = StatefulPerfGD(length, horizon=horizon, rcond=1e-11)
    rule.estimator, rule.trained = MeanEstimator("x", p), d
    draw = np.random.default_rng(0)
    carry = rule.memory(Federation((0,), 1, np.zeros(1), dtype=torch.float64), d)
    f = torch.as_tensor(draw.standard_normal((1, p)))
    u = torch.arange(1.0, p + 1, dtype=torch.float64)[None]
    for _ in range(length + 2):
        theta = torch.as_tensor(draw.standard_normal((1, d)))
        f = (1 - kept) * law(theta) + kept * f
        at = rule.point({**carry, "params": theta}, {})
        found = rule.shift_gradient(carry, LocalStepSamples({}, u, at, f, theta, u[:, 0]), u)[1]
        carry = rule.history.record_deployment(carry, at, f)
    return found[0]


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.9])
def test_the_slope_is_that_of_the_settled_law_for_every_memory(kept) -> None:
    """M = (1 − λ)(Aθ + b) + λf: (I − ∂₂)⁻¹∂₁ = A; the first K later answers give (1 − λ^{K+1}) A."""
    draw = np.random.default_rng(1)
    a, b = (torch.as_tensor(draw.standard_normal(shape)) for shape in ((2, 3), (2,)))
    expected = a.T @ torch.tensor([1.0, 2.0], dtype=torch.float64)
    for horizon, share in ((None, 1.0), (0, 1 - kept), (4, 1 - kept**5)):
        found = direction_of(lambda theta: theta @ a.T + b, kept, horizon, 3, 2, 8)
        torch.testing.assert_close(found, share * expected, rtol=1e-8, atol=1e-8)


def point(seed: int, t: int, number: int) -> float:
    key = rng.row_keys(torch.tensor(seed), rng.Purpose.POINT, torch.tensor(t))
    return rng.normal(rng.fold_in(key, number), torch.arange(1), torch.float64).item()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize("horizon", [None, 2])
def test_every_step_by_hand(horizon, executor, play, Scripted) -> None:
    """Clients that come at different times and data that remember; noise on what is deployed, a box."""
    counts = np.array([[[1, 1, 0]] * 2, [[1, 0, 0], [0, 0, 0]], [[0, 0, 0]] * 2, [[1, 1, 1]] * 2, [[0, 1, 1]] * 2] * 2)
    rule = StatefulPerfGD(3, 0.3, horizon, lr=LR, steps=2, batch_size=6, box=[-3, 9], rcond=1e-9)
    simulation = mean_estimation(rule, rounds=10, availability=Scripted(counts),
                                 execution=Execution(executor, dtype="float64"))  # fmt: skip
    past: dict[int, list[tuple[float, float, float]]] = {row: [] for row in range(6)}
    answered = dict.fromkeys(range(6), 2.0)
    seconds = 0
    for played in play(simulation):
        cohort, ends = played.report.cohort, [[], []]
        for position, row in enumerate(cohort.host_index.rows):
            replicate, client = divmod(int(row), 3)
            chunk = simulation.trainer.batches.plan(cohort, played.t).chunk(np.array([position]))
            theta, known = played.before.model[replicate, 0].item(), past[row]
            for k in range(2):
                deployed = theta + 0.3 * point(SEEDS[replicate], played.t, len(known))
                answered[row] = KEPT * answered[row] + (1 - KEPT) * deployed
                z = chunk.batch(k, 0, 1, torch.float64)["x"].numpy().ravel() + EPSILONS[client] * answered[row]
                f, slope = z.mean(), 0.0
                before = known[-1][2] if known else 0.0
                if len(known) > 3:
                    seconds += 1
                    away = np.array(known[-3:]) - (deployed, before, f)
                    (first, again), *_ = np.linalg.lstsq(away[:, :2], away[:, 2], rcond=1e-9)
                    slope = first / (1 - again) if horizon is None else first * (1 + again + again**2)
                losses = 0.5 * (theta - z) ** 2
                gradient = (theta - z).mean() + slope * (losses * (z - f)).mean() / z.var()
                theta = float(np.clip(theta - LR * gradient, -3, 9))
                known.append((deployed, before, f))
            assert played.report.end[position, 0].item() == pytest.approx(theta, abs=1e-10)
            ends[replicate].append(theta)
        for r in range(2):
            expected = np.mean(ends[r]) if ends[r] else played.before.model[r, 0].item()
            assert played.after.model[r, 0].item() == pytest.approx(expected, abs=1e-10)
    assert seconds > 10


@pytest.mark.slow
@pytest.mark.parametrize("horizon", [None, 0])
def test_demands_that_remember_end_at_the_optimum_and_without_their_memory_elsewhere(horizon, play) -> None:
    """Demands μ − γθ, loss −θz: θ^PO = μ/2γ; with the first answer alone θ = μ/(γ(2 − λ)). Noise is next to none."""
    rule = StatefulPerfGD(6, horizon=horizon, lr=0.1, steps=2, batch_size=8, rcond=1e-7)
    simulation = Simulation(
        Pricing(clients=2, dimension=1, std=1e-5), Mean, clients=2, local=rule, shift=Demand(2.0, 0.0, inertia=KEPT),
        rounds=60, execution=Execution(dtype="float64"),
    )  # fmt: skip
    *_, last = play(simulation)
    optimal = simulation.references["distance_to_po"].item()
    expected = optimal if horizon is None else 2 * optimal / (2 - KEPT)
    assert last.after.model.item() == pytest.approx(expected, rel=0.01)


def test_it_is_alone_what_it_is_in_company_and_interrupted_what_it_is_in_one_go(tmp_path) -> None:
    def run(seeds, folder=None, rounds=6, resume=False):
        rule = StatefulPerfGD(3, 0.1, lr=0.05, steps=2, batch_size=20, box=[-9, 9])
        options = {"strategy": FedAWE(), "availability": Bernoulli(Uniform(0.6)), "rounds": rounds}
        return mean_estimation(rule, seeds=seeds, **options).run(folder, resume=resume, tracking=QUIET).state.models

    both = run((3, 5), tmp_path / "straight")
    torch.testing.assert_close(run((5,)), both[3:], rtol=0, atol=1e-9)
    run((3, 5), tmp_path / "parts", 3)
    assert torch.equal(run((3, 5), tmp_path / "parts", resume=True), both)


def test_what_cannot_be_learnt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"local=stateful_perfgd .* shift\.deploy=step"):
        mean_estimation(StatefulPerfGD(), shift=Location(deploy="round"))
    with pytest.raises(ConfigError, match=r"growing=true"):
        StatefulPerfGD(growing=True)
    with pytest.raises(ConfigError, match=r"spread"):
        StatefulPerfGD(spread=-1.0)
    with pytest.raises(ConfigError, match=r"horizon=-1"):
        StatefulPerfGD(horizon=-1)
