"""Runs on data that drift, against a loop over clients and samples, and against closed forms of mean estimation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from resumable import QUIET
from torch import nn

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Bernoulli, Uniform
from fedsim.availability.clock import Events
from fedsim.core import ConfigError
from fedsim.core.errors import CheckpointError
from fedsim.data.datasets import Dataset, GaussianMean
from fedsim.data.drift import Abrupt, ByClient, Cyclic, Linear, RandomWalk, Replay
from fedsim.data.partition import Dirichlet
from fedsim.evaluation.drifting_test_set import DriftingTestSet
from fedsim.evaluation.performative import Risk
from fedsim.evaluation.performative.reference_path import track_reference_points
from fedsim.evaluation.performative.references import find_replicate_references
from fedsim.evaluation.personal import Personal
from fedsim.local import PG, SGD
from fedsim.models import Mean
from fedsim.run.together import run_together
from fedsim.shift import Contribution, Location
from fedsim.strategies import FedBuff

DOUBLE = Execution(dtype="float64")
EVERY = EvaluationOptions(every=1, client_samples=100)
SIZES, CLASSES, FEATURES = (7, 4, 9), 3, 2


class Softmax(nn.Module):
    """Multinomial logistic regression that starts at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.layer(x)


def blobs() -> Dataset:
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(3), SIZES)
    x, y = draw.standard_normal((len(owners), FEATURES)), draw.integers(0, CLASSES, len(owners))
    test_x, test_y = draw.standard_normal((8, FEATURES)), draw.integers(0, CLASSES, 8)
    tensors = [torch.as_tensor(values) for values in (x, y, test_x, test_y)]
    return Dataset("blobs", *tensors, classes=CLASSES, owners=torch.as_tensor(owners))


def drifted(moves, amount, x, y, fractions):
    """The samples x [n, p], y [n] of one client and their weights, moved by a number."""
    weight = np.ones(len(y))
    if moves == "features":
        x = x + amount * np.array([1.0, -0.5])
    elif moves == "rotation":
        cos, sin = np.cos(np.deg2rad(amount)), np.sin(np.deg2rad(amount))
        x = x @ np.array([[cos, sin], [-sin, cos]])
    elif moves == "targets":
        y = (y + int(np.rint(amount))) % CLASSES
    else:
        tilt = np.exp(amount * np.array([-1.0, 0.0, 1.0]))
        weight = (tilt / (fractions @ tilt))[y]
    return x, y, weight


def loss_and_gradient(theta, x, y, weight):
    w, b = theta[: CLASSES * FEATURES].reshape(CLASSES, FEATURES), theta[CLASSES * FEATURES :]
    scores = x @ w.T + b
    scores = scores - scores.max(1, keepdims=True)
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    share = weight / weight.sum()
    delta = (p - np.eye(CLASSES)[y]) * share[:, None]
    return -share @ np.log(p[np.arange(len(y)), y]), np.concatenate([(delta.T @ x).ravel(), delta.sum(0)])


