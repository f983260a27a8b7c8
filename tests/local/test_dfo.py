"""Descent without derivatives against NumPy, and where closed forms say what it must find."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from fedsim import Execution, Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.core import ConfigError, rng
from fedsim.data.datasets import Dataset, GaussianMean, Pricing
from fedsim.local import DFO
from fedsim.models import Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.shift import Demand, Location, Response, Strategic
from fedsim.strategies import FedAWE


@pytest.mark.parametrize(("points", "weights"), [(1, [1, 1, 1, 1, 1]), (2, [0, 1, 0, 1, 0])])
def test_a_model_moves_once_it_has_heard_of_all_points(points, weights):
    assert [DFO(points=points).gradient_weight(step) for step in range(5)] == weights


QUIET = Tracking(progress="none", tensorboard=False)
SENSITIVITIES, SIZES, DELTA, LR, STEPS = [0.5, 1.5, 0.0], [3, 6, 4], 0.3, 0.2, 4
SEEDS = (3, 5)
COUNTS = np.array([[[1, 1, 0]] * 2, [[1, 1, 1], [0, 0, 0]], [[0, 0, 0]] * 2, [[0, 1, 1], [1, 0, 0]], [[1, 1, 1]] * 2])


def stored() -> Dataset:
    draw = np.random.default_rng(1)
    x, y = draw.standard_normal((sum(SIZES), 2)), draw.integers(0, 2, sum(SIZES))
    y[:2] = 0, 1
    owners = torch.as_tensor(np.repeat(range(3), SIZES))
    return Dataset("few", torch.as_tensor(x), torch.as_tensor(y), classes=2, loss="logistic", owners=owners)


def direction(seed: int, t: int, number: int) -> np.ndarray:
    """Keyed by seed, round and number, and by no client."""
    key = rng.row_keys(torch.tensor(seed), rng.Purpose.POINT, torch.tensor(t))
    drawn = rng.normal(rng.fold_in(key, number), torch.arange(2), torch.float64).numpy()
    return drawn / np.linalg.norm(drawn)


class Client:
    """One client of one replicate, its losses in closed form."""

    def __init__(self, number: int, points: int, baseline: bool) -> None:
        data, ridge = stored(), 0.1
        mine = data.owners.numpy() == number
        self.x, self.y = data.train_x.numpy()[mine], 2 * data.train_y.numpy()[mine] - 1
        self.epsilon, self.ridge, self.points, self.baseline = SENSITIVITIES[number], ridge, points, baseline
        self.heard: list[float] = []

    def loss(self, theta: np.ndarray) -> float:
        """On samples that have reacted this θ."""
        x = self.x - self.epsilon * theta
        found = np.log1p(np.exp(-self.y * (x @ theta))).mean() + 0.5 * self.ridge * theta @ theta
        self.heard.append(float(found))
        return self.heard[-1]

    def round(self, theta: np.ndarray, seed: int, t: int) -> np.ndarray:
        for number in range(STEPS // self.points):
            u = direction(seed, t, number)
            if self.points == 2:
                slope = (self.loss(theta + DELTA * u) - self.loss(theta - DELTA * u)) / (2 * DELTA)
            else:
                before = np.mean(self.heard) if self.heard else None
                found = self.loss(theta + DELTA * u)
                base = (found if before is None else before) if self.baseline else 0.0
                slope = (found - base) / DELTA
            theta = np.clip(theta - LR * 2 * slope * u, -0.9 + DELTA, 0.9 - DELTA)
        return theta


@pytest.mark.sampled(3)
@pytest.mark.parametrize("executor", ["vmap", "loop"])
@pytest.mark.parametrize(("points", "baseline"), [(2, False), (1, False), (1, True)])
def test_every_client_walks_by_the_losses_it_hears(points, baseline, executor, play, Scripted) -> None:
    rule = DFO(DELTA, points, baseline, lr=LR, steps=STEPS, batch_size=None, box=[-0.9, 0.9])
    simulation = Simulation(
        stored(), functools.partial(Linear, bias=False), clients=3, local=rule, ridge=0.1, seeds=SEEDS, rounds=5,
        shift=Strategic(SENSITIVITIES, 0.0, references="none"), availability=Scripted(COUNTS),
        execution=Execution(executor, dtype="float64"),
    )  # fmt: skip
    clients = [[Client(i, points, baseline) for i in range(3)] for _ in SEEDS]
    for played in play(simulation):
        before, ends = played.before.model.numpy(), [[], []]
        for position, row in enumerate(played.report.cohort.host_index.rows):
            replicate, number = divmod(int(row), 3)
            heard = len(clients[replicate][number].heard)
            end = clients[replicate][number].round(before[replicate], SEEDS[replicate], played.t)
            np.testing.assert_allclose(played.report.end[position], end, rtol=0, atol=1e-10)
            mean = np.mean(clients[replicate][number].heard[heard:])
            assert played.report.loss[position].item() == pytest.approx(mean, abs=1e-10)
            ends[replicate].append(end)
        for r in range(2):
            np.testing.assert_allclose(played.after.model[r], np.mean(ends[r] or [before[r]], 0), rtol=0, atol=1e-10)


@pytest.mark.slow
def test_in_one_dimension_two_points_know_the_slope_of_a_quadratic_risk(play) -> None:
    """Whatever δ: θ ← θ − η Σ_i w_i (1 − ε_i)((1 − ε_i)θ − m_i), whose fixed point is θ^PO."""
    epsilons, means = np.array([0.5, -0.4, 0.8]), np.array([1.0, -2.0, 4.0])
    for radius in (0.01, 2.0):
        rule = DFO(radius, lr=0.6, steps=2, batch_size=3)
        simulation = Simulation(
            GaussianMean(clients=3, means=list(means), std=0.0), functools.partial(Mean, start=2.0), clients=3,
            local=rule, shift=Location(epsilons=list(epsilons)), rounds=60, execution=Execution(dtype="float64"),
        )  # fmt: skip
        theta = 2.0
        for played in play(simulation):
            theta -= 0.6 * ((1 - epsilons) * ((1 - epsilons) * theta - means)).mean()
            assert played.after.model.item() == pytest.approx(theta, abs=1e-9)
        optimal = ((1 - epsilons) * means).mean() / ((1 - epsilons) ** 2).mean()
        assert theta == pytest.approx(optimal, abs=1e-9)
        assert simulation.references["distance_to_po"].item() == pytest.approx(optimal, abs=1e-8)


def answered(kind: str, radius: float) -> Simulation:
    """One price that moves demands, or one weight that moves targets: quadratic risks without noise."""
    rule = functools.partial(DFO, radius, lr=0.2 if kind == "demand" else 0.5, steps=2)
    options = {"local": rule(batch_size=None), "rounds": 30, "execution": Execution(dtype="float64")}
    if kind == "demand":
        options["local"] = rule(batch_size=3)
        data, shift = Pricing(clients=3, dimension=1, std=1e-12), Demand(2.0, 0.5)
        return Simulation(data, Mean, clients=3, shift=shift, **options)
    draw = np.random.default_rng(0)
    x, owners = torch.as_tensor(draw.standard_normal((9, 1))), torch.arange(9) % 3
    data = Dataset("few", x, 3 * x[:, 0] + 1, loss="squared", owners=owners)
    build = functools.partial(Linear, bias=False)
    return Simulation(data, build, clients=3, shift=Response([0.0, 0.6, 1.5]), **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "radius"), [("demand", 1.0), ("response", 0.05)])
def test_in_one_dimension_two_points_end_at_the_optimum_of_demands_and_responses_too(kind, radius) -> None:
    simulation = answered(kind, radius)
    end, points = simulation.run(tracking=QUIET).state.model[0].item(), simulation.references
    assert end == pytest.approx(points["distance_to_po"][0].item(), abs=1e-6)
    assert abs(end - points["distance_to_ps"][0].item()) > 0.1


@pytest.mark.slow
def test_the_mean_over_directions_is_the_gradient_of_the_performative_risk() -> None:
    """Of a quadratic risk in 4 dimensions, δ = 1, in 2,000 replicates: each number within 5 standard errors."""
    data = Dataset("points", torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.float64), loss="half_squared_distance")
    simulation = Simulation(
        data, functools.partial(Mean, start=1.0), clients=1, rounds=1, seeds=tuple(range(2000)),
        local=DFO(1.0, lr=1.0, steps=2, batch_size=None), shift=Location(0.5, references="none"),
        execution=Execution(dtype="float64"),
    )  # fmt: skip
    moves = 1.0 - simulation.run(tracking=QUIET).state.model.numpy()
    expected = 0.5 * (0.5 - data.train_x[0].numpy())  # (1 − ε)((1 − ε)θ − m) at θ = 1
    error = moves.std(0) / 2000**0.5
    assert (np.abs(moves.mean(0) - expected) < 5 * error).all()
    assert (error > 0).all()


@pytest.mark.slow
def test_without_a_shift_it_descends_the_loss_and_points_are_alike_for_all_clients(play) -> None:
    """Alike clients arrive at the same model: they looked in the same directions."""
    x = torch.as_tensor(np.random.default_rng(0).standard_normal((1, 3))).repeat(4, 1)
    data = Dataset("alike", x, loss="half_squared_distance", owners=torch.arange(4))
    rule = DFO(0.5, lr=0.2, steps=8, batch_size=None)
    simulation = Simulation(data, Mean, clients=4, local=rule, rounds=60, execution=Execution(dtype="float64"))
    for played in play(simulation):
        torch.testing.assert_close(played.report.end, played.report.end[:1].expand(4, -1), rtol=0, atol=1e-13)
    torch.testing.assert_close(played.after.model, x[:1], rtol=0, atol=1e-3)


def test_it_is_alone_what_it_is_in_company_and_interrupted_what_it_is_in_one_go(tmp_path) -> None:
    def run(seeds, folder=None, rounds=4, resume=False):
        rule = DFO(0.5, 1, True, lr=0.01, steps=3, batch_size=7)
        simulation = Simulation(
            GaussianMean(clients=5), Mean, clients=5, local=rule, shift=Location(0.5, 0.1, inertia=0.3), seeds=seeds,
            strategy=FedAWE(), availability=Bernoulli(Uniform(0.6)), rounds=rounds,
            execution=Execution(dtype="float64"),
        )  # fmt: skip
        return simulation.run(folder, resume=resume, tracking=QUIET).state.models

    both = run((3, 5), tmp_path / "straight")
    torch.testing.assert_close(run((5,)), both[5:], rtol=0, atol=1e-12)
    run((3, 5), tmp_path / "parts", 2)
    assert torch.equal(run((3, 5), tmp_path / "parts", resume=True), both)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, r"local_steps=3, but points=2"),
        ({"epochs": 2}, r"local_epochs=2, but points=2"),
        ({"points": 3}, r"points=3"),
        ({"radius": 0.0}, r"radius"),
        ({"baseline": True}, r"baseline=true is for one point"),
        ({"radius": 1.0, "box": [0, 2]}, r"radius=1\.0 leaves no room"),
        ({"radius": 1.0, "ball": 1.0}, r"radius=1\.0 leaves no room"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        DFO(**options)


def test_points_that_nobody_answers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"local=dfo .* shift\.deploy=step"):
        Simulation(GaussianMean(clients=2), Mean, clients=2, local=DFO(), shift=Location(deploy="round"))
