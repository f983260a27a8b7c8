"""PFL, PoFL and ProFL in a federation: against one client at a time in NumPy, under every executor, interrupted."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Bernoulli, Sine, Uniform
from fedsim.core import ConfigError
from fedsim.data.contamination import Point
from fedsim.data.datasets import Dataset, Digits, GaussianMean
from fedsim.data.partition import Dirichlet
from fedsim.local import PFL, PG, SGD, PoFL, ProFL
from fedsim.local.sample_size import AdaptiveSampleSize
from fedsim.models import Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.shift import GroupMean, Location, Shift, Strategic
from fedsim.strategies import FedAvg, FedAWE, FedProx, Scaffold

QUIET = Tracking(progress="none", tensorboard=False)
double = functools.partial(Execution, dtype="float64")
WAYS = {
    "vmap": double("vmap"),
    "vmap in chunks": double("vmap", chunk=2),
    "loop": double("loop", workers=1),
    "loop with two workers": double("loop", workers=2, chunk=2),
}
EPSILONS, LR, STEPS, SAMPLES, BOX = [0.5, -0.4, 0.8], 0.2, 2, 60, (-3.0, 9.0)
COUNTS = np.array(
    [[[1, 1, 0], [0, 0, 0]], [[1, 0, 0], [1, 1, 0]], [[0, 0, 0], [0, 1, 0]], [[1, 1, 0], [1, 0, 0]]] * 2
)  # client 2 never appears


def mean_estimation(rule, **options) -> Simulation:
    options = {
        "clients": 3, "seeds": (3, 5), "rounds": 8, "evaluation": EvaluationOptions(every=8), "execution": double(),
        "shift": Location(epsilons=EPSILONS), "contamination": Point(fraction=0.1, value=60.0),
    } | options  # fmt: skip
    data = GaussianMean(clients=options["clients"], mean=3.0, variance=2.0 if options["clients"] > 1 else 0.0)
    return Simulation(data, functools.partial(Mean, start=1.0), local=rule, **options)


class Naive:
    """PoFL (and ProFL) on ½(θ − z)² of one replicate, client by client, with lists for memory."""

    def __init__(self, length: int, robust=None, server: str = "", growing: bool = False) -> None:
        self.length, self.robust, self.server = length, robust, server
        self.least = 1 if growing else length
        self.past: dict[int, list[tuple[float, float]]] = {}
        self.own: dict[int, float] = {}
        self.shared: float | None = None

    def step(self, client: int, theta: float, z: np.ndarray) -> float:
        past = self.past.setdefault(client, [])
        if self.robust is not None:
            z = z[self.robust((theta - z)[:, None], 10, 0.0025, 0.1)]
        f, losses = z.mean(), 0.5 * (theta - z) ** 2
        slope = None
        if len(past) >= self.least:
            models, estimates = np.array(past[-self.length :]).T
            away = models - theta
            slope = float((estimates - f) @ away / (away @ away)) if away.any() else 0.0  # held at the edge of Θ
            self.own[client] = slope
        if self.server and self.shared is not None:
            slope = self.shared
        second = 0.0 if slope is None else slope * (losses * (z - f) / z.var()).mean()
        past.append((theta, f))
        return float(np.clip(theta - LR * ((theta - z).mean() + second), *BOX))

    def end_round(self, clients: list[int]) -> None:
        if self.server == "regression":
            full = [np.array(self.past[i][-self.length :]) for i in clients if len(self.past[i]) >= self.length]
            if full:
                theta, f = np.mean(full, 0).T  # oldest first
                away = theta[:-1] - theta[-1]
                self.shared = float((f[:-1] - f[-1]) @ away / (away @ away)) if away.any() else 0.0
            return
        known = [self.own[i] for i in clients if i in self.own]
        if known:
            self.shared = float(np.mean(known))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", [pytest.param(w, marks=[pytest.mark.slow] if w == "loop" else []) for w in WAYS])
@pytest.mark.parametrize(
    ("rule", "length"),
    [(functools.partial(PoFL), 3), (ProFL, 1), (functools.partial(ProFL, server_derivative=True), 3),
     (functools.partial(ProFL, robust=False), 2), (functools.partial(PoFL, growing=True), 3),
     (functools.partial(ProFL, server_derivative=True, growing=True), 3),
     (functools.partial(ProFL, server_derivative=True, server_method="regression"), 3)],
)  # fmt: skip
def test_every_client_follows_the_algorithm_on_its_own_steps(rule, length, way, Scripted, play, robust) -> None:
    local = rule(lr=LR, steps=STEPS, batch_size=SAMPLES, history=length, box=list(BOX))
    simulation = mean_estimation(local, availability=Scripted(COUNTS), execution=WAYS[way])
    server = local.server_method if getattr(local, "server_derivative", False) else ""
    filtered = robust if getattr(local, "robust", False) else None
    naive = [Naive(length, filtered, server, local.history.growing) for _ in range(2)]
    trainer = simulation.trainer
    for played in play(simulation):
        cohort = played.report.cohort
        plan = trainer.batches.plan(cohort, played.t)
        met: list[list[int]] = [[], []]
        for position, row in enumerate(cohort.host_index.rows):
            replicate, client = divmod(int(row), 3)
            chunk = plan.chunk(np.array([position]))
            theta = played.before.model[replicate, 0].item()
            for step in range(STEPS):
                batch = chunk.batch(step, 0, 1, torch.float64)
                batch["x"] = batch["x"] + EPSILONS[client] * theta
                z = chunk.contaminate(batch, step, 0, 1)["x"].flatten().numpy()
                theta = naive[replicate].step(client, theta, z)
            assert played.report.end[position, 0].item() == pytest.approx(theta, abs=1e-7)
            met[replicate].append(client)
        for one, clients in zip(naive, met, strict=True):
            one.end_round(clients)
    assert all(len(one.own) == 2 for one in naive)  # L̂₂ was used by all who came


def test_every_step_of_pg_follows_the_algorithm_on_the_mixture(play) -> None:
    """One client with everybody's samples, each moved by the sensitivity of the client that it belongs to."""
    local = PG(lr=LR, steps=STEPS, batch_size=SAMPLES, history=3, box=list(BOX))
    simulation = mean_estimation(local, contamination=None)
    naive = [Naive(3) for _ in range(2)]
    for played in play(simulation):
        plan = simulation.trainer.batches.plan(played.report.cohort, played.t)
        assert len(played.report.end) == 2  # replicates
        for replicate in range(2):
            chunk, theta = plan.chunk(np.array([replicate])), played.before.model[replicate, 0].item()
            for step in range(STEPS):
                batch = {name: value[0] for name, value in chunk.batch(step, 0, 1, torch.float64).items()}
                z = simulation.shift(batch, torch.tensor([theta], dtype=torch.float64))["x"].flatten().numpy()
                assert len(np.unique(np.round(z - batch["x"].flatten().numpy(), 9))) == 3 or not theta
                theta = naive[replicate].step(0, theta, z)
            assert played.report.end[replicate, 0].item() == pytest.approx(theta, abs=1e-7)
    assert all(one.own for one in naive)  # L̂₂ was used