MOVES = {"features": 0.3, "rotation": 20.0, "targets": 0.6, "labels": 0.4}


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["vmap", "loop", "fused"])
@pytest.mark.parametrize("moves", MOVES)
def test_training_and_evaluation_follow_a_loop_over_clients(moves, executor):
    speed, factors, rounds, rate = MOVES[moves], [1.0, -0.5, 2.0], 4, 0.5
    options = {"direction": [1.0, -0.5]} if moves == "features" else {}
    data = blobs()
    simulation = Simulation(
        data, Softmax, clients=3, local=SGD(lr=rate, steps=2, batch_size=None), rounds=rounds, seeds=[0, 5],
        drift=Linear(speed, moves=moves, factors=factors, **options), evaluation=EVERY,
        execution=Execution(dtype="float64", executor=executor),
    )  # fmt: skip
    start = simulation.initial_state().model.numpy()
    result = simulation.run()
    x, y, owners = data.train_x.numpy(), data.train_y.numpy(), data.owners.numpy()
    test_x, test_y = data.test_x.numpy(), data.test_y.numpy()
    of_test = np.bincount(test_y, minlength=CLASSES) / len(test_y)
    shares = [np.bincount(y[owners == i], minlength=CLASSES) / SIZES[i] for i in range(3)]

    def samples(i, t):
        return drifted(moves, factors[i] * speed * t, x[owners == i], y[owners == i], shares[i])

    for r in range(2):
        theta = start[r]
        rows = [row for row in result.history if row["seed"] == (0, 5)[r]]
        for t in range(rounds + 1):
            train = np.mean([loss_and_gradient(theta, *samples(i, t))[0] for i in range(3)])
            assert rows[t]["train_loss"] == pytest.approx(train, abs=1e-10)
            test = 0.0
            for j in range(len(test_y)):
                amount = factors[j % 3] * speed * t
                one_x, one_y, weight = drifted(moves, amount, test_x[j : j + 1], test_y[j : j + 1], of_test)
                test += weight[0] * loss_and_gradient(theta, one_x, one_y, np.ones(1))[0] / len(test_y)
            assert rows[t]["test_loss"] == pytest.approx(test, abs=1e-10)
            if t == rounds:
                break
            ends = []
            for i in range(3):
                local = theta
                for _ in range(2):
                    local = local - rate * loss_and_gradient(local, *samples(i, t))[1]
                ends.append(local)
            theta = np.mean(ends, axis=0)
        assert np.abs(result.state.model.numpy()[r] - theta).max() < 1e-10


def test_a_test_sample_is_weighted_by_the_test_sets_fractions_as_these_are_for_its_client():
    """Sample j drifts like client j mod m, and belongs to none: its class has the fraction of the whole test set."""
    data, speed, factors, t = blobs(), 0.4, [1.0, -0.5, 2.0], 3
    simulation = Simulation(
        data, Softmax, clients=3, drift=Linear(speed, moves="labels", factors=factors), seeds=(0, 5), execution=DOUBLE
    )
    labels = data.test_y.numpy()
    fractions = np.bincount(labels, minlength=CLASSES) / len(labels)
    amounts = [factors[j % 3] * speed * t for j in range(len(labels))]
    expected = [drifted("labels", amounts[j], None, labels[j : j + 1], fractions)[2][0] for j in range(len(labels))]
    batches = DriftingTestSet(simulation.data).batches({"x": data.test_x, "y": data.test_y}, 0, t)
    assert len(batches) == 2
    for batch in batches:
        assert batch["weight"].tolist() == pytest.approx(expected)


def test_the_global_model_has_the_same_training_loss_as_a_personal_model_in_each_round():
    history = Simulation(
        blobs(), Softmax, clients=3, local=SGD(lr=0.1, steps=1), rounds=2, drift=Linear(0.7, moves="features"),
        partition=Dirichlet(1.0, "per_class", validation=0.3), personal=Personal(over="all"),
        evaluation=EVERY, execution=DOUBLE,
    ).run(tracking=QUIET).history  # fmt: skip
    for row in history:
        assert row["global_training_loss"] == pytest.approx(row["train_loss"], abs=1e-12)
    assert len({row["train_loss"] for row in history}) == 3


def timeless(history):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


def same_numbers(first, second):
    for field in dataclasses.fields(first.state):
        assert torch.equal(getattr(first.state, field.name), getattr(second.state, field.name)), field.name
    shared = set(first.history[0]) & set(second.history[0])
    for a, b in zip(timeless(first.history), timeless(second.history), strict=True):
        for name in shared - {"seconds"}:
            assert a[name] == b[name] or (a[name] != a[name] and b[name] != b[name]), name


STILL = {
    "linear": lambda moves: Linear(0.0, moves=moves),
    "cyclic": lambda moves: Cyclic(0.0, moves=moves),
    "abrupt": lambda moves: Abrupt(0.0, [2], moves=moves),
    "random_walk": lambda moves: RandomWalk(0.0, moves=moves),
    "by_client": lambda moves: ByClient(0.0, moves=moves),
    "replay": lambda moves: Replay({"round": [0, 1], "displacement": [1.0, 2.0]}, 0.0, moves=moves),
}


