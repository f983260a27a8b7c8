"""FedRoD's and FedALA's steps against plain autograd, client by client, and where they must be other algorithms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from personal_rules import LOCAL, MODEL, SHAPES, SIZES, double, labelled, simulation_of, watched
from torch import nn

from fedsim.availability import Bernoulli, Sine, Uniform
from fedsim.core import ConfigError
from fedsim.local import SGD, FedALA, FedLC, FedRoD
from fedsim.models.selectors import Head
from fedsim.run.tracking import Tracking
from fedsim.strategies import FedAvg, FedAWE, FedNova, Scaffold

D = sum(shape.numel() for shape in SHAPES.values())
TOP = 3 * 5 + 3  # weights and biases of the last layer, which are the last columns
QUIET = Tracking(progress="none", tensorboard=False)
COINS = {"availability": Bernoulli(Uniform(0.6), Sine()), "rounds": 4}


def halves(x, row):
    """Representation and own scores of an MLP with five hidden units, with plain operations."""
    w, b, v, c = row.split([20, 5, 15, 3])
    hidden = F.relu(x @ w.reshape(5, 4).T + b)
    return hidden, hidden @ v.reshape(3, 5).T + c, (v, c)


def slope(loss, *leaves):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(loss(*leaves), leaves)


class FedRoDClient:
    """The body and the federation's head hear of the margin's loss alone, the own head of the other: detached."""

    memory = "head"

    def __init__(self, initial, mine):
        self.kept = torch.zeros(TOP).double()
        self.margin = 0.8 * torch.log(torch.bincount(mine, minlength=3).double().clamp(min=1e-8))

    def begin(self, row):
        pass

    def step(self, row, x, y, lr):
        def balanced(row):
            return F.cross_entropy(halves(x, row)[1] + self.margin, y)

        def own(head):
            hidden, scores, _ = halves(x, row)
            weight, bias = head[:15].reshape(3, 5), head[15:]
            return F.cross_entropy(scores.detach() + hidden.detach() @ weight.T + bias, y)

        (g,), (p,) = slope(balanced, row), slope(own, self.kept)
        self.kept = self.kept - 1.5 * lr * (p + 0.1 * self.kept)
        return row - lr * (g + 0.1 * row)


class FedALAClient:
    memory = "mixing"

    def __init__(self, initial, mine):
        self.own, self.kept = initial, torch.full((TOP,), 0.9, dtype=torch.float64)

    def begin(self, row):
        self.received, self.taken = row, 0
        return self.mixed()

    def mixed(self):
        v, x = self.own[-TOP:], self.received[-TOP:]
        return torch.cat([self.received[:-TOP], v + (x - v) * self.kept])

    def step(self, row, x, y, lr):
        (g,) = slope(lambda row: F.cross_entropy(halves(x, row)[1], y), row)
        self.taken += 1
        if self.taken <= 2:
            self.kept = (self.kept - 3.0 * g[-TOP:] * (self.received - self.own)[-TOP:]).clamp(0, 1)
            return self.mixed()
        self.own = row - lr * g
        return self.own


RULES = {
    "fedrod": (lambda: FedRoD(tau=0.8, personal_lr=0.3, weight_decay=0.1, **LOCAL), FedRoDClient),
    "fedala": (lambda: FedALA(mixing_steps=2, mixing_lr=3.0, mixing=0.9, **LOCAL | {"epochs": 3}), FedALAClient),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [double("vmap"), double("loop", chunk=3)], ids=["vmap", "loop"])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_plain_autograd_client_by_client(name, way, Scripted, play):
    """Five rounds of ragged clients, one of them empty, one for a replicate: rows, memory, and the model one has."""
    made, client = RULES[name]
    words = ["11100 11010 00000 01101 11111", "00101 11111 00000 00000 10111"]
    counts = np.array([[list(map(int, w)) for w in one.split()] for one in words]).swapaxes(0, 1)
    data = labelled()
    simulation = watched(simulation_of(dataset=data, local=made(), availability=Scripted(counts), rounds=5,
                                       execution=way))  # fmt: skip
    labels = torch.as_tensor(data.train_y).split(list(SIZES))
    starts = simulation.initial_state().model
    clients = [client(starts[r], mine) for r in range(2) for mine in labels]
    rule, moved = simulation.trainer.local_rule, 0.0
    for played in play(simulation):
        cohort = played.report.cohort
        plan = simulation.trainer.batches.plan(cohort, played.t)
        for position, number in enumerate(cohort.host_index.rows):
            one, chunk = clients[number], plan.chunk(np.array([position]))
            begun = one.begin(played.report.start[position])
            row, steps = played.report.start[position] if begun is None else begun, int(chunk.steps[0])
            for step in range(steps):
                batch = chunk.batch(step, 0, 1, torch.float64)
                row = one.step(row, batch["x"][0], batch["y"][0], 0.2 / (played.t * steps + step + 3.0))
            torch.testing.assert_close(played.report.end[position], row, rtol=0, atol=1e-10)
        kept = torch.stack([one.kept for one in clients])
        torch.testing.assert_close(simulation.clients[one.memory], kept, rtol=0, atol=1e-10)
        moved = max(moved, (kept - kept[0, 0]).abs().max().item())
        for number in range(10):
            row, one = played.after.model[number // 5], clients[number]
            mine = {n: value[number] for n, value in simulation.clients.items()} | {"params": row}
            ((weight, found),) = rule.personal(mine)
            assert weight == 1
            if name == "fedrod":
                wanted = torch.cat([row[:-TOP], row[-TOP:] + one.kept])
            else:
                wanted = torch.cat([row[:-TOP], one.own[-TOP:] + (row - one.own)[-TOP:] * one.kept])
                torch.testing.assert_close(mine["personal"], one.own, rtol=0, atol=1e-10)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    assert moved > 1e-2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", [FedAvg(server_lr=0.7), FedAWE(), Scaffold()], ids=lambda s: type(s).__name__)
def test_fedrods_federation_is_that_of_balanced_softmax(strategy):
    """Bit for bit: what travels never hears of the heads that stay."""
    rules = FedLC(margin="balanced", **LOCAL), FedRoD(**LOCAL), FedRoD(personal_lr=0.9, **LOCAL)
    runs = [simulation_of(local=rule, strategy=strategy, **COINS).run().state.model for rule in rules]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_fedala_frozen_at_one_is_fedavg_and_at_nought_fedper():
    options, coins = LOCAL | {"clip": 0.5}, COINS | {"execution": double("loop")}
    plain = simulation_of(local=SGD(**options), **coins).run().state.model
    for layers in (1, 2):
        frozen = FedALA(layers=layers, mixing_steps=0, **options)
        assert torch.equal(simulation_of(local=frozen, **coins).run().state.model, plain)
    per = watched(simulation_of(local=SGD(**options), columns=Head(), **coins))
    body = per.run().state.model
    own = watched(simulation_of(local=FedALA(mixing_steps=0, mixing=0.0, **options), **coins))
    assert torch.equal(own.run().state.model[:, :-TOP], body)
    assert torch.equal(own.clients["personal"][:, -TOP:], per.clients["own columns"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RULES)
def test_replicates_are_alone_as_together_and_interrupted_as_not(name, tmp_path):
    def run(seeds=(3, 5), **options):
        simulation = watched(simulation_of(local=RULES[name][0](), seeds=seeds, execution=double("loop"),
                                           **COINS | options))  # fmt: skip
        return (
            simulation.run(tmp_path, resume=True).state.model if "rounds" in options else simulation.run().state.model
        )

    whole = run()
    torch.testing.assert_close(run((5,))[0], whole[1], rtol=0, atol=1e-12)
    run(rounds=2)
    assert torch.equal(run(rounds=4), whole)


def test_what_cannot_be_is_refused():
    class Ends(nn.Sequential):
        def __init__(self, shape, classes):
            super().__init__(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, classes), nn.ReLU())

    with pytest.raises(ConfigError, match=r"local=fedrod adds the outputs of two heads.*not linear in its last layer"):
        simulation_of(Ends, local=FedRoD())
    with pytest.raises(ConfigError, match=r"local\.layers=3, but the model has 2 with parameters"):
        simulation_of(MODEL, local=FedALA(layers=3))
    with pytest.raises(ConfigError, match=r"mixing_steps=4 leaves none of local_steps=4 to train"):
        FedALA(mixing_steps=4, steps=4)
    with pytest.raises(ConfigError, match=r"Scaffold hands correction to the local rule, but FedALA does not use it"):
        simulation_of(local=FedALA(), strategy=Scaffold()).run()
    with pytest.raises(ConfigError, match=r"strategy=FedNova.*local=FedALA"):
        simulation_of(local=FedALA(), strategy=FedNova())