RULES = {
    "pfl": functools.partial(PFL, box=[-3, 9]),
    "pofl": functools.partial(PoFL, history=2, ball=20.0),
    "profl": functools.partial(ProFL, history=2, box=[-3, 9], server_derivative=True),
    "adaptive": functools.partial(ProFL, history=2, box=[-3, 9], adaptive_samples=True, tolerance=3.0, max_samples=50),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "profl" else [pytest.mark.slow]) for n in RULES])
def test_executors_chunks_and_replicates_agree(name: str) -> None:
    """Five clients in chunks of two, FedAWE with sine availability."""

    def run(seeds, way=None):
        local = RULES[name](lr=0.1, steps=3, **({} if name == "adaptive" else {"batch_size": 40}))
        options = {"clients": 5, "shift": Location(0.5, 0.1), "rounds": 4, "evaluation": EvaluationOptions(every=4)}
        when = Bernoulli(Uniform(0.6), Sine())
        options |= {"strategy": FedAWE(), "availability": when, "seeds": seeds, "execution": way or double()}
        return mean_estimation(local, **options).run()

    both = run((3, 5))
    for way in WAYS.values():
        other = run((3, 5), way)
        torch.testing.assert_close(other.state.models, both.state.models, rtol=0, atol=1e-8)
        assert other.samples == both.samples
    for r, seed in enumerate((3, 5)):
        torch.testing.assert_close(run((seed,)).state.model[0], both.state.model[r], rtol=0, atol=1e-8)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RULES)
def test_an_interrupted_run_is_the_run(name: str, tmp_path) -> None:
    def run(folder, rounds, resume=False):
        local = RULES[name](lr=0.1, steps=3, **({} if name == "adaptive" else {"batch_size": 40}))
        options = {"clients": 3, "shift": Location(0.5, 0.1, inertia=0.3), "rounds": rounds, "strategy": FedAWE()}
        simulation = mean_estimation(local, **options, availability=Bernoulli(Uniform(0.5), Sine()))
        return simulation.run(tmp_path / folder, resume=resume, tracking=QUIET)

    straight = run("straight", 6)
    run("parts", 3)
    resumed = run("parts", 6, resume=True)
    assert torch.equal(resumed.state.models, straight.state.models)
    assert resumed.samples == straight.samples


