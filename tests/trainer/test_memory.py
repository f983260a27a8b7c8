"""What rules and shifts remember, rules that step whole chunks, gradients sample by sample: under every executor."""

from __future__ import annotations

import ctypes
import functools
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import vector_to_parameters

from fedsim import EvaluationOptions, Execution, Simulation
from fedsim.availability import Bernoulli, Sine, Uniform
from fedsim.core import ConfigError
from fedsim.data.datasets import Dataset, GaussianMean
from fedsim.local import SGD, Inverse
from fedsim.models import MLP, Linear, Mean
from fedsim.run.tracking import Tracking
from fedsim.shift import Location
from fedsim.strategies import FedAvg, FedAWE, FedProx, MimeLite, Scaffold
from fedsim.trainer.device_memory import raise_malloc_thresholds

SIZES = (1, 9, 4, 3, 8)
QUIET = Tracking(progress="none", tensorboard=False)
double = functools.partial(Execution, dtype="float64")
WAYS = {
    "vmap": double("vmap"),
    "vmap in chunks": double("vmap", chunk=3),
    "loop": double("loop", workers=1),
    "loop with two workers": double("loop", workers=2, chunk=2),
}


def labelled() -> Dataset:
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    x, y = torch.as_tensor(draw.standard_normal((len(owners), 4))), torch.as_tensor(draw.integers(0, 3, len(owners)))
    return Dataset("labelled", x, y, classes=3, owners=torch.as_tensor(owners))


def simulation_of(model=Linear, **options) -> Simulation:
    given = {"clients": len(SIZES), "seeds": (3, 5), "rounds": 4, "evaluation": EvaluationOptions(every=1)}
    options = given | {"execution": double()} | options
    return Simulation(options.pop("dataset", None) or labelled(), model, **options)


class Together(SGD):
    """SGD written for chunks: x ← x − η g on [c, d]."""

    batched = True

    def step(self, carry, batch, lr, objective):
        gradient, loss = objective.gradient(carry["params"], batch)
        return carry | {"params": torch.addcmul(carry["params"], lr[:, None], gradient, value=-1)}, loss


class Counting(SGD):
    """SGD that sums its losses and counts its steps over all rounds, and notes the last round it saw."""

    needs_round = True

    def memory(self, federation, dimension):
        number = torch.zeros(federation.num_memory_rows, dtype=torch.int64, device=federation.device)
        trace = torch.zeros(federation.num_memory_rows, dimension, dtype=federation.dtype, device=federation.device)
        return {"steps": number, "seen": number - 1, "trace": trace}

    def step(self, carry, batch, lr, objective):
        carry = carry | {"steps": carry["steps"] + 1, "seen": carry["round"], "trace": carry["trace"] + carry["params"]}
        return super().step(carry, batch, lr, objective)


class CountingTogether(Counting):
    """The same step works on chunks, since it is elementwise."""

    batched = True

    def step(self, carry, batch, lr, objective):
        carry, loss = super().step(carry, batch, lr[:, None], objective)
        return carry, loss


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_rule_that_steps_whole_chunks_is_the_rule_that_steps_one_client(way):
    options = {"lr": 0.2, "epochs": 2, "batch_size": 4, "drop_last": False, "schedule": Inverse(offset=3.0)}
    model = functools.partial(MLP, hidden=(5,))
    runs = [simulation_of(model, local=rule(**options), strategy=FedAWE(), execution=WAYS[way]).run()
            for rule in (SGD, Together)]  # fmt: skip
    assert torch.equal(runs[0].state.models, runs[1].state.models)
    assert [row["train_loss"] for row in runs[0].history] == [row["train_loss"] for row in runs[1].history]