@pytest.mark.slow
@pytest.mark.parametrize("moves", MOVES)
@pytest.mark.parametrize("name", STILL)
def test_a_drift_of_speed_zero_is_no_drift_bit_for_bit(name, moves):
    def run(drift):
        return Simulation(
            blobs(), Softmax, clients=3, local=SGD(lr=0.3, epochs=1, batch_size=3), rounds=3, seeds=[0, 1],
            availability=Bernoulli(Uniform(0.6)), drift=drift, evaluation=EVERY,
        ).run()  # fmt: skip

    same_numbers(run(STILL[name](moves)), run(None))


@pytest.mark.slow
@pytest.mark.parametrize("name", STILL)
def test_a_stream_with_a_shift_that_drifts_by_zero_is_the_same_bit_for_bit(name):
    def run(drift):
        return mean_estimation(drift, shift=Location(0.5), std=1.0, rounds=3, evaluation=EVERY).run()

    still, none = run(STILL[name]("features")), run(None)
    same_numbers(still, none)
    assert still.history[-1]["tracking_error"] == none.history[-1]["distance_to_ps"]


def mean_estimation(drift, shift=None, std=0.0, steps=1, rate=0.5, clients=2, seeds=(0, 1), **options):
    return Simulation(
        GaussianMean(clients, mean=1.0, variance=0.0, std=std), Mean, clients=clients, shift=shift, drift=drift,
        local=SGD(lr=rate, steps=steps, batch_size=1), seeds=seeds, **{"execution": DOUBLE} | options,
    )  # fmt: skip


@pytest.mark.slow
def test_replicates_with_different_speeds_are_apart():
    def run(speed, seeds):
        drift = Linear(speed, moves="labels", spread=0.5)
        return Simulation(
            blobs(), Softmax, clients=3, local=SGD(lr=0.3, steps=2, batch_size=4), rounds=4, seeds=seeds, ridge=0.1,
            drift=drift, availability=Bernoulli(Uniform(0.7)), evaluation=EVERY, execution=DOUBLE,
        ).run()  # fmt: skip

    together = run([0.1, -0.4], [3, 4])
    for r, (speed, seed) in enumerate([(0.1, 3), (-0.4, 4)]):
        alone = run(speed, [seed])
        assert torch.allclose(together.state.model[r], alone.state.model[0], atol=1e-12)
        rows = [row for row in together.history if row["seed"] == seed]
        for name in ("train_loss", "test_loss", "tracking_error", "dynamic_regret"):
            assert np.allclose([row[name] for row in rows], [row[name] for row in alone.history], atol=1e-9), name


@pytest.mark.slow
def test_random_walks_of_replicates_are_those_of_their_seeds():
    def run(seeds):
        return mean_estimation(RandomWalk(0.3), Location(0.3), seeds=seeds, rounds=6).run().state.model

    together = run((5, 9, 5))
    assert torch.equal(together[:1], together[2:])
    assert torch.equal(together[1:2], run((9,)))