def test_without_a_projection_pfl_is_sgd_and_with_one_it_stays_inside() -> None:
    options = {"lr": 0.3, "steps": 3, "batch_size": 10, "clip": 2.0, "weight_decay": 0.1}
    for strategy in (FedProx(mu=0.5), Scaffold()):
        ends = [mean_estimation(rule(**options), strategy=strategy).run().state.model for rule in (SGD, PFL)]
        assert torch.equal(*ends)
    draw = torch.as_tensor(np.random.default_rng(0).standard_normal((6, 5)) * 3)
    inside = PFL(box=[-1, 2]).project(draw)
    assert torch.equal(inside, draw.clip(-1, 2))
    inside = PFL(ball=2.5).project(draw)
    for row, was in zip(inside, draw, strict=True):
        torch.testing.assert_close(row, was * min(1.0, 2.5 / was.norm().item()))
    assert torch.equal(PFL().project(draw), draw)


@pytest.mark.parametrize("strategy", [FedProx(mu=0.5), Scaffold()])
def test_pofl_honours_what_strategies_hand_to_local_rules(strategy) -> None:
    """In its first steps PoFL is SGD, correction and proximal term included."""
    options = {"lr": 0.3, "steps": 3, "batch_size": 10, "clip": 2.0, "weight_decay": 0.1}
    rules = (SGD(**options), PoFL(history=100, **options))
    first, second = (mean_estimation(rule, strategy=strategy).run().state.model for rule in rules)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-10)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shift", [Strategic(0.1, 0.05), GroupMean([0.1] * 10, [0.05] * 10)])
@pytest.mark.parametrize("rule", [PoFL, ProFL])
def test_labels_images_and_ragged_clients(rule, shift) -> None:
    """Clients of unequal size, batches padded; also data that do not answer, where PoFL is PFL."""
    options = {"clients": 5, "rounds": 2, "strategy": FedAWE(), "availability": Bernoulli(Uniform(0.7), Sine()),
               "partition": Dirichlet(alpha=0.5)}  # fmt: skip
    local = {"lr": 0.1, "steps": 3, "batch_size": None, "box": [-1, 1], "history": 2}
    everything = Digits()
    digits = Dataset("digits", *(part[:300] for part in (everything.train_x, everything.train_y)), classes=10)
    runs = [Simulation(digits, Linear, local=rule(**local), shift=shift, **options, execution=double(executor)).run()
            for executor in ("vmap", "loop")]  # fmt: skip
    torch.testing.assert_close(runs[0].state.model, runs[1].state.model, rtol=0, atol=1e-6)
    local.pop("history")
    still = [Simulation(digits, Linear, local=r(**local), execution=double(), **options).run().state.model
             for r in (PFL, PoFL)]  # fmt: skip
    torch.testing.assert_close(*still, rtol=0, atol=1e-10)


def test_samples_that_were_not_used_are_not_counted(Scripted) -> None:
    """The count of a round is that of the samples that the sizes of its steps asked for."""
    local = ProFL(lr=0.01, steps=3, history=2, adaptive_samples=True, tolerance=5.0, max_samples=80, curvature=0.0)
    simulation = mean_estimation(local, availability=Scripted(np.ones((8, 2, 3))), contamination=None)
    memory, state = simulation.trainer.initial_memory(simulation.initial_state().model), simulation.initial_state()
    totals = np.zeros(6, dtype=np.int64)
    for t in range(8):
        cohort = simulation.federation.make_cohort(np.ones((2, 3)), np.ones((2, 3)))
        start = cohort.broadcast(state.model)
        report = simulation.trainer.run(start, cohort, t, state.model, memory)
        totals += report.samples
        assert totals.tolist() == memory.clients["samples_used"].tolist()
        state = simulation.strategy.aggregate(state, report, t)
        if t == 0:
            assert report.samples.max() <= 3 * 80
            assert report.samples.min() >= 2 * 80  # H = 2 first steps at the cap
    assert totals.max() <= 8 * 3 * 80
    assert totals.min() < 0.97 * 8 * 3 * 80