@pytest.mark.parametrize("rule", [Counting, CountingTogether])
@pytest.mark.parametrize("way", WAYS)
def test_memory_is_each_clients_own_and_survives_rounds_without_it(way, rule, Scripted, play):
    """Steps taken, the last round, and the sum of all parameters met, against the rounds seen from outside."""
    counts = np.zeros((4, 2, 5))
    counts[0, 0, [0, 2]] = counts[1, 0, 1] = counts[1, 1, [2, 4]] = counts[3, 0, [0, 1]] = 1  # round 2: nobody
    given = {} if rule.batched else {"anchor", "proximal"}
    local, strategy = rule(lr=0.3, epochs=1, batch_size=4), FedProx(mu=0.0) if given else FedAvg()
    simulation = simulation_of(local=local, availability=Scripted(counts), strategy=strategy, execution=WAYS[way])
    alike = simulation_of(local=SGD(lr=0.3, epochs=1, batch_size=4), availability=Scripted(counts), strategy=FedAvg())
    memory = simulation.trainer.initial_memory(simulation.initial_state().model)
    simulation.trainer.initial_memory = lambda model: memory  # so that the rounds below leave theirs here
    per_pass = np.maximum(np.array(SIZES) // 4, 1)
    for played, plain in zip(play(simulation), play(alike), strict=True):
        torch.testing.assert_close(played.after.model, plain.after.model, rtol=0, atol=1e-12)
        assert set(played.report.carry) == {"params", *given}  # strategies meet what they gave
        steps = (counts[: played.t + 1].sum(0) * per_pass).reshape(-1)
        assert memory.clients["steps"].tolist() == steps.tolist()
        seen = [max((t for t in range(played.t + 1) if counts[t].reshape(-1)[v]), default=-1) for v in range(10)]
        assert memory.clients["seen"].tolist() == seen
    first = simulation.initial_state().model[0]
    trace = memory.clients["trace"]
    torch.testing.assert_close(trace[[0]], first[None] + played.before.model[:1])  # one step in rounds 0 and 3
    assert not trace[[3, 5, 6, 8]].any()


class Remembering(FedAvg):
    def start(self, state, cohort):
        return {"params": cohort.broadcast(state.model), "steps": cohort.multiplicity}


def test_names_that_collide_are_refused_before_the_first_round():
    with pytest.raises(ConfigError, match=r"steps in the memory of local=Counting.*rename"):
        simulation_of(local=Counting(), strategy=Remembering()).run()
    with pytest.raises(ConfigError, match="hands correction to the local rule, but NoExtras does not use it"):
        simulation_of(local=type("NoExtras", (Together,), {"supported_keys": frozenset()})(), strategy=Scaffold()).run()

    class Answered(Counting):
        def memory(self, federation, dimension):
            return {"answered": torch.zeros(federation.num_memory_rows)}

    stream = {"dataset": GaussianMean(clients=5), "model": Mean, "shift": Location(0.5, inertia=0.5)}
    with pytest.raises(ConfigError, match="both remember 'answered'"):
        simulation_of(local=Answered(), **stream).run()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", [Counting, CountingTogether])
@pytest.mark.parametrize("deploy", ["step", "round"])
def test_an_interrupted_run_remembers(rule, deploy, tmp_path):
    """Four rounds are two and two more, bit for bit, memory and all."""

    def run(folder, rounds, resume=False):
        simulation = simulation_of(
            Mean, dataset=GaussianMean(clients=5), local=rule(lr=0.2, steps=3, batch_size=4), rounds=rounds,
            availability=Bernoulli(Uniform(0.5), Sine()), strategy=FedAWE(), shift=Location(0.7, 0.1, deploy=deploy,
            inertia=0.6),
        )  # fmt: skip
        memories, initial = [], simulation.trainer.initial_memory
        simulation.trainer.initial_memory = lambda model: memories.append(initial(model)) or memories[-1]
        result = simulation.run(tmp_path / folder, resume=resume, tracking=QUIET)
        return result, memories[0].named_tensors()

    straight, remembered = run("straight", 4)
    run("parts", 2)
    resumed, again = run("parts", 4, resume=True)
    assert torch.equal(resumed.state.models, straight.state.models)
    assert (
        set(again)
        == set(remembered)
        == {f"clients.{n}" for n in ("steps", "seen", "trace")}
        | {"clients.answered" if deploy == "step" else "server.answered"}
    )
    assert all(torch.equal(again[name], remembered[name]) for name in remembered)
    drop = ("seconds",)
    assert [{k: v for k, v in r.items() if k not in drop} for r in resumed.history] == [
        {k: v for k, v in r.items() if k not in drop} for r in straight.history
    ]


@pytest.mark.parametrize("deploy", ["step", "round"])
@pytest.mark.parametrize("way", WAYS)
def test_data_answer_with_inertia(way, deploy, Scripted, play):
    """θ̃ ← λ θ̃ + (1 − λ) θ at every deployment of θ, starting at the initial model; z + ε_i θ̃, by hand."""
    inertia, epsilons, lr = 0.7, [0.5, -0.2, 0.9], 0.2
    counts = np.array([[[1, 1, 0]], [[0, 0, 0]], [[1, 0, 1]], [[1, 1, 1]]])
    simulation = Simulation(
        GaussianMean(clients=3), functools.partial(Mean, start=2.0), clients=3, availability=Scripted(counts), rounds=4,
        local=SGD(lr=lr, steps=3, batch_size=4), shift=Location(epsilons=epsilons, deploy=deploy, inertia=inertia),
        execution=WAYS[way],
    )  # fmt: skip
    own, server = np.full(3, 2.0), 2.0
    for played in play(simulation):
        model = played.before.model[0, 0].item()
        server = inertia * server + (1 - inertia) * model  # deployed in every round, also where nobody came
        for position, client in enumerate(played.report.cohort.host_index.rows):
            chunk = simulation.trainer.batches.plan(played.report.cohort, played.t).chunk(np.array([position]))
            theta = model
            for step in range(3):
                own[client] = inertia * own[client] + (1 - inertia) * theta
                answered = own[client] if deploy == "step" else server
                z = chunk.batch(step, 0, 1, torch.float64)["x"].mean().item() + epsilons[client] * answered
                theta -= lr * (theta - z)
            assert played.report.end[position, 0].item() == pytest.approx(theta, abs=1e-10)


def test_nothing_is_remembered_without_need():
    for shift in (None, Location(0.5), Location(0.5, deploy="round")):
        simulation = simulation_of(Mean, dataset=GaussianMean(clients=5), local=SGD(steps=1), shift=shift)
        assert simulation.trainer.initial_memory(simulation.initial_state().model).named_tensors() == {}


@pytest.mark.parametrize("value", [1, 1.0, -0.1, 1.5])
def test_inertia_lies_below_one(value):
    with pytest.raises(ConfigError, match=r"inertia"):
        Location(0.5, inertia=value)


class PerSample(SGD):
    """Steps along Σ_j j g_j / B, so that every sample's own gradient counts."""

    per_sample = True

    def step(self, carry, batch, lr, objective):
        losses, gradients = objective.per_sample(carry["params"], batch)
        weight = batch["weight"] if "weight" in batch else torch.ones_like(losses)
        share = weight / weight.sum(-1, keepdim=True)
        mean, value = objective.gradient(carry["params"], batch)
        count = share * torch.arange(losses.shape[-1], dtype=lr.dtype)
        off = (share[..., None] * gradients).sum(-2) - mean  # 0: their mean is the gradient
        gradient = (count[..., None] * gradients).sum(-2) + 1e6 * off
        loss = (share * losses).sum(-1)
        return carry | {"params": carry["params"] - 0.1 * gradient}, loss + 1e6 * (value - loss)


class PerSampleTogether(PerSample):
    batched = True


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rule", [PerSample, PerSampleTogether])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_sample_by_sample_are_plain_autograds(way, rule):
    """Against one module and one backward pass per sample, ridge included; padded entries stay out of the way."""
    model, ridge = functools.partial(MLP, hidden=(5,)), 0.3
    local = rule(lr=0.1, steps=1, batch_size=None)
    simulation = simulation_of(model, local=local, ridge=ridge, execution=WAYS[way])
    federation = simulation.federation
    cohort = federation.make_cohort(np.ones((2, 5)), np.ones((2, 5)))
    start = simulation.initial_state().model[cohort.replicate_index]
    start = start + 0.1 * torch.sin(torch.arange(start.numel(), dtype=torch.float64)).reshape_as(start)
    report = simulation.trainer.run(start, cohort, 0, start[:2])
    plan = simulation.trainer.batches.plan(cohort, 0)
    for row in range(10):
        batch = plan.chunk(np.array([row])).batch(0, 0, 1, torch.float64)
        module = model((4,), 3).double()
        vector_to_parameters(start[row].clone(), module.parameters())
        gradients, losses = [], []
        for x, y in zip(batch["x"][0], batch["y"][0], strict=True):
            penalty = 0.5 * ridge * sum(p.square().sum() for p in module.parameters())
            value = nn.functional.cross_entropy(module(x[None]), y[None]) + penalty
            gradients.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(module.parameters()))]))
            losses.append(value.item())
        counted = (torch.arange(len(losses))[:, None] * torch.stack(gradients)).mean(0)
        torch.testing.assert_close(report.end[row], start[row] - 0.1 * counted, rtol=0, atol=1e-7)
        assert report.loss[row].item() == pytest.approx(np.mean(losses), abs=1e-7)