def test_too_few_speeds_are_refused():
    with pytest.raises(ConfigError, match=r"drift\.speed has 3 entries, but there are 2 seeds; give one per seed"):
        mean_estimation(Linear([0.1, 0.2, 0.3]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random_walk", "labels"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name, tmp_path):
    def simulation(rounds):
        if name == "random_walk":
            return mean_estimation(RandomWalk(0.3), Location(0.3), std=1.0, rounds=rounds, evaluation=EVERY)
        return Simulation(
            blobs(), Softmax, clients=3, local=SGD(lr=0.3, epochs=1, batch_size=3), rounds=rounds, seeds=[0, 1],
            availability=Bernoulli(Uniform(0.6)), drift=Cyclic(0.5, 5, moves="labels", spread=0.3), evaluation=EVERY,
            ridge=0.1,
        )  # fmt: skip

    straight = simulation(6).run(tmp_path / "straight", tracking=QUIET)
    simulation(3).run(tmp_path / "parts", tracking=QUIET)
    resumed = simulation(6).run(tmp_path / "parts", resume=True, tracking=QUIET)
    same_numbers(resumed, straight)
    assert straight.history[-1]["dynamic_regret"] > 0


@pytest.mark.slow
def test_a_resumed_run_must_meet_the_same_record(tmp_path):
    path = tmp_path / "drift.csv"
    path.write_text("round,displacement\n0,0\n3,1\n")
    mean_estimation(Replay(str(path)), rounds=2).run(tmp_path / "run", tracking=QUIET)
    path.write_text("round,displacement\n0,0\n3,2\n")
    with pytest.raises(CheckpointError, match=r"the recorded drift \(displacement\) changed since"):
        mean_estimation(Replay(str(path)), rounds=4).run(tmp_path / "run", resume=True, tracking=QUIET)


def rate_of_convergence(deploy, rate, steps, epsilon):
    """ρ of θ_{t+1} = ρ θ_t + (1 − ρ) m_t / (1 − ε): of E steps on data that react to each step, or once per round."""
    if deploy == "step":
        return (1 - rate * (1 - epsilon)) ** steps
    kept = (1 - rate) ** steps
    return kept + epsilon * (1 - kept)


@pytest.mark.slow
@pytest.mark.parametrize("deploy", ["step", "round"])
@pytest.mark.parametrize("epsilon", [0.0, 0.4, -0.7])
def test_the_tracking_error_of_linear_drift_is_its_closed_form(deploy, epsilon):
    """With m_t = m_0 + v t and e_t = θ_t − m_t / (1 − ε), E steps of full participation give e_{t+1} = ρ e_t −
    v / (1 − ε), so that |e| = v / ((1 − ε)(1 − ρ)) at rest. The risk on the data of θ is ½ (θ − m_t − ε θ)² + ½ σ²,
    and its minimum is at θ^PO = θ^PS, so a round's regret is ½ (1 − ε)² e² = ½ (v / (1 − ρ))² at rest.
    """
    speed, rate, steps, rounds = 0.2, 0.3, 3, 60
    shift = Location(epsilon, deploy=deploy) if epsilon else None
    history = (
        mean_estimation(Linear(speed), shift, steps=steps, rate=rate, rounds=rounds, evaluation=EVERY).run().history
    )
    rho = rate_of_convergence(deploy, rate, steps, epsilon)
    rest = speed / ((1 - epsilon) * (1 - rho))
    last, before = history[-1], history[-3]
    assert last["tracking_error"] == pytest.approx(rest, rel=1e-6)
    assert last["dynamic_regret"] - before["dynamic_regret"] == pytest.approx((speed / (1 - rho)) ** 2 / 2, rel=1e-6)
    error, regret = -1 / (1 - epsilon), 0.0
    for t in range(1, rounds + 1):
        error = rho * error - speed / (1 - epsilon)
        regret += ((1 - epsilon) * error) ** 2 / 2
        assert history[2 * t]["tracking_error"] == pytest.approx(abs(error), abs=1e-9)
        assert history[2 * t]["dynamic_regret"] == pytest.approx(regret, abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.0, 0.4])
def test_cyclic_drift_is_filtered_with_one_pole(epsilon):
    """θ_{t+1} = ρ θ_t + (1 − ρ) θ^PS_t with θ^PS_t = (1 + a sin ωt) / (1 − ε): at rest θ_t oscillates with amplitude
    a/(1 − ε) · (1 − ρ) / |e^{iω} − ρ|, and e_t = θ_t − θ^PS_t with a/(1 − ε) · |(1 − ρ)/(e^{iω} − ρ) − 1|.
    """
    period, rate = 12, 0.3
    shift = Location(epsilon) if epsilon else None
    drift, rho = Cyclic(0.8, period), rate_of_convergence("step", rate, 1, epsilon)
    history = mean_estimation(drift, shift, rate=rate, rounds=10 * period, evaluation=EVERY).run().history
    turn = np.exp(2j * np.pi / period)
    response = 0.8 / (1 - epsilon) * ((1 - rho) / (turn - rho) - 1)
    for t in range(9 * period, 10 * period):
        expected = abs((response * turn**t).imag)
        assert history[2 * t]["tracking_error"] == pytest.approx(expected, abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.0, 0.4])