@pytest.mark.parametrize("history", [2, 3])
def test_a_bend_is_estimated_from_the_2h_th_step_on(history: int) -> None:
    """M̂ compares df/dθ with that of H steps before, and the first H steps have none: until 2H steps are done sizes are
    those of M = 0. With everybody there and one step a round, a client's steps are the rounds."""
    sizes = {}
    for curvature in (None, 0.0):
        local = ProFL(
            lr=0.3, steps=1, history=history, adaptive_samples=True, tolerance=0.5, max_samples=80, curvature=curvature
        )
        simulation = mean_estimation(local, contamination=None)
        state = simulation.initial_state()
        memory = simulation.trainer.initial_memory(state.model)
        found = []
        for t in range(2 * history + 1):
            cohort = simulation.federation.make_cohort(np.ones((2, 3)), np.ones((2, 3)))
            report = simulation.trainer.run(cohort.broadcast(state.model), cohort, t, state.model, memory)
            found.append(memory.clients["sample_size"].tolist())
            state = simulation.strategy.aggregate(state, report, t)
        sizes[curvature] = found
    assert sizes[None][: 2 * history] == sizes[0.0][: 2 * history]
    assert min(map(min, sizes[None][history:])) < 80
    assert sizes[None][2 * history] != sizes[0.0][2 * history]


def test_the_sample_size_is_the_papers_bound() -> None:
    draw = np.random.default_rng(0)
    c, h, d, p = 40, 3, 2, 2
    loss, lr, sigma, bend = (draw.uniform(0.05, 0.5, c) for _ in range(4))
    gradient, slope = draw.standard_normal((c, d)), draw.standard_normal((c, p, d))
    moved = draw.standard_normal((c, h, d)) * np.geomspace(0.01, 3, c)[:, None, None]
    phi, failure, cap = 0.1, 0.05, 1000
    size = AdaptiveSampleSize(cap, phi, failure, None)
    arguments = (torch.as_tensor(a) for a in (lr, loss, gradient, slope, moved, sigma, bend))
    found = size(h, *arguments, min_samples=5)
    seen = set()
    for i in range(c):
        way, steep, g = np.linalg.norm(moved[i]), np.linalg.norm(slope[i]), np.linalg.norm(gradient[i])
        above = 2 * (2 * loss[i] ** 2 * h * way**-2 + steep**2) * sigma[i] * math.log(2 / failure)
        below = 2 * phi - bend[i] ** 2 * lr[i] ** 2 * g**4 * h**6 * way**2 * loss[i] ** 2
        n = cap if below <= 0 else min(max(math.ceil(above / below), 5), cap)
        seen.add("cap" if below <= 0 else "bound" if n < cap else "large")
        assert found[i].item() == n
    assert seen >= {"cap", "bound", "large"}


class Undeclared(Shift):
    def __call__(self, batch, theta):
        return batch


@pytest.mark.parametrize(
    ("options", "shift", "message"),
    [
        ({}, Undeclared(), "Undeclared does not declare"),
        ({"estimator": "fractions"}, None, "use shift=contribution"),
        ({"estimator": "coefficients"}, None, "needs targets, which dataset=gaussian_mean does not have"),
    ],
)
def test_an_estimator_that_cannot_be_is_refused(options, shift, message) -> None:
    with pytest.raises(ConfigError, match=message):
        mean_estimation(PoFL(**options), **({} if shift is None else {"shift": shift}))
    labels = Dataset("labels", torch.zeros(4, 2), torch.arange(4) % 2, classes=2)
    with pytest.raises(ConfigError, match="needs numbers as targets"):
        Simulation(labels, Linear, clients=2, local=PoFL(estimator="mean_y"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "mean"}, r"estimator='mean' is unknown"),
        ({"variance": 0.0}, r"variance"),
        ({"box": [1, 0]}, "lower edge first"),
        ({"box": [1, 1]}, "lower edge first"),
        ({"box": [1]}, "two numbers"),
        ({"box": [0, 1], "ball": 2.0}, "exclude each other"),
        ({"ball": 0.0}, r"ball"),
        ({"server_method": "median"}, r"server_method"),
        ({"server_derivative": True, "server_method": "regression", "history": 1}, "history of at least 2"),
        ({"max_samples": 10}, "adaptive_samples=true"),
        ({"adaptive_samples": True, "batch_size": None}, "no cap"),
        ({"adaptive_samples": True, "tolerance": 0.0}, r"tolerance"),
        ({"adaptive_samples": True, "failure": 1.5}, r"failure"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ProFL(**options)


def test_one_client_alone() -> None:
    options = {"clients": 1, "shift": Location(epsilons=[0.5]), "strategy": FedAvg(), "contamination": None}
    local = ProFL(lr=0.2, steps=4, batch_size=100, history=3, box=[-50, 50])
    assert torch.isfinite(mean_estimation(local, **options).run().state.model).all()