def test_dropout_has_no_gradient_sample_by_sample():
    def dropping(shape, classes):
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))

    with pytest.raises(ConfigError, match="dropout layer '1' draws its mask for a whole batch"):
        simulation_of(dropping, local=PerSample())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_glibc_takes_the_thresholds_of_its_allocator() -> None:
    if getattr(ctypes.CDLL(None), "gnu_get_libc_version", None) is None:
        pytest.skip("another C library")
    assert raise_malloc_thresholds(torch.device("cpu"))
    assert not raise_malloc_thresholds(torch.device("meta"))


@pytest.mark.parametrize(
    ("library", "raised"),
    [
        (types.SimpleNamespace(), False),
        (types.SimpleNamespace(mallopt=lambda option, value: 0), False),
        (types.SimpleNamespace(mallopt=lambda option, value: int(option == -3)), False),
        (types.SimpleNamespace(mallopt=lambda option, value: 1), True),
    ],
    ids=["no mallopt", "refuses", "takes one of two", "takes both"],
)
def test_thresholds_count_as_raised_where_the_library_takes_both(
    monkeypatch: pytest.MonkeyPatch, library: types.SimpleNamespace, raised: bool
) -> None:
    genuine = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *a, **k: library if name is None else genuine(name, *a, **k))
    monkeypatch.setattr("sys.platform", "linux")
    assert raise_malloc_thresholds(torch.device("cpu")) is raised


def test_of_a_stream_clients_answer_with_loss_and_gradient_of_one_batch():
    """Of one sample z of N(0, 1), where ℓ = ½ (θ − z)²: the loss is half the square of the gradient."""
    simulation = Simulation(
        GaussianMean(5), Mean, clients=5, strategy=MimeLite(), local=SGD(lr=0.1, steps=3, batch_size=1),
        execution=Execution(dtype="float64"), seeds=(0, 1),
    )  # fmt: skip
    federation = simulation.federation
    everyone = federation.make_cohort(np.ones((2, 5)), np.ones((2, 5)), 0)
    answer = federation.full_data_oracle(everyone, torch.tensor([[1.0], [2.0]], dtype=torch.float64))
    assert len(answer.gradient.unique()) == 10
    torch.testing.assert_close(answer.loss, answer.gradient[:, 0].square() / 2)