def test_the_tracking_error_of_a_random_walk_has_its_variance(epsilon):
    """With m_{t+1} = m_t + σ_w n_t the error obeys e_{t+1} = ρ e_t − σ_w n_t / (1 − ε), so Var(e) = σ_w² / ((1 − ε)²
    (1 − ρ²)) at rest; noise of variance σ² of the samples adds s² / (1 − ρ²) with s² = η² σ² / m for one step on one
    sample of each of m clients. 128 walks of 480 rounds give the variance within 0.7 % (one standard deviation).
    """
    std, rate, noise, clients, rounds, burn_in = 0.3, 0.7, 0.4, 2, 510, 30
    seeds = tuple(range(128))

    shift = Location(epsilon, references="none") if epsilon else None
    drift = RandomWalk(std, references="none")
    simulation = mean_estimation(drift, shift, std=noise, rate=rate, seeds=seeds, rounds=rounds, clients=clients)
    state, squares = simulation.initial_state(), []
    memory = simulation.initial_memory(state)
    replicate = np.arange(len(seeds))
    for t in range(rounds):
        cohort = simulation.availability.sample(t)
        report = simulation.trainer.run(simulation.strategy.start(state, cohort), cohort, t, state.model, memory)
        state = simulation.strategy.aggregate(state, report, t)
        mean = 1.0 + simulation.data.drift.path(np.full(len(seeds), t + 1), replicate)
        if t >= burn_in:
            squares.append((state.model[:, 0].numpy() - mean / (1 - epsilon)) ** 2)
    rho = rate_of_convergence("step", rate, 1, epsilon)
    expected = (std**2 / (1 - epsilon) ** 2 + rate**2 * noise**2 / clients) / (1 - rho**2)
    assert np.mean(squares) == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_the_error_on_a_realised_walk_obeys_its_recursion():
    """e_{t+1} = ρ e_t − (m_{t+1} − m_t) / (1 − ε) without noise of samples, on each path."""
    epsilon, rate, steps, rounds = 0.4, 0.3, 2, 30
    simulation = mean_estimation(
        RandomWalk(0.5), Location(epsilon), rate=rate, steps=steps, rounds=rounds, evaluation=EVERY
    )
    history, rho = simulation.run().history, rate_of_convergence("step", rate, steps, epsilon)
    for r in range(2):
        path = simulation.data.drift.path(np.arange(rounds + 1), np.full(rounds + 1, r))
        error = -1 / (1 - epsilon)
        for t in range(rounds):
            error = rho * error - (path[t + 1] - path[t]) / (1 - epsilon)
            assert history[2 * (t + 1) + r]["tracking_error"] == pytest.approx(abs(error), abs=1e-9)


@pytest.mark.slow
def test_clients_that_drift_apart_pull_partial_participation_away(Scripted):
    """If only client 0 participates, the model follows m_{0,t}, and the error to the mean over clients grows linearly
    with half the difference of the speeds.
    """
    counts = np.array([[[1, 0], [1, 0]]])
    drift = Linear(0.1, factors=[1.0, 3.0])
    simulation = mean_estimation(drift, rate=1.0, availability=Scripted(counts), rounds=20, evaluation=EVERY)
    errors = [row["tracking_error"] for row in simulation.run().history[::2]]
    assert np.allclose(np.diff(errors)[2:], 0.1 * (3 - 1) / 2, atol=1e-9)


def test_rows_of_different_rounds_have_the_samples_of_their_rounds():
    """As clock=events plans them: a client that began in round 3 has the law of round 3, whatever the server's is."""
    data = blobs()
    drift = Linear(0.5, factors=[1.0, 2.0, 3.0])
    simulation = Simulation(
        data, Softmax, clients=3, drift=drift, local=SGD(lr=0.1, steps=2, batch_size=3), seeds=[0, 1], execution=DOUBLE
    )
    batches, everybody = simulation.trainer.batches, np.ones((2, 3))
    cohort = simulation.federation.make_cohort(everybody, everybody)
    rounds = np.array([3, 0, 7, 2, 3, 5])
    mixed = batches.plan(cohort, 9, rounds).chunk(np.arange(6))
    for step in range(2):
        joint = mixed.batch(step, 0, 6, torch.float64)
        for row, t in enumerate(rounds):
            alone = batches.plan(cohort, int(t)).chunk(np.arange(6)).batch(step, row, row + 1, torch.float64)
            assert torch.equal(joint["x"][row], alone["x"][0])


def test_a_batch_that_is_reused_keeps_the_law_of_its_draw():
    """With shift.redraw=N a stream's batch is drawn in rounds 0, N, 2N, …, so its law is that of these rounds."""
    simulation = mean_estimation(
        Linear(1.0), Location(0.5, deploy="round", redraw=4, references="none"), rate=1.0, rounds=8
    )
    batches, everybody = simulation.trainer.batches, np.ones((2, 2))
    cohort = simulation.federation.make_cohort(everybody, everybody)
    values = [
        batches.plan(cohort, t).chunk(np.arange(4)).batch(0, 0, 4, torch.float64)["x"][0].item() for t in range(8)
    ]
    assert np.allclose(values, [1, 1, 1, 1, 5, 5, 5, 5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local": PG(lr=0.1)}, "drift=Linear displaces the samples of each client, and local=PG"),
        ({"personal": Personal(over="all", newcomers=1)}, "personal.newcomers=1 join after the last round"),
        ({"shift": Contribution()}, "shift=Contribution knows the clients' groups as they are in round 0"),
    ],
)
def test_parts_that_know_the_samples_of_round_0_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Simulation(blobs(), Softmax, clients=3, drift=Linear(), partition=Dirichlet(5.0, validation=0.3), **options)


@pytest.mark.slow
def test_asynchronous_runs_drift_too():
    """Without a shift updates are computed when they arrive, with one when their clients start: on the same samples."""

    def run(drift, epsilon=None):
        shift = None if epsilon is None else Location(epsilon, references="none")
        options = {"strategy": FedBuff(buffer=2), "clock": Events(compute_spread=0.5, jitter=0.3)}
        return mean_estimation(drift, shift, std=1.0, rate=0.3, rounds=40, clients=4, **options).run().state.model

    assert torch.equal(run(Linear(0.0), 0.4), run(None, 0.4))
    assert (run(Linear(0.1)) - run(None)).abs().min() > 1
    assert torch.allclose(run(Linear(0.1)), run(Linear(0.1), 0.0), atol=1e-12)


@pytest.mark.slow
def test_runs_in_lockstep_have_the_numbers_that_they_have_alone():
    def simulations():
        for speed, moves in ((0.3, "features"), (-0.2, "labels"), (0.0, "features")):
            yield Simulation(
                blobs(), Softmax, clients=3, local=SGD(lr=0.3, steps=2, batch_size=4), rounds=4, seeds=[0, 1],
                drift=Linear(speed, moves=moves), ridge=0.1, evaluation=EVERY, execution=DOUBLE,
            )  # fmt: skip

    for together, simulation in zip(run_together(list(simulations())), simulations(), strict=True):
        alone = simulation.run()
        assert torch.allclose(together.state.model, alone.state.model, atol=1e-12)
        assert together.history[-1]["dynamic_regret"] == pytest.approx(alone.history[-1]["dynamic_regret"], abs=1e-9)


def test_where_the_gradient_is_affine_one_newton_step_follows_the_reference_points():
    """θ^PS = θ^PO = m_t / (1 − ε); the slopes of round 0 are used again, since they are exact."""
    simulation = mean_estimation(Linear(0.2), Location(0.4))
    risk = Risk(simulation.model, simulation.shift, simulation.data, 0)
    start = torch.zeros(1, dtype=torch.float64)
    before = find_replicate_references(risk.at(0), start, simulation.shift.box)
    before.slopes = {
        "distance_to_ps": risk.at(0).decoupled_jacobian(before.points["distance_to_ps"]),
        "distance_to_po": risk.at(0).performative_hessian(before.points["distance_to_po"]),
    }
    after = track_reference_points(risk, before, 0, 5)
    for name, slope in before.slopes.items():
        assert after.points[name].item() == pytest.approx(before.points[name].item() + 5 * 0.2 / 0.6, abs=1e-9)
        assert after.slopes[name] is slope
